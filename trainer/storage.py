"""The one place that knows where a path leads, and how something appears there whole or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import UserError


def local_path(path: str, name: str) -> Path:
    """`path` as a local Path; UserError, naming the setting `name`, for an address this version cannot reach."""
    if "://" in path or path.startswith("gs:"):
        raise UserError(f"{name}={path}: only local paths are read and written so far: give a local folder")
    return Path(path).expanduser()


def make_writable(folder: Path, name: str) -> None:
    """Makes `folder` and proves that a file can be written there; UserError otherwise."""
    probe = folder / f".probe-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"{name}={folder}: cannot write there ({error.strerror}): give a folder that you may write to"
        ) from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes beside, then renames: a reader sees the old file or the new one, never a part."""
    beside = path.with_name(f".{path.name}.part")
    data = content.encode() if isinstance(content, str) else content
    with open(beside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder beside `folder` that takes its place when the block ends well, and vanishes when it does not."""
    beside = folder.with_name(f".{folder.name}.part")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    shutil.rmtree(old, ignore_errors=True)
