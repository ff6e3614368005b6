"""Local files and folders that appear whole or not at all."""

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import UserError

# The path is at fault, not the disk.
_WRONG_PLACE = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
})  # fmt: skip
_LOCKED: dict[tuple[int, int], int] = {}  # device and inode of lock files of this process -> descriptors, never closed


def make_writable(folder: Path, name: str) -> None:
    """Makes `folder` and proves that a file can be written there; UserError otherwise."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        reason = "that is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(
            f"{name}={folder}: cannot write there ({reason}): give a folder that you may write to"
        ) from None


def keep_others_out(folder: Path, flag: str, place: str) -> None:
    """Locks `folder` as long as this process lives; UserError where another process has. A kill ends the lock too.

    `flag`, `place`: what names the folder, and what the user calls it. Where the file system has no locks, as in some
    network folders, nobody is kept out.
    """
    with writing(folder / ".lock"):
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    found = os.fstat(descriptor)
    if (found.st_dev, found.st_ino) in _LOCKED:
        os.close(descriptor)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(
            f"{flag}={place}: another run writes there now: wait for it, or give another --{flag}"
        ) from None
    except OSError:
        os.close(descriptor)
    else:
        _LOCKED[found.st_dev, found.st_ino] = descriptor


def cannot_write(path: Path, reason: str) -> UserError:
    """The error for a full disk, a folder that became read-only, and the like."""
    return UserError(
        f"{path} cannot be written: {reason}: free or mend the disk, then give the same command again; what was "
        "written before is whole"
    )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the disk refuses within the block into a UserError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _WRONG_PLACE:
            raise UserError(
                f"{path} cannot be written: {reason}: give a path that is there and yours to write"
            ) from error
        raise cannot_write(path, reason) from error


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes beside, then renames: a reader sees the old file or the new one, never a part. UserError: see writing.

    Processes that write the same file at a time do not meet: the last one counts. In text, what stands for bytes of a
    file's name that are no UTF-8 becomes those bytes again.
    """
    begin = f".{path.name}.{os.uname().nodename}-"
    beside = path.with_name(f"{begin}{os.getpid()}.part")
    with writing(path):
        try:
            beside.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
            sync(beside)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    with suppress(OSError):
        for left_behind in path.parent.glob(f"{glob.escape(begin)}*.part"):  # by processes that were killed
            if not is_running(left_behind.name.removeprefix(begin).removesuffix(".part")):
                left_behind.unlink(missing_ok=True)


def is_running(process: str) -> bool:
    """Whether a process of this machine has that number; False for what is no number."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def sync(path: Path) -> None:
    """Returns when the file's content is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its place when the block ends well, and vanishes when it does not."""
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
