"""Tests that whatever would fail later is reported in one line before any training."""

import socket

import pytest

from tests.fixtures import Patch, parametrize
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import FOREVER, Fault, Proxy
from trainer.base.errors import PlatformFault, UserError
from trainer.base.storage import gcs, staging


def test_all_is_well_and_nothing_stays(bucket: Bucket) -> None:
    bucket.put("d/x", b"1")
    staging.preflight(
        {"data": bucket.url("d"), "weights": bucket.url("d/x")}, {"job_dir": bucket.url("runs/7")}
    )
    staging.preflight({"data": "digits"}, {"job_dir": f"/gcs/{bucket.name}/runs/7"})
    assert bucket.names() == ["d/x"]
    staging.preflight({"data": "digits"}, {"job_dir": "runs/demo"})


@parametrize(
    "fault, line",
    [
        (
            Fault(403, "GET", "/o?", FOREVER),
            "data=gs://BUCKET/d: gs://BUCKET/d: no permission to list its objects",
        ),
        (Fault("stall", "GET", "/o?", FOREVER), "request to Cloud Storage failed"),
        (Fault(403, "POST", "/upload/", FOREVER), "job_dir=gs://BUCKET/runs: "),
        (Fault(403, "DELETE", "/o/", FOREVER), "job_dir=gs://BUCKET/runs: "),
    ],
)
def test_each_failure_is_a_line(
    bucket: Bucket, proxy: Proxy, fault: Fault, line: str, monkeypatch: Patch
) -> None:
    bucket.put("d/x", b"1")
    monkeypatch.setattr(
        staging, "_LIMITS", gcs.TransferLimits(retry=1, pause=0.5, connect=1, read=1)
    )
    proxy.faults.append(fault)
    kind = PlatformFault if "failed" in line else UserError
    with pytest.raises(kind) as caught:
        staging.preflight({"data": bucket.url("d")}, {"job_dir": bucket.url("runs")})
    assert line.replace("BUCKET", bucket.name) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_service_that_never_answers(monkeypatch: Patch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(staging, "SECONDS", 0.5)
        with pytest.raises(PlatformFault, match="no response within 0 seconds: check the network"):
            staging.preflight({"data": "gs://bucket/x"}, {})
