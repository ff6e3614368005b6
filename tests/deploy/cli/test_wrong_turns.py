"""A user with a deadline: each wrong turn on the way to a submitted comparison is one line that
says what to do."""

from pathlib import Path

import pytest

from deploy.platform.api_error import ApiError
from deploy.platform.errors import describe_error, gcloud_error
from deploy.tiers.gcp_config import GcpConfig
from tests.deploy.conftest import BY_SDK, WHERE, Command
from tests.deploy.emulator import Emulator, Fault

JOB = ["--recipe=wgan_gp_digits", "--steps=4"]
PLACE = GcpConfig("my-proj", "us-central1", "gs://my-bucket")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (JOB, "TIER is missing: name one of job_configs/, as l4x4, or a machine"),
        (["l4x4", *JOB, "--bucket"], "--bucket has no value: write --bucket=VALUE"),
        (
            ["l4x4", *JOB, "--print_config"],
            "unknown flag --print_config. --help=all lists those of this verb",
        ),
        (["l4x4", *JOB, "--max_cost=-3"], "max_cost=-3.0 must be above 0 USD"),
        (
            ["l4x4", *JOB, "--early_stopping=critic"],
            "early_stopping=critic: wgan_gp can stop by critic_loss, gen",
        ),
        (
            ["l4x4", *JOB, *WHERE, "--project=My Project"],
            "project=My Project: use its ID, of lower-case letters",
        ),
        (
            ["l4x4", *JOB, "--data=photoz"],
            "data=photoz: no such data. Known: digits, mnist, fashion_mnist, cifar10, an",
        ),
        (["l4x4", *JOB], "region is missing: use --region=us-central1"),
        (["l4x4", *JOB, "--region=us-central1"], "bucket is missing: use --bucket=gs://NAME"),
        (["l4x4", *JOB, *WHERE], "project is missing: use --project=ID"),
    ],
)
def test_mistakes_of_the_command_come_before_those_of_the_account(
    arguments: list[str], line: str, refused: Command
) -> None:
    assert refused("submit", *arguments).startswith(f"error: {line}")


def test_a_bucket_that_is_not_there_is_told(cloud: Emulator, refused: Command) -> None:
    missing = "The specified bucket does not exist."
    cloud.faults = [Fault("GET /storage/v1/b/my-bucket$", 404, times=9, message=missing)]
    line = "gs://my-bucket/: bucket not found: check its name, or create it"
    assert line in refused("submit", "cpu", *BY_SDK)
    assert cloud.jobs == {}


@pytest.mark.parametrize("data", ["gs://my-bucket/photoz", "folder:gs://my-bucket/photoz"])
def test_data_that_are_not_there_cost_nothing(data: str, cloud: Emulator, refused: Command) -> None:
    cloud.objects["my-bucket/photos/a.png"] = b"a"
    line = "data=gs://my-bucket/photoz: no objects found: check with `gcloud storage l"
    flags = ["--backend=sdk", "--recipe=wgan_gp_photos", f"--data={data}"]
    assert line in refused("submit", "l4x4", *WHERE, *flags)
    assert cloud.jobs == {}


@pytest.mark.parametrize("verb", [["submit"], ["compare", "--on=vertex"]])
@pytest.mark.parametrize(
    ("data", "copied", "value"),
    [
        ("my photos/2026/", "'my photos/2026/'", "gs://BUCKET/2026"),
        ("folder:./photos", "./photos", "folder:gs://BUCKET/photos"),
    ],
)
def test_data_of_this_disk_are_told_the_way_to_the_cloud(
    verb: list[str], data: str, copied: str, value: str, refused: Command
) -> None:
    error = refused(*verb, "l4x4", *JOB, *WHERE, "--project=p", f"--data={data}")
    assert (
        "the job's machines cannot read this disk, only gs://BUCKET/… and /gcs/BUCKET/…: " in error
    )
    assert error.endswith(
        f"copy it with `gcloud storage cp -r {copied} gs://BUCKET/` and use --data={value}\n"
    )


LOGIN = "not logged in, or the login has expired (401): run `gcloud auth login`"


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (
            gcloud_error(
                1, "ERROR: (gcloud.ai) You do not currently have an active account selected."
            ),
            LOGIN,
        ),
        (gcloud_error(1, "ERROR: (gcloud.ai) UNAUTHENTICATED: The token is too old."), LOGIN),
        (ApiError(401, "of the SDK", "gcloud auth login"), LOGIN),
        (
            ApiError(403, "Permission 'logging.logEntries.list' denied"),
            "roles/logging.viewer on my-proj",
        ),
        (
            ApiError(403, "You do not have permission to act as service_account: s@p.iam"),
            "roles/iam.serviceAccountUser on the job's",
        ),
        (
            ApiError(403, "Permission 'aiplatform.customJobs.create' denied"),
            "roles/aiplatform.user on my-proj",
        ),
        (
            ApiError(
                403,
                "Cloud Logging API has not been used in project 1 before or it is disabled. Enable"
                " it by visiting "
                "https://console.developers.google.com/apis/api/logging.googleapis.com/overview?project=1",
            ),
            "`gcloud services enable logging.googleapis.com --project=my-proj`",
        ),
    ],
)
def test_a_refusal_names_the_login_or_the_role_that_is_missing(error: ApiError, cure: str) -> None:
    assert cure in describe_error(error, PLACE)


def test_a_disk_that_cannot_be_written_is_no_traceback(cloud: Emulator, refused: Command) -> None:
    Path("runs").write_text("a file where a folder belongs")
    line = "error: runs/submitted/.lock cannot be written: Not a directory: "
    assert refused("submit", "cpu", *JOB, *WHERE).startswith(line)
