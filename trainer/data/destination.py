"""Writes prepared shards atomically to a local folder or an address in Cloud Storage."""

from pathlib import Path
from typing import Any

from trainer.base.storage import Address, make_writable, write_whole
from trainer.base.storage.checksum import crc32c_of, sha256_of
from trainer.base.storage.gcs import connect
from trainer.base.storage.preflight import preflight


class LocalFolder:
    """Represents a folder of this machine. Raises UserError if it is not writable."""

    def __init__(self, folder: Path) -> None:
        make_writable(folder, "DST")
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file, or None if it does not exist."""
        file = self._folder / name
        return file.read_bytes() if file.exists() else None

    def write(self, name: str, content: bytes) -> dict[str, str]:
        """Writes a file atomically. Returns the checksums that `holds` requires in addition to "sha256"."""
        write_whole(self._folder / name, content)
        return {}

    def holds(self, name: str, checksums: dict[str, Any]) -> bool:
        """Returns whether the file exists with this content; `checksums`: "sha256", and what `write` returned."""
        file = self._folder / name
        return file.is_file() and sha256_of(file) == checksums["sha256"]

    def remove(self, name: str) -> None:
        """Removes a file."""
        (self._folder / name).unlink()


class RemoteFolder:
    """Represents an address in Cloud Storage as LocalFolder a folder; leaves no file on this machine."""

    def __init__(self, address: Address) -> None:
        preflight({}, {"DST": str(address)})
        self._address, self._gcs = address, connect()
        self._generations: dict[str, int] = {}  # of the files written by this process

    def read(self, name: str) -> bytes | None:
        remote = self._gcs.get(self._address / name)
        return self._gcs.read(remote) if remote else None

    def write(self, name: str, content: bytes) -> dict[str, str]:
        replaced = self._generations.get(name, 0)
        self._generations[name] = self._gcs.upload(content, self._address / name, replaced)
        return {"crc32c": crc32c_of(content)}

    def holds(self, name: str, checksums: dict[str, Any]) -> bool:
        remote = self._gcs.get(self._address / name)
        return remote is not None and remote.crc32c == checksums.get("crc32c")

    def remove(self, name: str) -> None:
        if remote := self._gcs.get(self._address / name):
            self._gcs.delete(remote)
