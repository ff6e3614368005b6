"""Tests that gcloud and the SDK behave alike against the same service, and create at most one job
per call."""

from pathlib import Path

import pytest

from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.errors import describe_error
from deploy.platform.gcloud_and_sdk import Gcloud
from deploy.platform.rest import Platform
from deploy.platform.vertex_api import CustomJob
from deploy.tiers.gcp_config import GcpConfig
from tests.deploy.conftest import is_alive, stand_in
from tests.deploy.emulator import Emulator, Fault
from tests.fixtures import Patch
from tests.support import refused
from tests.workers import until

POOL = {
    "machineSpec": {
        "machineType": "g2-standard-12",
        "acceleratorType": "NVIDIA_L4",
        "acceleratorCount": 1,
    },
    "replicaCount": 1,
    "containerSpec": {"imageUri": "x", "args": ["--steps=5", "--data=a,b"]},
}
SPEC = {"workerPoolSpecs": [POOL], "scheduling": {"strategy": "SPOT", "timeout": "3600s"}}
PARENT = "projects/my-proj/locations/us-central1"
KEY = f"{PARENT}/keyRings/r/cryptoKeys/k"
REQUEST = CustomJob("a job", SPEC, {"submission": "s1", "usd-per-hour": "1-5"}, KEY)


def test_a_job_is_sent_as_it_was_requested(backend: Platform, cloud: Emulator) -> None:
    name = backend.create(REQUEST)
    job = cloud.jobs[name.rsplit("/", 1)[-1]]
    assert job["displayName"] == REQUEST.display_name
    assert job["labels"] == REQUEST.labels
    assert job["encryptionSpec"] == {"kmsKeyName": KEY}
    sent = job["jobSpec"]["workerPoolSpecs"][0]
    for key in ("machineSpec", "containerSpec"):
        assert sent[key] == POOL[key]
    assert job["jobSpec"]["scheduling"] == SPEC["scheduling"]
    assert backend.get(name).state == "PENDING"
    assert backend.get(name).started is None


def test_a_package_is_stored_once_whatever_built_it(cloud: Emulator, tmp_path: Path) -> None:
    """The address names the sources; other tool versions may build different bytes from them."""
    wheel = tmp_path / "a.whl"
    uri = "gs://my-bucket/packages/x/a.whl"
    first = bytes(range(256)) * 40
    for content in (first, b"of another machine"):
        wheel.write_bytes(content)
        buckets.upload(wheel, uri)
        assert cloud.objects["my-bucket/packages/x/a.whl"] == first


def test_the_location_of_a_bucket_may_be_hidden(cloud: Emulator) -> None:
    cloud.bucket_location = "EUROPE-WEST4"
    assert buckets.location("gs://my-bucket") == "EUROPE-WEST4"
    cloud.faults = [Fault("GET /storage/v1/b/my-bucket$", 403, times=9)]
    assert buckets.location("gs://my-bucket") == ""


def test_whether_an_object_exists(cloud: Emulator) -> None:
    cloud.objects = {"my-bucket/photos/a.png": b"a", "my-bucket/data.npz": b"b"}
    found = [
        buckets.exists(f"gs://my-bucket{name}")
        for name in ("/photos", "/photo", "/data.npz", "/data", "")
    ]
    assert found == [True, False, True, False, True]
    cloud.objects = {}
    assert not buckets.exists("gs://my-bucket")
    cloud.faults = [Fault("GET /storage/v1/b/my-bucket", 403, times=9)]
    assert buckets.exists("gs://my-bucket/photos")  # the job's account must read it, not this one


def test_a_missing_gcloud_names_the_download(monkeypatch: Patch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with refused("gcloud is not installed"):
        Gcloud("my-proj", "us-central1").create(REQUEST)


def test_a_gcloud_that_hangs_is_killed_with_its_children(monkeypatch: Patch) -> None:
    """Its output so far is ignored."""
    stand_in('sleep 20 &\necho $! > child\necho "ERROR: not found" >&2\nwait', monkeypatch)
    monkeypatch.setattr("deploy.platform.gcloud_and_sdk.COMMAND_TIMEOUT_S", 1.0)
    with pytest.raises(ApiError, match="gcloud was killed by signal 9") as caught:
        Gcloud("my-proj", "us-central1").create(REQUEST)
    assert caught.value.code == 0
    assert caught.value.transient
    until(lambda: not is_alive(Path("child").read_text().strip()), 2)


@pytest.mark.parametrize(
    ("message", "retried"),
    [
        ("gcloud failed to load (gcloud.ai): No module named 'yaml'\n\nThis usually", False),
        ("gcloud crashed (TypeError): 'NoneType' object is not iterable", False),
        ("gcloud crashed (ConnectTimeout): HTTPSConnectionPool(host='h', port=443)", True),
    ],
)
def test_a_broken_gcloud_is_final(message: str, retried: bool, monkeypatch: Patch) -> None:
    """Without a network gcloud also prints that it crashed,
    https://github.com/XX-net/XX-Net/issues/13999"""
    stand_in(f"cat >&2 <<'END'\nERROR: {message}\nEND\nexit 1", monkeypatch)
    with pytest.raises(ApiError) as caught:
        Gcloud("my-proj", "us-central1").create(REQUEST)
    assert caught.value.transient == retried
    line = describe_error(caught.value, GcpConfig("my-proj", "us-central1", ""))
    assert line.startswith(message.splitlines()[0])
    assert ("reinstall it" in line) != retried
