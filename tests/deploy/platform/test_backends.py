"""Tests that gcloud and the SDK behave alike against the same service, and create at most one job
per call."""

from pathlib import Path

import pytest

from deploy.platform import buckets
from deploy.platform.errors import describe_error
from deploy.platform.gcloud_and_sdk import Gcloud
from deploy.platform.rest import Platform
from deploy.platform.retries import ApiError
from deploy.platform.vertex_api import CustomJob
from deploy.tiers.gcp_config import GcpConfig
from tests.deploy.conftest import is_alive, needs_gcloud, stand_in
from tests.deploy.emulator import RATE, Emulator, Fault
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
    assert (job["displayName"], job["labels"], job["encryptionSpec"]) == (
        REQUEST.display_name,
        REQUEST.labels,
        {"kmsKeyName": KEY},
    )
    sent = job["jobSpec"]["workerPoolSpecs"][0]
    assert {key: sent[key] for key in ("machineSpec", "containerSpec")} == {
        key: POOL[key] for key in ("machineSpec", "containerSpec")
    }
    assert job["jobSpec"]["scheduling"] == SPEC["scheduling"]
    assert (backend.get(name).state, backend.get(name).started) == ("PENDING", None)


@pytest.mark.parametrize("backend", ["sdk"], indirect=True)  # both read by one client
def test_only_jobs_of_this_package_are_listed_and_found_by_submission(
    backend: Platform, cloud: Emulator
) -> None:
    names = [
        cloud.create(PARENT, {"displayName": "x", "jobSpec": SPEC, "labels": labels})["name"]
        for labels in (
            {"submission": "s1"},
            {"submission": "s2"},
            {"other": "s1"},
            {"submission": "s3"},
            {},
        )
    ]
    assert {status.name for status in backend.jobs()} == {names[0], names[1], names[3]}
    assert [status.name for status in backend.jobs("s2")] == [names[1]]
    assert backend.jobs("s4") == []


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


REJECTED = [
    *(("sdk", code) for code in (400, 401, 403, 404, 429)),
    pytest.param("gcloud", 403, marks=needs_gcloud),
]


@pytest.mark.parametrize(("backend", "code"), REJECTED, indirect=["backend"])
def test_a_rejected_request_has_its_status(backend: Platform, cloud: Emulator, code: int) -> None:
    cloud.faults = [Fault("POST .*/customJobs$", code, times=9, message="not like this")]
    with pytest.raises(ApiError) as caught:
        backend.create(REQUEST)
    assert caught.value.code == code
    assert caught.value.transient == (code == 429)
    assert not caught.value.may_have_succeeded
    assert cloud.jobs == {}
    assert "not-a-secret" not in str(caught.value)
    assert not str(caught.value).startswith("POST ")


@pytest.mark.parametrize(
    ("message", "quota"),
    [
        (RATE, False),
        ("Quota exceeded: RATE_LIMIT_EXCEEDED", False),
        ("Quota exceeded for limit 'Queries per 100 seconds'", False),
        ("Too many requests", False),
        (
            (
                "The following quota metrics exceed quota limits:"
                " aiplatform.googleapis.com/custom_model_training_cpus"
            ),
            True,
        ),
    ],
)
def test_a_rate_limit_is_no_exhausted_machine_quota(message: str, quota: bool) -> None:
    error = ApiError(429, message)
    assert (error.quota, error.transient) == (quota, not quota)


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


def test_a_gcloud_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Its output so far is ignored."""
    stand_in(
        tmp_path,
        f'sleep 20 &\necho $! > "{tmp_path}/child"\necho "ERROR: not found" >&2\nwait',
        monkeypatch,
    )
    monkeypatch.setattr("deploy.platform.gcloud_and_sdk.COMMAND_TIMEOUT_S", 1.0)
    with pytest.raises(ApiError, match="gcloud was killed by signal 9") as caught:
        Gcloud("my-proj", "us-central1").create(REQUEST)
    assert (caught.value.code, caught.value.transient) == (0, True)
    until(lambda: not is_alive((tmp_path / "child").read_text().strip()), 2)


@pytest.mark.parametrize(
    ("message", "retried"),
    [
        (
            (
                "gcloud failed to load (gcloud.ai): No module named 'yaml'\n\nThis usually"
                " indicates corruption"
            ),
            False,
        ),
        ("gcloud failed to load. You are running gcloud with Python 3.8", False),
        ("gcloud crashed (TypeError): 'NoneType' object is not iterable", False),
        (
            (
                "gcloud crashed (ConnectTimeout): HTTPSConnectionPool(host='oauth2.googleapis.com',"
                " port=443)"
            ),
            True,
        ),
    ],
)
def test_a_broken_gcloud_is_final(
    message: str, retried: bool, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Without a network gcloud also prints that it crashed,
    https://github.com/XX-net/XX-Net/issues/13999"""
    stand_in(tmp_path, f"cat >&2 <<'END'\nERROR: {message}\nEND\nexit 1", monkeypatch)
    with pytest.raises(ApiError) as caught:
        Gcloud("my-proj", "us-central1").create(REQUEST)
    assert caught.value.transient == retried
    line = describe_error(caught.value, GcpConfig("my-proj", "us-central1", ""))
    assert line.startswith(message.splitlines()[0])
    assert ("reinstall it" in line) != retried
