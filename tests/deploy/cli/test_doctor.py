"""Tests `deploy doctor` against emulated services in which one thing after the other is missing."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cli import doctor
from deploy.platform.gcloud_and_sdk import Session
from tests.deploy.conftest import Capture
from tests.deploy.emulator import _ROUTES, Emulator, Fault, Response

PROJECT = "/projects/my-proj"
L4 = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"


ALL: dict[str, Any] = {
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


def _services(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    services = [*doctor.NEEDED_APIS, *doctor.APIS_OF_IMAGES]
    states = {api: "ENABLED" if api in ACCOUNT.apis else "DISABLED" for api in services}
    return 200, {
        "services": [
            {"name": f"projects/1/services/{api}", "state": state} for api, state in states.items()
        ]
    }


def _objects(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
    return (
        (200, {"permissions": ACCOUNT.objects})
        if ACCOUNT.bucket
        else (404, {"error": {"message": "no bucket"}})
    )


def _quotas(google: Emulator, match: re.Match[str], query: Any, body: bytes) -> Response:
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
def account(cloud: Emulator, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "you@example.com")
    vars(ACCOUNT).update(ALL)
    return ACCOUNT


def lines(session: Session, capsys: Capture, *words: str) -> tuple[int, str]:
    code = doctor.main(["--region=us-central1", "--bucket=gs://my-bucket", *words], session)
    return code, capsys.readouterr().out


def test_all_is_good(account: SimpleNamespace, session: Session, capsys: Capture) -> None:
    code, text = lines(session, capsys, "l4x4")
    assert code == 0
    assert {line.split()[0] for line in text.splitlines()} == {"good"}
    assert f"quota of l4x4: 4 of {L4} in us-central1, and it needs 4" in text
    assert "bucket's region: US-CENTRAL1" in text
    code, text = lines(session, capsys)
    assert (code, "quota: NVIDIA_L4 4 in us-central1" in text) == (0, True)


BINDING = "gcloud projects add-iam-policy-binding my-proj --member=user:you@example.com --role="


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("state", "DELETE_REQUESTED", "bad     project: my-proj is DELETE_REQUESTED"),
        (
            "apis",
            [*doctor.NEEDED_APIS[1:], *doctor.APIS_OF_IMAGES],
            (
                "bad     aiplatform.googleapis.com: it is off: "
                "`gcloud services enable aiplatform.googleapis.com --project=my-proj`"
            ),
        ),
        (
            "permissions",
            [*doctor.ROLES][1:],
            (
                "roles/aiplatform.user: aiplatform.customJobs.create is not granted:"
                f" `{BINDING}roles/aiplatform.user`"
            ),
        ),
        ("permissions", [*doctor.ROLES][:-1], f"is not granted: `{BINDING}roles/logging.viewer`"),
        (
            "bucket",
            False,
            (
                "`gcloud storage buckets create gs://my-bucket --location=us-central1"
                " --project=my-proj`"
            ),
        ),
        (
            "objects",
            [*doctor.OBJECTS[:3]],
            "bad     bucket: storage.objects.delete is not granted: `gcloud storage",
        ),
        (
            "quota",
            [{"effectiveLimit": "1"}],
            "in us-central1, and it needs 4: request more at https://console.cloud",
        ),
    ],
)
def test_what_is_missing_is_one_bad_line_with_the_command(
    name: str, value: Any, line: str, account: SimpleNamespace, session: Session, capsys: Capture
) -> None:
    setattr(account, name, value)
    code, text = lines(session, capsys, "l4x4")
    assert (code, line in text) == (2, True), text
    assert len(re.findall("^bad", text, re.MULTILINE)) == 1


def test_images_need_apis_of_their_own_and_closed_interfaces_are_unknown(
    account: SimpleNamespace, cloud: Emulator, session: Session, capsys: Capture
) -> None:
    account.apis = [*doctor.NEEDED_APIS]
    off = (
        "Cloud Resource Manager API has not been used in project 1:"
        " cloudresourcemanager.googleapis.com"
    )
    cloud.faults = [Fault(rf"/v1{PROJECT}(:|$)", 403, times=2, message=off)]
    code, text = lines(session, capsys)
    assert code == 0
    assert (
        "off, and needed for images of your own alone: `gcloud services enable"
        " cloudbuild.googleapis.com" in text
    )
    assert len(re.findall("^unknown (project|roles): ", text, re.MULTILINE)) == 2
    assert "`gcloud services enable cloudresourcemanager.googleapis.com --project=my-proj`" in text


@pytest.mark.parametrize(
    ("prepare", "words", "line"),
    [
        (
            lambda cloud, patch: setattr(cloud, "accounts", {}),
            [],
            "bad     login: nobody is logged in",
        ),
        (
            lambda cloud, patch: patch.delenv("CLOUDSDK_CORE_PROJECT"),
            [],
            "bad     project: none is named",
        ),
        (
            lambda cloud, patch: None,
            ["--region=mars-1"],
            "bad     region: mars-1 has no training of Vertex AI",
        ),
        (
            lambda cloud, patch: setattr(cloud, "bucket_location", "EU"),
            [],
            "data would cross continents",
        ),
        (
            lambda cloud, patch: setattr(cloud, "bucket_location", "US-EAST1"),
            [],
            "us-central1 pay for what they read",
        ),
    ],
)
def test_without_a_login_a_project_or_a_near_bucket(
    prepare: Callable[..., None],
    words: list[str],
    line: str,
    account: SimpleNamespace,
    cloud: Emulator,
    session: Session,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(cloud, monkeypatch)
    code, text = lines(session, capsys, *words)
    assert (code, line in text) == (0 if "pay for" in line else 2, True), text
