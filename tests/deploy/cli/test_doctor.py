"""Tests `deploy doctor` against emulated services in which one thing after the other is missing."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cli import doctor
from tests.deploy.conftest import Command
from tests.deploy.emulated_storage import Match
from tests.deploy.emulator import _ROUTES, Emulator, Fault, Response
from tests.fixtures import Json, Patch

PROJECT = "/projects/my-proj"
L4 = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"


ALL: Json = {
    "apis": [*doctor.NEEDED_APIS, *doctor.APIS_OF_IMAGES],
    "permissions": [*doctor.ROLES],
    "objects": [*doctor.OBJECTS],
    "state": "ACTIVE",
    "bucket": True,
    "quota": [
        {"effectiveLimit": "0"},
        {"effectiveLimit": "4", "dimensions": {"region": "us-central1"}},
    ],
}
# what the project and the account have; a test takes one thing away
ACCOUNT = SimpleNamespace(**ALL)


def _services(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    states = {api: "ENABLED" if api in ACCOUNT.apis else "DISABLED" for api in ALL["apis"]}
    return 200, {
        "services": [
            {"name": f"projects/1/services/{api}", "state": state} for api, state in states.items()
        ]
    }


def _objects(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    return (200, {"permissions": ACCOUNT.objects}) if ACCOUNT.bucket else (404, {})


def _quotas(google: Emulator, match: Match, query: Any, body: bytes) -> Response:
    """In two pages, as the service may."""
    if "pageToken" not in query:
        return 200, {
            "metrics": [{"metric": "aiplatform.googleapis.com/other"}],
            "nextPageToken": "2",
        }
    return 200, {
        "metrics": [{"metric": L4, "consumerQuotaLimits": [{"quotaBuckets": ACCOUNT.quota}]}]
    }


_ROUTES |= {
    rf"GET /v1{PROJECT}": lambda *_: (
        200,
        {"projectId": "my-proj", "lifecycleState": ACCOUNT.state},
    ),
    rf"POST /v1{PROJECT}:testIamPermissions": lambda *_: (
        200,
        {"permissions": ACCOUNT.permissions},
    ),
    rf"GET /v1{PROJECT}/services:batchGet": _services,
    r"GET /storage/v1/b/my-bucket/iam/testPermissions": _objects,
    rf"GET /v1beta1{PROJECT}/services/aiplatform.googleapis.com/consumerQuotaMetrics": _quotas,
}


@pytest.fixture
def account(cloud: Emulator, monkeypatch: Patch) -> SimpleNamespace:
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "you@example.com")
    vars(ACCOUNT).update(ALL)
    return ACCOUNT


DOCTOR = ["doctor", "--region=us-central1", "--bucket=gs://my-bucket"]


@pytest.mark.usefixtures("account")
def test_all_is_good(typed: Command) -> None:
    text = typed(*DOCTOR, "l4x4")
    assert {line.split()[0] for line in text.splitlines()} == {"good"}
    assert f"quota of l4x4: 4 of {L4} in us-central1, and it needs 4" in text
    assert "bucket's region: US-CENTRAL1" in text
    assert "quota: NVIDIA_L4 4 in us-central1" in typed(*DOCTOR)


BINDING = "gcloud projects add-iam-policy-binding my-proj --member=user:you@example.com --role="


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("state", "DELETE_REQUESTED", "project: my-proj is DELETE_REQUESTED"),
        (
            "apis",
            [*doctor.NEEDED_APIS[1:], *doctor.APIS_OF_IMAGES],
            "aiplatform.googleapis.com: it is off: `gcloud services enable aiplatform.googlea",
        ),
        (
            "permissions",
            [*doctor.ROLES][1:],
            "roles/aiplatform.user: aiplatform.customJobs.create is not granted:",
        ),
        ("permissions", [*doctor.ROLES][:-1], f"is not granted: `{BINDING}roles/logging.viewer`"),
        ("bucket", False, "`gcloud storage buckets create gs://my-bucket --location=us-central1"),
        ("objects", [*doctor.OBJECTS[:3]], "bucket: storage.objects.delete is not granted: `gcl"),
        ("quota", [{"effectiveLimit": "1"}], "and it needs 4: request more at https://console."),
    ],
)
def test_what_is_missing_is_one_bad_line_with_the_command(
    name: str, value: Any, line: str, account: SimpleNamespace, typed: Command
) -> None:
    setattr(account, name, value)
    text = typed(*DOCTOR, "l4x4", code=2)
    (bad,) = re.findall("(?m)^bad .*", text)
    assert line in bad


def test_images_need_apis_of_their_own_and_closed_interfaces_are_unknown(
    account: SimpleNamespace, cloud: Emulator, typed: Command
) -> None:
    account.apis = [*doctor.NEEDED_APIS]
    off = "API has not been used in project 1: cloudresourcemanager.googleapis.com"
    cloud.faults = [Fault(rf"/v1{PROJECT}(:|$)", 403, times=2, message=off)]
    text = typed(*DOCTOR)
    assert "off, and needed for images of your own alone: `gcloud services enable" in text
    assert len(re.findall("(?m)^unknown (project|roles): ", text)) == 2
    assert "`gcloud services enable cloudresourcemanager.googleapis.com --project=my-proj`" in text


@pytest.mark.usefixtures("account")
def test_without_a_login_a_project_or_a_near_bucket(
    cloud: Emulator, monkeypatch: Patch, typed: Command
) -> None:
    error = typed(*DOCTOR, "--region=mars-1", code=2)
    assert "bad     region: mars-1 has no training of Vertex AI" in error
    cloud.bucket_location = "US-EAST1"
    assert "us-central1 pay for what they read" in typed(*DOCTOR)
    cloud.bucket_location = "EU"
    assert "data would cross continents" in typed(*DOCTOR, code=2)
    cloud.accounts = {}
    assert "bad     login: nobody is logged in" in typed(*DOCTOR, code=2)
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    assert "bad     project: none is named" in typed(*DOCTOR, code=2)
