"""Tests that one login does for everything: gcloud's alone, or application default credentials
alone."""

import importlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth.exceptions import DefaultCredentialsError

from deploy.platform import buckets
from deploy.platform.api_error import ApiError
from deploy.platform.errors import describe_error
from deploy.platform.gcloud_and_sdk import Gcloud, Sdk
from deploy.platform.rest import Platform
from deploy.tiers.gcp_config import GcpConfig
from tests.deploy.conftest import Command, FlyingClock, needs_gcloud, run, stand_in
from tests.deploy.emulator import Emulator
from tests.deploy.platform.test_backends import REQUEST
from tests.fixtures import Patch
from tests.support import refused
from trainer.base.storage import gcs, login
from trainer.base.storage.local_files import Address

DESK = "desk@my-proj.iam.gserviceaccount.com"
OTHER = "other@my-proj.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, plain, serialization.NoEncryption()).decode()


Key = Callable[[str], str]


@pytest.fixture
def key(cloud: Emulator, tmp_path: Path, private_key: str, monkeypatch: Patch) -> Key:
    """Returns a function that writes an account's key file. From now on nobody is logged in, and
    everybody must be."""
    cloud.accounts = {}
    for name in (
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
        "STORAGE_EMULATOR_HOST",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("API_ENDPOINT_OVERRIDE", cloud.url)  # of google-cloud-storage
    monkeypatch.setenv("CLOUDSDK_AUTH_TOKEN_HOST", f"{cloud.url}/token")
    monkeypatch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_IAMCREDENTIALS", f"{cloud.url}/")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    # newer versions of google-auth look for restrictions at Google's, in a thread
    with suppress(ModuleNotFoundError):
        boundaries = importlib.import_module("google.auth._regional_access_boundary_utils")
        monkeypatch.setattr(boundaries, "_get_domain", lambda *_: "127.0.0.1:1")
    gcs._connect.cache_clear()
    login._credentials.cache_clear()

    def written(account: str) -> str:
        about = {"type": "service_account", "project_id": "my-proj", "private_key_id": "x"}
        about |= {"private_key": private_key, "client_email": account}
        file = tmp_path / f"{account}.json"
        file.write_text(json.dumps({**about, "token_uri": f"{cloud.url}/token"}))
        return str(file)

    return written


@pytest.fixture
def gcloud_alone(key: Key) -> None:
    """Logs in to the real gcloud."""
    done = run(["gcloud", "auth", "activate-service-account", f"--key-file={key(DESK)}", "--quiet"])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def default_alone(key: Key, monkeypatch: Patch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", key(DESK))


@pytest.mark.slow
@needs_gcloud
@pytest.mark.parametrize(("login", "kind"), [("gcloud_alone", Sdk), ("default_alone", Gcloud)])
def test_one_login_alone_does_everything(
    login: str,
    kind: type[Platform],
    request: pytest.FixtureRequest,
    cloud: Emulator,
    tmp_path: Path,
    flying: FlyingClock,
    typed: Command,
) -> None:
    """Uploads, submits and watches, while the token expires in each of them; no token is printed,
    logged or kept."""
    request.getfixturevalue(login)
    backend = kind("my-proj", "us-central1")
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(b"wheel")
    cloud.expires_at = "POST .*upload"
    buckets.upload(wheel, "gs://my-bucket/a.whl")
    assert cloud.objects["my-bucket/a.whl"] == b"wheel"
    cloud.expires_at = "GET .*/o$"
    assert [item.size for item in gcs.connect().list(Address("my-bucket", ""))] == [5]
    name = backend.create(REQUEST)
    job = cloud.jobs[name.rsplit("/", 1)[-1]]
    cloud.begin(job)

    def asleep() -> None:
        cloud.accounts = {}
        if flying.slept > 3600 and job["state"] == "JOB_STATE_RUNNING":
            cloud.log(job, "the last words")
            cloud.end(job, "SUCCEEDED")

    flying.asleep = asleep
    flying.sleep(3595)
    shown = typed("watch", name, "--project=my-proj")
    assert "the last words" in shown
    files = Path(os.environ["CLOUDSDK_CONFIG"], "logs").rglob("*.log")
    logs = "".join(file.read_text() for file in files)
    assert "Loaded Command Group" in logs
    assert not re.search(r"secret-\d|PRIVATE KEY", shown + logs)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_file_with_a_token_is_a_login_too(
    cloud: Emulator, key: Key, tmp_path: Path, monkeypatch: Patch
) -> None:
    """As CI systems have it; the token is of an account that the emulator knows."""
    cloud.accounts = {"ci-token": DESK}
    file = tmp_path / "token"
    file.write_text("ci-token\n")
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(file))
    assert list(gcs.connect().list(Address("my-bucket", ""))) == []
    file.unlink()
    with pytest.raises(DefaultCredentialsError, match=r"access_token_file=.*No such file"):
        login.credentials(anew=True)


@needs_gcloud
@pytest.mark.usefixtures("gcloud_alone")
def test_an_impersonated_account_is_the_one_that_acts(cloud: Emulator, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CLOUDSDK_AUTH_IMPERSONATE_SERVICE_ACCOUNT", OTHER)
    assert login.gcloud_account() == OTHER
    gcs.connect().list(Address("my-bucket", ""))
    assert list(cloud.accounts.values())[-1] == OTHER


def test_a_token_is_in_a_file_of_ones_own_while_gcloud_runs(
    default_alone: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    script = (
        'stat -c %a "$CLOUDSDK_AUTH_ACCESS_TOKEN_FILE" >&2; cat "$CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"'
        " >&2; exit 1"
    )
    stand_in(script, monkeypatch)
    for number in (1, 2):  # a new token for each, because this one ends soon
        with pytest.raises(ApiError, match=f"600 secret-{number}$"):
            Gcloud("my-proj", "us-central1").create(REQUEST)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("printed", "line", "transient"),
    [
        (
            "ERROR: (gcloud.auth.print-access-token) There was a problem refreshing your",
            "or the login has expired (401): run `gcloud auth login`",
            False,
        ),
        (
            "ERROR: There was a problem refreshing: HTTPSConnectionPool(host='h', port=443): Max"
            " retries exceeded. Please run: gcloud auth login",
            "the service fails: try again later",
            True,
        ),
    ],
)
def test_a_network_that_fails_is_no_expired_login(
    printed: str, line: str, transient: bool, key: Key, monkeypatch: Patch
) -> None:
    """gcloud writes the same advice for both; a watch has to survive the second."""
    monkeypatch.setenv("CLOUDSDK_CORE_ACCOUNT", DESK)
    stand_in(f"cat >&2 <<'END'\n{printed}\nEND\nexit 1", monkeypatch)
    with pytest.raises(ApiError) as caught:
        Sdk("my-proj", "us-central1").jobs()
    assert caught.value.transient == transient
    assert line in describe_error(caught.value, GcpConfig("my-proj", "us-central1", ""))


def test_without_any_login_one_line_says_what_to_run(key: Key, monkeypatch: Patch) -> None:
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with refused("no valid Google credentials: run `gcloud auth login`, or set"):
        gcs.connect()
