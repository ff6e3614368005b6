"""Tests `deploy doctor` against emulated services in which one thing after the other is missing."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cli import doctor, submit
from deploy.platform.readiness import APIS_OF_IMAGES, NEEDED_APIS, OBJECTS, ROLES
from tests.deploy.conftest import BY_SDK
from tests.deploy.emulator import Emulator, Fault, ends
from tests.deploy.readiness_emulator import ACCOUNT, APIS, L4
from tests.fixtures import Capture


@pytest.fixture
def account(cloud: Emulator, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "you@example.com")
    ACCOUNT.quota = [
        {"effectiveLimit": "0"},
        {"effectiveLimit": "4", "dimensions": {"region": "us-central1"}},
    ]
    return ACCOUNT


def lines(capsys: Capture, *words: str) -> tuple[int, str]:
    code = doctor.main(["--region=us-central1", "--bucket=gs://my-bucket", *words])
    return code, capsys.readouterr().out


def test_all_is_good(account: SimpleNamespace, capsys: Capture) -> None:
    code, text = lines(capsys, "l4x4")
    assert code == 0
    assert {line.split()[0] for line in text.splitlines()} == {"good"}
    assert f"quota of l4x4: 4 of {L4} in us-central1, and it needs 4" in text
    assert "bucket's region: US-CENTRAL1" in text
    code, text = lines(capsys)
    assert (code, "quota: NVIDIA_L4 4 in us-central1" in text) == (0, True)


ENABLE = "`gcloud services enable {0} --project=my-proj`"
BINDING = "gcloud projects add-iam-policy-binding my-proj --member=user:you@example.com --role="
MISSING: dict[str, tuple[dict[str, Any], str]] = {
    "a login": ({"accounts": {}}, "login: nobody is logged in, or the login has expired: `gcloud"),
    "a project's name": ({}, "project: none is named: `gcloud config set project ID`"),
    "a region": (
        {},
        "region: mars-1 has no training of Vertex AI: `gcloud config set ai/region us-central1`",
    ),
    "a project": ({"state": "DELETE_REQUESTED"}, "project: my-proj is DELETE_REQUESTED"),
    **{
        api: ({"apis": {*APIS} - {api}}, f"{api}: it is off: {ENABLE.format(api)}")
        for api in NEEDED_APIS
    },
    "the right to create": (
        {"permissions": [*ROLES][1:]},
        "roles/aiplatform.user: aiplatform.customJobs.create is not granted:"
        f" `{BINDING}roles/aiplatform.user`",
    ),
    "the right to read logs": (
        {"permissions": [*ROLES][:-1]},
        "roles/logging.viewer: logging.logEntries.list is not granted:"
        f" `{BINDING}roles/logging.viewer`",
    ),
    "a bucket": (
        {"bucket": False},
        "bucket: gs://my-bucket does not exist: `gcloud storage buckets create gs://my-bucket"
        " --location=us-central1 --project=my-proj`",
    ),
    "the right to delete": (
        {"objects": [*OBJECTS[:3]]},
        "bucket: storage.objects.delete is not granted: `gcloud storage buckets"
        " add-iam-policy-binding gs://my-bucket --member=user:you@example.com"
        " --role=roles/storage.objectUser`",
    ),
    "a near bucket": ({"bucket_location": "EU"}, "bucket: gs://my-bucket is in EU, the job would"),
    "quota": (
        {"quota": [{"effectiveLimit": "1"}]},
        f"quota of l4x4: 1 of {L4} in us-central1, and it needs 4: request more at"
        " https://console.cloud.google.com/iam-admin/quotas?project=my-proj",
    ),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_missing_is_one_bad_line_with_the_command(
    what: str,
    account: SimpleNamespace,
    cloud: Emulator,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same line is a warning of `submit`, once there is a login, a project and a region."""
    taken, line = MISSING[what]
    for name, value in taken.items():
        setattr(account if hasattr(account, name) else cloud, name, value)
    if what == "a project's name":
        monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    region = ["--region=mars-1"] if what == "a region" else []
    code, text = lines(capsys, "l4x4", *region)
    (bad,) = [said for said in text.splitlines() if said.startswith("bad")]
    assert (code, bad.removeprefix("bad     ").startswith(line)) == (2, True), bad
    if taken and what not in ("a login", "a near bucket"):
        cloud.run = ends("SUCCEEDED")
        assert submit.main(["l4x4", *BY_SDK]) == 0
        assert f"warning: {bad}\n" in capsys.readouterr().out


def test_roles_are_given_to_a_service_account_as_such(
    account: SimpleNamespace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", "ci@my-proj.iam.gserviceaccount.com")
    account.permissions = [*ROLES][1:]
    account.objects = [*OBJECTS[:3]]
    _, text = lines(capsys)
    assert text.count("--member=serviceAccount:ci@my-proj.iam.gserviceaccount.com --role=") == 2


def test_a_bucket_of_another_region_costs(
    account: SimpleNamespace, cloud: Emulator, capsys: Capture
) -> None:
    cloud.bucket_location = "US-EAST1"
    code, text = lines(capsys)
    assert (code, "us-central1 pay for what they read" in text) == (0, True)


@pytest.mark.parametrize("api", APIS_OF_IMAGES)
def test_images_need_apis_of_their_own(api: str, account: SimpleNamespace, capsys: Capture) -> None:
    account.apis = {*APIS} - {api}
    code, text = lines(capsys)
    line = f"{api}: off, and needed for images of your own alone: {ENABLE.format(api)}"
    assert (code, f"good    {line}\n" in text) == (0, True)


def test_closed_interfaces_are_unknown(
    account: SimpleNamespace, cloud: Emulator, capsys: Capture
) -> None:
    off = (
        "Cloud Resource Manager API has not been used in project 1:"
        " cloudresourcemanager.googleapis.com"
    )
    cloud.faults = [Fault(r"/v1/projects/my-proj(:|$)", 403, times=2, message=off)]
    code, text = lines(capsys)
    assert code == 0
    assert len(re.findall("^unknown (project|roles): ", text, re.MULTILINE)) == 2
    assert "`gcloud services enable cloudresourcemanager.googleapis.com --project=my-proj`" in text
