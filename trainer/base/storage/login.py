"""Finds the login of this machine: application default credentials or gcloud's; either is enough
for all commands.

Python programs use application default credentials or, without them, a token of gcloud; gcloud uses
its own login or, without it, a token of the application default credentials, in a file. On Vertex
AI the metadata server answers for the job's account.
https://docs.cloud.google.com/docs/authentication/application-default-credentials
"""

import configparser
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from trainer.base.errors import reason, shortened

_TIMEOUT_S = 60.0  # of gcloud
# A token is valid for an hour at most, and gcloud may return an older one; a refused token is
# renewed anyway.
_LIFE = timedelta(minutes=30)
# What gcloud prints if the network fails, in the same sentence that asks for a new login.
_NETWORK = re.compile(
    r"ConnectionPool|Max retries|timed? ?out|[Cc]onnection|Failed to resolve|Unable to"
    r" reach|\b50[0-4]\b"
)


def credentials(anew: bool = False) -> Any:
    """Returns Google credentials for Python's client libraries.

    Raises GoogleAuthError (google.auth) without any login.

    `anew`: reads the login again, as after a refused token.
    """
    if anew:
        _credentials.cache_clear()
    # Cached for as long as these variables stay the same.
    variables = (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "CLOUDSDK_CONFIG",
        "CLOUDSDK_CORE_ACCOUNT",
        "GCE_METADATA_HOST",
        "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
    )
    return _credentials(*(os.environ.get(name, "") for name in variables))


@lru_cache(maxsize=4)
def _credentials(*_environment: str) -> Any:
    import google.auth
    from google.auth.credentials import Credentials
    from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
    from google.oauth2.credentials import Credentials as TokenCredentials

    # A token in a file, then application default credentials, then the login of gcloud.
    token_file = gcloud_property("auth", "access_token_file")  # CI systems set it, without gcloud
    if not _has_default_credentials() and token_file:
        try:
            return TokenCredentials(token=Path(token_file).read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            raise DefaultCredentialsError(
                f"access_token_file={token_file}: {reason(error)}"
            ) from None
    if _has_default_credentials() or not (gcloud_account() and shutil.which("gcloud")):
        return google.auth.default(scopes=("https://www.googleapis.com/auth/cloud-platform",))[0]
    lock = Lock()

    class GcloudCredentials(Credentials):
        token: str | None

        def refresh(self, request: Any) -> None:
            """Asks gcloud for a token, also for an account that it impersonates.

            Threads that wait for it get the same one. Raises RefreshError if a new login is needed,
            TransportError if a retry may help.
            """
            refused = self.token
            with lock:
                if self.token is not refused and self.valid:
                    return
                try:
                    # gcloud's log file would hold the token.
                    process = subprocess.run(
                        ["gcloud", "auth", "print-access-token", "--quiet"],
                        env={**os.environ, "CLOUDSDK_CORE_DISABLE_FILE_LOGGING": "1"},
                        capture_output=True,
                        text=True,
                        timeout=_TIMEOUT_S,
                        stdin=subprocess.DEVNULL,
                    )
                except (OSError, subprocess.TimeoutExpired) as error:
                    raise TransportError(f"gcloud gives no token: {reason(error)}") from None
                if process.returncode or not process.stdout.strip():
                    text = process.stderr
                    line = shortened(text[max(text.rfind("ERROR:"), 0) :]) or "it printed none"
                    kind = TransportError if _NETWORK.search(text) else RefreshError
                    raise kind(f"gcloud gives no token: {line}")
                self.token = process.stdout.strip()
                self.expiry = (datetime.now(UTC) + _LIFE).replace(tzinfo=None)

    return GcloudCredentials()


def login_command() -> str:
    """Returns the command that renews the login which Python programs use."""
    if _has_default_credentials():
        return "gcloud auth application-default login"
    return "gcloud auth login"


def _has_default_credentials() -> bool:
    return (
        bool(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"))
        or (_gcloud_folder() / "application_default_credentials.json").is_file()
    )


def gcloud_account() -> str:
    """Returns the account that gcloud's commands act as; empty if nobody is logged in to gcloud."""
    impersonated = gcloud_property("auth", "impersonate_service_account").split(",")[-1]
    return impersonated or gcloud_property("core", "account")


@contextmanager
def gcloud_environment() -> Iterator[dict[str, str]]:
    """Yields the environment for gcloud, with a token of application default credentials if needed.

    The token is in a file that only this user may read, and that is removed at the end of the
    block. Raises google.auth.exceptions.GoogleAuthError if application default credentials give no
    token.
    """
    keys = ("access_token_file", "credential_file_override")
    configured = any(gcloud_property("auth", key) for key in keys)
    if configured or gcloud_account() or not _has_default_credentials():
        yield dict(os.environ)
        return
    with tempfile.TemporaryDirectory(prefix="gcloud-") as folder:  # of mode 0700
        file = Path(folder, "token")
        from google.auth.transport.requests import Request

        login = credentials()
        if not login.valid:  # it has expired, or will soon
            login.refresh(Request())
        with open(
            os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii"
        ) as opened:
            opened.write(str(login.token))
        yield {**os.environ, "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE": str(file)}


def gcloud_property(section: str, key: str) -> str:
    """Returns a property of gcloud's active configuration; empty if it is not set.

    Reads the files, because running gcloud takes half a second:
    https://cloud.google.com/sdk/docs/configurations
    """
    if value := os.environ.get(f"CLOUDSDK_{section.upper()}_{key.upper()}"):
        return value
    folder = _gcloud_folder()
    properties = configparser.ConfigParser(interpolation=None)
    try:
        active = (
            os.environ.get("CLOUDSDK_ACTIVE_CONFIG_NAME")
            or (folder / "active_config").read_text().strip()
        )
        properties.read(folder / "configurations" / f"config_{active}")
    except (OSError, UnicodeDecodeError, configparser.Error):
        return ""
    return properties.get(section, key, fallback="")


def _gcloud_folder() -> Path:
    return Path(os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config/gcloud")
