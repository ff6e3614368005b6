"""Proves to another process that both belong to one job, without sending the secret that they share.

Each side sends a random challenge and answers that of the other with an HMAC: https://www.rfc-editor.org/rfc/rfc2104
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.distribution.cluster import Cluster
from trainer.errors import UserError

SECRET = "TRAINER_CLUSTER_SECRET"  # noqa: S105 (a variable's name, which `python -m deploy local` sets)
_SHORTEST, _LONGEST = 16, 4096  # bytes of a secret file


@dataclass(frozen=True)
class Secret:
    """Holds the key of one job."""

    key: bytes

    def proof(self, role: str, index: int, challenge: str, own: str) -> str:
        """Returns the answer of `role` to `challenge`; `own` is the challenge that this side has sent."""
        content = "\n".join((role, str(index), challenge, own))
        return hmac.new(self.key, content.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()

    def accepts(self, given: object, role: str, index: int, challenge: str, own: str) -> bool:
        """Returns whether `given` is that answer."""
        wanted = self.proof(role, index, challenge, own)
        return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def new_challenge() -> str:
    """Returns a random text that is used once."""
    return secrets.token_hex(16)


def secret_of(cluster: Cluster, file: str = "", environment: Mapping[str, str] = os.environ) -> Secret:
    """Returns the secret of the job: from `file`, or TRAINER_CLUSTER_SECRET; else from the job's id and addresses.

    The last can be guessed by who knows the id and the addresses: docs/security.md. Raises UserError for a file that
    cannot be read or is too short.
    """
    given = _read(file) if file else environment.get(SECRET, "").encode(errors="surrogateescape")
    source = given or environment.get("CLOUD_ML_JOB_ID", "").encode(errors="surrogateescape")
    return Secret(hashlib.sha256(b"\n".join((source, *map(str.encode, cluster.addresses)))).digest())


def _read(file: str) -> bytes:
    try:
        with open(Path(file).expanduser(), "rb") as opened:
            content = opened.read(_LONGEST).strip()
    except OSError as error:
        raise UserError(
            f"cluster_secret_file={file}: cannot be read ({error.strerror}): use a file with the same text on all "
            "workers"
        ) from None
    if len(content) < _SHORTEST:
        raise UserError(
            f"cluster_secret_file={file}: {len(content)} bytes are too few: use {_SHORTEST} or more random ones, as of "
            "`openssl rand -hex 32`"
        )
    return content
