"""Where prepared shards go: a local folder, or an address in Cloud Storage. Files appear there whole or not at all."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from trainer.storage import Address, make_writable, write_whole
from trainer.storage.checksum import crc32c_of, sha256_of
from trainer.storage.gcs import connect
from trainer.storage.preflight import preflight


class Destination(Protocol):
    """A folder, here or there. Making one proves that it can be written to; UserError otherwise."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None where it is not there."""
        ...

    def write(self, name: str, content: bytes) -> dict[str, str]:
        """Writes a file whole; returns what `holds` will want to know beside its "sha256"."""
        ...

    def holds(self, name: str, checksums: dict[str, Any]) -> bool:
        """Whether the file is there with this content; `checksums`: "sha256", and what `write` returned."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file."""
        ...


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        make_writable(folder, "DST")
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        """As Destination."""
        file = self._folder / name
        return file.read_bytes() if file.exists() else None

    def write(self, name: str, content: bytes) -> dict[str, str]:
        """As Destination."""
        write_whole(self._folder / name, content)
        return {}

    def holds(self, name: str, checksums: dict[str, Any]) -> bool:
        """As Destination."""
        file = self._folder / name
        return file.is_file() and sha256_of(file) == checksums["sha256"]

    def remove(self, name: str) -> None:
        """As Destination."""
        (self._folder / name).unlink()


class RemoteFolder:
    """What lies below an address; no file stays on this machine."""

    def __init__(self, address: Address) -> None:
        preflight({}, {"DST": str(address)})
        self._address, self._gcs = address, connect()
        self._generations: dict[str, int] = {}  # of what was written from here

    def read(self, name: str) -> bytes | None:
        """As Destination."""
        found = self._gcs.get(self._address / name)
        return self._gcs.read(found) if found else None

    def write(self, name: str, content: bytes) -> dict[str, str]:
        """As Destination."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / name
            file.write_bytes(content)
            known = self._generations.get(name, 0)
            self._generations[name] = self._gcs.upload(file, self._address / name, known)
            return {"crc32c": crc32c_of(file)}

    def holds(self, name: str, checksums: dict[str, Any]) -> bool:
        """As Destination."""
        found = self._gcs.get(self._address / name)
        return found is not None and found.crc32c == checksums.get("crc32c")

    def remove(self, name: str) -> None:
        """As Destination."""
        found = self._gcs.get(self._address / name)
        if found:
            self._gcs.delete(found)
