"""Computes SHA-256, and CRC32C as Cloud Storage writes it (base64 of the big-endian number)."""

import base64
import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_IN_MEMORY = 64 * 2**20  # files up to this size are read at once before the upload, because they may grow meanwhile


class Counted(io.RawIOBase):
    """Wraps a file and computes the size and the crc32c of what is written to it."""

    def __init__(self, raw: IO[bytes], on_bytes: Callable[[int], None] = lambda size: None) -> None:
        self._raw, self._on_bytes, self._sum, self.size = raw, on_bytes, _checksum(), 0

    def restart(self) -> None:
        """Discards what was written."""
        self._on_bytes(-self.size)
        self._raw.seek(0)
        self._raw.truncate()
        self._sum, self.size = _checksum(), 0

    def writable(self) -> bool:
        """Returns True: the io module requires it."""
        return True

    def write(self, content: Any) -> int:
        self._raw.write(content)
        self._sum.update(content)
        self.size += len(content)
        self._on_bytes(len(content))
        return len(content)

    @property
    def crc32c(self) -> str:
        """Returns the checksum of what was written so far."""
        return _text(self._sum)


def crc32c_of(content: Path | bytes) -> str:
    """Returns the CRC32C of a local file or of bytes."""
    return _text(_checksum(content) if isinstance(content, bytes) else _sum_of(content, _checksum()))


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a local file, in hexadecimal digits."""
    return str(_sum_of(file, hashlib.sha256()).hexdigest())


def _sum_of(file: Path, total: Any) -> Any:
    with open(file, "rb") as content:
        while piece := content.read(2**20):
            total.update(piece)
    return total


@contextmanager
def opened(content: Path | bytes) -> Iterator[tuple[IO[bytes], int, str]]:
    """Yields the current content of a local file, or bytes, as a stream, with the size and the CRC32C."""
    if isinstance(content, Path) and content.stat().st_size > _IN_MEMORY:
        with open(content, "rb") as stream:
            yield stream, content.stat().st_size, crc32c_of(content)
    else:
        data = content.read_bytes() if isinstance(content, Path) else content
        yield io.BytesIO(data), len(data), crc32c_of(data)


def _checksum(content: bytes = b"") -> Any:
    import google_crc32c

    return google_crc32c.Checksum(content)


def _text(checksum: Any) -> str:
    return base64.b64encode(checksum.digest()).decode()
