"""Writes local files and folders atomically, and locks folders."""

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.base.errors import UserError

# Errors about the path, not about the disk.
_PATH_ERRORS = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
})  # fmt: skip
_LOCKED: dict[tuple[int, int], int] = {}  # device and inode of this process's lock files -> descriptors, never closed


def make_writable(folder: Path, name: str) -> None:
    """Creates `folder` and writes a test file. Raises UserError if that fails."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        reason = "not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{name}={folder}: cannot write there ({reason}): use a folder that you can write to") from None


def keep_others_out(folder: Path, flag: str, shown: str) -> None:
    """Locks `folder` until this process ends. Raises UserError, naming `flag` and `shown`, if another process has it.

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
        raise UserError(f"{flag}={shown}: another run is writing to it: wait, or use another --{flag}") from None
    except OSError:
        os.close(descriptor)
    else:
        _LOCKED[status.st_dev, status.st_ino] = descriptor


def is_locked(folder: Path) -> bool:
    """Returns whether another process has locked `folder` with `keep_others_out`."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def cannot_write(path: Path, reason: str) -> UserError:
    """Returns the error for a full disk, a folder that became read-only, and the like."""
    return UserError(
        f"{path} cannot be written: {reason}: free or repair the disk, then run the same command again; files written "
        "earlier are intact"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError within the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _PATH_ERRORS:
            raise UserError(
                f"{path} cannot be written: {reason}: use an existing path that you can write to"
            ) from error
        raise cannot_write(path, reason) from error


def write_whole(path: Path, content: str | bytes | Callable[[Path], None]) -> None:
    """Writes a file atomically: a reader sees the old content or the new, never a part. Raises UserError as `writing`.

    content: text, bytes, or a function that writes to the path that it is given. Several processes may write the same
    file; the last one wins. Surrogate escapes in text become the bytes of the file name that they stand for.
    """
    part = path.with_name(f".{path.name}.{os.uname().nodename}-{os.getpid()}.part")
    with writing(path):
        try:
            if callable(content):
                content(part)
            else:
                part.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
            sync(part)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def is_running(process: str) -> bool:
    """Returns whether a process of this machine has this number; False for text that is not a number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # the process belongs to another user
        pass
    return True


def sync(path: Path) -> None:
    """Flushes the file's content to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yields a scratch folder that replaces `folder` when the block succeeds and is removed when it fails."""
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
