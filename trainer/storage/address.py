"""What a path names: a local file or folder, or an address in Cloud Storage; and what a typo was meant to be."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError

MOUNT = "/gcs/"  # where Vertex AI mounts buckets: https://cloud.google.com/vertex-ai/docs/training/cloud-storage-fuse

_MEANT = re.compile(
    r"(?:gc?s:(?=.*/)/*|https?://storage\.(?:cloud\.google|googleapis)\.com/+)(.*)", re.DOTALL | re.IGNORECASE
)


@dataclass(frozen=True)
class Address:
    """gs://bucket/name. The name of a folder has no slash at its end; a whole bucket has an empty name."""

    bucket: str
    name: str

    def __str__(self) -> str:
        return f"gs://{self.bucket}/{self.name}"

    def __truediv__(self, below: str) -> "Address":
        return Address(self.bucket, f"{self.name}/{below}" if self.name else below)

    @property
    def prefix(self) -> str:
        """What the names of all objects below begin with."""
        return f"{self.name}/" if self.name else ""


def is_remote(path: str) -> bool:
    """Whether `path` is, or was meant to be, an address and not a local path."""
    return "://" in path or bool(_MEANT.match(path))


def parse(path: str, name: str) -> Address | None:
    """The address that `path` names, None for a local one; UserError, naming the setting `name`, for a typo."""
    if not is_remote(path):
        return None
    if not path.startswith("gs://") or path.startswith("gs:///"):
        meant = _MEANT.match(path)
        if meant:
            raise UserError(f"{name}={path}: not an address: did you mean gs://{meant[1] or 'BUCKET/…'}?")
        raise UserError(f"{name}={path}: only local paths, gs://BUCKET/… and /gcs/BUCKET/… can be reached")
    bucket, _, rest = path.removeprefix("gs://").partition("/")
    rule = _broken_rule(bucket)
    if rule:
        raise UserError(f"{name}={path}: {bucket!r} cannot be a bucket: {rule}, as in gs://my-bucket/photos")
    return Address(bucket, rest.rstrip("/"))


def _broken_rule(bucket: str) -> str:
    """https://cloud.google.com/storage/docs/buckets#naming"""
    if not 3 <= len(bucket) <= (222 if "." in bucket else 63):
        return "a name has 3 to 63 characters"
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*[a-z0-9]", bucket):
        return "lower-case letters, digits, - _ and . only, a letter or a digit first and last"
    return "a name is not an IP address" if re.fullmatch(r"\d+(\.\d+){3}", bucket) else ""


def output_address(path: str, name: str) -> Address | None:
    """As parse, for a place to write to: /gcs/BUCKET/… is gs://BUCKET/… there, for the mount does not write safely."""
    return parse(f"gs://{path.removeprefix(MOUNT)}" if path.startswith(MOUNT) else path, name)


def local_path(path: str, name: str) -> Path:
    """`path` as a local Path; UserError, naming the setting `name`, for an address."""
    if parse(path, name):
        raise UserError(f"{name}={path}: only local paths are read and written here: give a local folder")
    return expanded(path)


def expanded(path: str) -> Path:
    """`path` with the home folder for a `~` before it; as it stands where no user has that name."""
    return Path(os.path.expanduser(path))
