"""Of what is read and written: SHA-256, and CRC32C as Cloud Storage writes it (base64 of the big-endian number)."""

import base64
import hashlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_IN_MEMORY = 64 * 2**20  # a file up to so many bytes is read at once before it is sent: it may grow meanwhile


class Counted(io.RawIOBase):
    """A file that counts what is written to it into size and crc32c."""

    def __init__(self, raw: IO[bytes], heard: Callable[[int], None] = lambda size: None) -> None:
        self._raw, self._heard, self._sum, self.size = raw, heard, _checksum(), 0

    def restart(self) -> None:
        """Forgets what was written."""
        self._heard(-self.size)
        self._raw.seek(0)
        self._raw.truncate()
        self._sum, self.size = _checksum(), 0

    def writable(self) -> bool:
        """As io asks."""
        return True

    def write(self, content: Any) -> int:
        self._raw.write(content)
        self._sum.update(content)
        self.size += len(content)
        self._heard(len(content))
        return len(content)

    @property
    def crc32c(self) -> str:
        """Of what was written so far."""
        return _text(self._sum)


def crc32c_of(file: Path) -> str:
    """The checksum of a local file, as Cloud Storage writes it: base64 of big-endian CRC32C."""
    return _text(_sum_of(file, _checksum()))


def sha256_of(file: Path) -> str:
    """The SHA-256 of a local file, in hexadecimal digits."""
    return str(_sum_of(file, hashlib.sha256()).hexdigest())


def _sum_of(file: Path, total: Any) -> Any:
    with open(file, "rb") as content:
        while piece := content.read(2**20):
            total.update(piece)
    return total


@contextmanager
def contents_of(file: Path) -> Iterator[tuple[IO[bytes], int, str]]:
    """The file's content as it is now, its size and its checksum."""
    if file.stat().st_size > _IN_MEMORY:
        with open(file, "rb") as content:
            yield content, file.stat().st_size, crc32c_of(file)
        return
    data = file.read_bytes()
    total = _checksum()
    total.update(data)
    yield io.BytesIO(data), len(data), _text(total)


def _checksum() -> Any:
    import google_crc32c

    return google_crc32c.Checksum()


def _text(checksum: Any) -> str:
    return base64.b64encode(checksum.digest()).decode()
