"""Makes gcloud's login usable by Google's Python clients: a refresh asks gcloud for a token."""

import os
import re
import subprocess
import threading
from datetime import datetime, timedelta, timezone
from typing import Any

from google.auth.credentials import Credentials
from google.auth.exceptions import GoogleAuthError, RefreshError, TransportError

from trainer.errors import reason, shortened

_TIMEOUT_S = 60.0
# A token lives an hour at most. gcloud may give one that it keeps since a while: a refused one is renewed anyway.
_LIFE = timedelta(minutes=30)


class GcloudCredentials(Credentials):
    """Holds a token of `gcloud auth print-access-token`, also of an account that gcloud impersonates."""

    def __init__(self) -> None:
        super().__init__()
        self.token: str | None = None
        self._lock = threading.Lock()

    def refresh(self, request: Any) -> None:
        """Asks gcloud for a token; threads that wait for one take that of the first. Raises RefreshError."""
        refused = self.token
        with self._lock:
            if self.token is refused or not self.valid:
                self.token = _ask()
                self.expiry = (datetime.now(timezone.utc) + _LIFE).replace(tzinfo=None)


def _ask() -> str:
    command = ["gcloud", "auth", "print-access-token", "--quiet"]
    environment = {**os.environ, "CLOUDSDK_CORE_DISABLE_FILE_LOGGING": "1"}  # its log would hold the token
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TransportError(f"gcloud gives no token: {reason(error)}") from None
    token = done.stdout.strip()
    if done.returncode or not token:
        raise _error(done.stderr)
    return token


# What gcloud writes if the network fails, in the same sentence that asks for a new login.
_NETWORK = re.compile(
    r"ConnectionPool|Max retries|timed? ?out|[Cc]onnection|Failed to resolve|Unable to reach|\b50[0-4]\b"
)


def _error(text: str) -> GoogleAuthError:
    """Returns RefreshError if a new login helps, TransportError if a retry may."""
    line = " ".join(text[text.rfind("ERROR:") :].split()) if "ERROR:" in text else shortened(text) or "it printed none"
    kind: type[GoogleAuthError] = TransportError if _NETWORK.search(text) else RefreshError
    return kind(f"gcloud gives no token: {shortened(line)}")
