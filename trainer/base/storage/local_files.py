"""Parses paths into local ones and addresses of Cloud Storage; writes local files atomically, and
locks folders."""

import fcntl
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.log import log

# Where Vertex AI mounts buckets:
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/cloud-storage-fuse
MOUNT = "/gcs/"

# Addresses in another form than gs://, as gcs://, gs:/ or https://storage.googleapis.com/.
_INTENDED = re.compile(
    r"(?:gc?s:(?=.*/)/*|https?://storage\.(?:cloud\.google|googleapis)\.com/+)(.*)",
    re.DOTALL | re.IGNORECASE,
)

# device and inode of this process's lock files -> descriptors, never closed
_LOCKED: dict[tuple[int, int], int] = {}


@dataclass(frozen=True, slots=True)
class Address:
    """Represents gs://bucket/name.

    A folder's name has no trailing slash; a whole bucket has an empty name.
    """

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
    """Returns the address in `path`, None for a local path.

    Raises UserError, naming the setting `name`, for a typo.
    """
    if not is_remote(path):
        return None
    if not path.startswith("gs://") or path.startswith("gs:///"):
        if intended := _INTENDED.match(path):
            raise UserError(
                f"{name}={path}: not an address: did you mean gs://{intended[1] or 'BUCKET/…'}?"
            )
        raise UserError(f"{name}={path}: must be a local path, gs://BUCKET/… or /gcs/BUCKET/…")
    bucket, _, rest = path.removeprefix("gs://").partition("/")
    # https://cloud.google.com/storage/docs/buckets#naming
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
        raise UserError(
            f"{name}={path}: {bucket!r} is not a valid bucket name: use 3 to 63 lower-case letters,"
            " digits, - _ and ., with a letter or digit first and last, as in"
            " gs://my-bucket/photos"
        )
    return Address(bucket, rest.rstrip("/"))


def output_address(path: str, name: str) -> Address | None:
    """Parses a path to write to: /gcs/BUCKET/… becomes gs://, as the mount is not reliable."""
    return parse(f"gs://{path.removeprefix(MOUNT)}" if path.startswith(MOUNT) else path, name)


def local_path(path: str, name: str) -> Path:
    """Returns `path` as a local Path.

    Raises UserError, naming the setting `name`, for an address.
    """
    if parse(path, name):
        raise UserError(f"{name}={path}: only local paths are supported here: use a local folder")
    return expanded(path)


def output_file(path: str, suffix: str) -> Path:
    """Returns the local file that `--out` names, and makes its folder.

    Raises UserError for an address, another suffix, and a folder that cannot be written to.
    """
    file = local_path(path, "out")
    if file.suffix != suffix:
        raise UserError(f"out={file}: use a name that ends in {suffix}")
    make_writable(file.parent, "out")
    return file


def expanded(path: str) -> Path:
    """Returns `path` with a leading `~` expanded, unchanged if there is no such user."""
    return Path(os.path.expanduser(path))


def make_writable(folder: Path, name: str) -> None:
    """Creates `folder` and writes a test file. Raises UserError if that fails."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(
            f"{name}={folder}: cannot write there ({reason}): use a folder that you can write to"
        ) from None


def lock_folder(folder: Path, flag: str, value: str) -> None:
    """Locks `folder` until this process ends. Raises UserError, naming the flag, if another has.

    Where the file system has no locks, as in some network folders, nothing is locked.
    """
    with writing(folder / ".lock"):
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) in _LOCKED:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{flag}={value}: another run is writing to it: wait, or use another --{flag}"
        ) from None
    except OSError:
        log.debug("%s: this file system has no locks", folder)
    _LOCKED[status.st_dev, status.st_ino] = descriptor


def is_locked(folder: Path) -> bool:
    """Returns whether another process has locked `folder` with `lock_folder`."""
    with suppress(OSError), open(folder / ".lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def cannot_write(path: Path, reason: str) -> UserError:
    """Returns the error for a full disk, a read-only folder, an impossible path and the like."""
    return UserError(
        f"{path} cannot be written: {reason}: free or repair the disk, or use another path, then"
        " run the same command again; files written earlier are intact"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError within the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error.strerror or str(error)) from error


def write_whole(path: Path, content: str | bytes | Callable[[Path], None]) -> None:
    """Writes a file atomically: a reader sees the old content or the new, never a part.

    content: text, bytes, or a function that writes to the path that it is given. Several processes
        may write the same file; the last one wins. Surrogate escapes in text become the bytes of
        the file name that they stand for. Raises UserError as `writing` does.
    """
    part = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.part")
    with writing(path):
        try:
            if callable(content):
                content(part)
            else:
                if isinstance(content, str):
                    content = content.encode(errors="surrogateescape")
                part.write_bytes(content)
            sync(part)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def remove_parts(folder: Path) -> None:
    """Removes unfinished files of ended processes of this machine from `folder`."""
    start = f"{os.uname().nodename}-"
    for part in folder.glob(".*.part"):
        owner = part.name.removesuffix(".part").rpartition(start)[2]
        if start in part.name and owner.isdecimal() and not is_running(owner):
            part.unlink(missing_ok=True)


def is_running(process: str) -> bool:
    """Returns whether this machine runs a process of this number; False for other text."""
    if not process.isdecimal() or int(process) == 0:  # 0 stands for the group of this process
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        pass
    return True


def sync(path: Path) -> None:
    """Flushes the file's content to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a scratch folder that replaces `folder` if the block succeeds, and else goes."""
    beside = folder.with_name(f".{folder.name}.part")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(beside, ignore_errors=True)
    with writing(folder):
        try:
            beside.mkdir(parents=True)
            yield beside
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(beside, folder)
    shutil.rmtree(old, ignore_errors=True)


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a local file, in hexadecimal digits."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
