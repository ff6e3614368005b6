"""Writes prepared shards atomically to a local folder or an address in Cloud Storage."""

from pathlib import Path

from trainer.base.storage import Address, make_writable, write_whole
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

    def write(self, name: str, content: bytes) -> None:
        """Writes a file atomically."""
        write_whole(self._folder / name, content)

    def size(self, name: str) -> int | None:
        """Returns the size of a file, or None if it does not exist."""
        file = self._folder / name
        return file.stat().st_size if file.is_file() else None

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

    def write(self, name: str, content: bytes) -> None:
        replaced = self._generations.get(name, 0)
        self._generations[name] = self._gcs.upload(content, self._address / name, replaced)

    def size(self, name: str) -> int | None:
        remote = self._gcs.get(self._address / name)
        return remote.size if remote else None

    def remove(self, name: str) -> None:
        if remote := self._gcs.get(self._address / name):
            self._gcs.delete(remote)
