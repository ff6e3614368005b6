"""Computes SHA-256, and CRC32C as Cloud Storage writes it (base64 of the big-endian number)."""

import base64
import hashlib
from pathlib import Path
from typing import Any


def crc32c_of(content: Path | bytes) -> str:
    """Returns the CRC32C of a local file or of bytes."""
    checksum = crc32c()
    if isinstance(content, Path):
        _add_file(checksum, content)
    else:
        checksum.update(content)
    return encoded(checksum)


def sha256_of(file: Path) -> str:
    """Returns the SHA-256 of a local file, in hexadecimal digits."""
    checksum = hashlib.sha256()
    _add_file(checksum, file)
    return checksum.hexdigest()


def crc32c() -> Any:
    """Returns a CRC32C of nothing, to `update`."""
    import google_crc32c

    return google_crc32c.Checksum()


def encoded(checksum: Any) -> str:
    """Returns the text by which Cloud Storage states a checksum."""
    return base64.b64encode(checksum.digest()).decode()


def _add_file(checksum: Any, file: Path) -> None:
    with open(file, "rb") as content:
        while piece := content.read(2**20):
            checksum.update(piece)
