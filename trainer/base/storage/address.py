"""Parses paths into local paths and Cloud Storage addresses, and suggests corrections for typos."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import UserError

# Where Vertex AI mounts buckets:
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/cloud-storage-fuse
MOUNT = "/gcs/"

_INTENDED = re.compile(
    r"(?:gc?s:(?=.*/)/*|https?://storage\.(?:cloud\.google|googleapis)\.com/+)(.*)", re.DOTALL | re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Address:
    """Represents gs://bucket/name. A folder's name has no trailing slash; a whole bucket has an empty name."""

    bucket: str
    name: str

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.name}"

    def __truediv__(self, below: str) -> "Address":
        return Address(self.bucket, f"{self.name}/{below}" if self.name else below)

    @property
    def prefix(self) -> str:
        """Returns the common prefix of the names of all objects below this address."""
        return f"{self.name}/" if self.name else ""


def is_remote(path: str) -> bool:
    """Returns whether `path` is, or was intended to be, an address and not a local path."""
    return "://" in path or bool(_INTENDED.match(path))


def parse(path: str, name: str) -> Address | None:
    """Returns the address in `path`, None for a local path. Raises UserError, naming the setting `name`, for a typo."""
    if not is_remote(path):
        return None
    if not path.startswith("gs://") or path.startswith("gs:///"):
        if intended := _INTENDED.match(path):
            raise UserError(f"{name}={path}: not an address: did you mean gs://{intended[1] or 'BUCKET/…'}?")
        raise UserError(f"{name}={path}: must be a local path, gs://BUCKET/… or /gcs/BUCKET/…")
    bucket, _, rest = path.removeprefix("gs://").partition("/")
    # https://cloud.google.com/storage/docs/buckets#naming
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
        raise UserError(
            f"{name}={path}: {bucket!r} is not a valid bucket name: use 3 to 63 lower-case letters, digits, - _ and ., "
            "with a letter or digit first and last, as in gs://my-bucket/photos"
        )
    return Address(bucket, rest.rstrip("/"))


def output_address(path: str, name: str) -> Address | None:
    """Parses a path to write to: /gcs/BUCKET/… becomes gs://BUCKET/…, because writing to the mount is not reliable."""
    return parse(f"gs://{path.removeprefix(MOUNT)}" if path.startswith(MOUNT) else path, name)


def local_path(path: str, name: str) -> Path:
    """Returns `path` as a local Path. Raises UserError, naming the setting `name`, for an address."""
    if parse(path, name):
        raise UserError(f"{name}={path}: only local paths are supported here: use a local folder")
    return expanded(path)


def expanded(path: str) -> Path:
    """Returns `path` with a leading `~` expanded to the home folder, unchanged if no user has that name."""
    return Path(os.path.expanduser(path))
