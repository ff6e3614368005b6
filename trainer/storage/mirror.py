"""What becomes of a job directory's files once they are written: kept here, or sent on to Cloud Storage as well.

A run writes and reads local files only. Where its job directory is an address, a scratch folder stands for it: before
anything is read, `outline` brings the small files; `fetch` the rest of a checkpoint, when it is wanted.
"""

import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.errors import PlatformFault
from trainer.log import log
from trainer.storage.address import Address
from trainer.storage.gcs import Remote, connect
from trainer.storage.run_layout import RUN_FILES
from trainer.storage.uploader import Uploader

MANIFEST = "manifest.json"  # a folder with this file is whole where it is there: sent last, deleted first
LEAVING_SECONDS = 10.0  # of the 15 that a machine has when it is taken away: the checkpoint had the others
_FINISHING_SECONDS = 600.0
_LOGS_SECONDS = 60.0  # each time, an event file is sent as a whole
_PLAIN = re.compile(r"(\w[\w.-]{,99})/(\w[\w.-]{,99})", re.ASCII)  # a checkpoint's folder, and a file of it


class Mirror:
    """Of a local job directory: what is written is where it belongs."""

    def where(self, path: Path) -> str:
        """What the user knows `path` as."""
        return str(path)

    def holds(self, folder: Path) -> bool:
        """Whether there is more in `folder` than what has only begun to be written: a probe, a part left by a kill."""
        return folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir())

    def outline(self, root: Path, checkpoints: Path) -> None:
        """Makes the local folders show what was kept: the run's files, and the manifests of its checkpoints."""

    def fetch(self, checkpoint: Path) -> None:
        """Completes a checkpoint of which only the manifest is here."""

    def begin(self, logs: Path) -> None:
        """From now on the files in `logs` are kept as they grow."""

    def put(self, path: Path) -> None:
        """A file, or a folder with all its files, is written. UserError where what came before cannot be kept."""

    def remove(self, folder: Path) -> None:
        """Removes a folder, here and where it is kept."""
        shutil.rmtree(folder, ignore_errors=True)

    def finish(self, seconds: float = _FINISHING_SECONDS) -> None:
        """Returns when all is kept. PlatformFault, naming what is not, after `seconds`; UserError for a refusal."""

    def leave(self, seconds: float = LEAVING_SECONDS) -> None:
        """Returns when all is kept, or after `seconds` with a warning that names what is not."""

    def close(self) -> None:
        """Ends what works in the background; nothing is kept from here on."""


class BucketMirror(Mirror):
    """Of addresses in Cloud Storage. `places`: each scratch folder, and the address that it stands for.

    What lies in none of them stays local. Every method may raise UserError or PlatformFault, but `leave`.
    """

    def __init__(self, places: Mapping[Path, Address]) -> None:
        self._gcs, self._places, self._uploader = connect(), places, Uploader(places)
        self._outlined: dict[Path, dict[str, Remote]] = {}
        self._half_sent: list[Path] = []  # by a process that was killed

    def where(self, path: Path) -> str:
        """The address of `path`."""
        return str(self._uploader.address_of(path) or path)

    def holds(self, folder: Path) -> bool:
        """Whether there are objects below, other than a probe that a kill left."""
        address = self._uploader.address_of(folder)
        if address is None:
            return super().holds(folder)
        below = [found.address.name[len(address.prefix) :] for found in self._gcs.list(address, most=100)]
        return any(not name.startswith(".") for name in below)

    def outline(self, root: Path, checkpoints: Path) -> None:
        """What lies in the bucket counts: whatever an earlier process left in the scratch folders is removed."""
        for scratch in self._places:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        if address := self._uploader.address_of(root):
            for name in RUN_FILES:
                if found := self._gcs.get(address / name):
                    self._gcs.download(found, root / name)
        if address := self._uploader.address_of(checkpoints):
            self._outline_checkpoints(address, checkpoints)

    def _outline_checkpoints(self, address: Address, checkpoints: Path) -> None:
        folders: dict[Path, dict[str, Remote]] = {}
        for remote in self._gcs.list(address):
            if found := _PLAIN.fullmatch(remote.address.name[len(address.prefix) :]):
                folders.setdefault(checkpoints / found[1], {})[found[2]] = remote
        self._half_sent = [folder for folder, files in folders.items() if MANIFEST not in files]
        self._outlined = {folder: files for folder, files in folders.items() if MANIFEST in files}
        for checkpoint, files in self._outlined.items():
            checkpoint.mkdir(parents=True)
            self._gcs.download(files.pop(MANIFEST), checkpoint / MANIFEST)

    def fetch(self, checkpoint: Path) -> None:
        """All its files at the same time, each verified."""

        def one(name: str, remote: Remote) -> None:
            self._gcs.download(remote, checkpoint / name)

        files = self._outlined.pop(checkpoint, {})
        with ThreadPoolExecutor(self._gcs.limits.workers) as pool:
            list(pool.map(one, files.keys(), files.values()))

    def begin(self, logs: Path) -> None:
        """Sends `logs` at intervals, and removes checkpoints that were sent in part only."""
        for folder in self._half_sent:
            self.remove(folder)
        if self._uploader.address_of(logs):
            self._uploader.every(logs, _LOGS_SECONDS)

    def put(self, path: Path) -> None:
        """Sends in the background, one after the other."""
        if self._uploader.address_of(path) is None:
            return
        if path.is_dir():
            self._uploader.put_folder(path, last=MANIFEST if (path / MANIFEST).exists() else None)
        else:
            self._uploader.put(path)

    def remove(self, folder: Path) -> None:
        """In the bucket, when something newer is whole there."""
        self._outlined.pop(folder, None)
        if self._uploader.address_of(folder):
            self._uploader.remove(folder, first=MANIFEST)
        else:
            super().remove(folder)

    def finish(self, seconds: float = _FINISHING_SECONDS) -> None:
        """As Mirror."""
        unsent = self._unsent(seconds)
        if self._uploader.refused:
            raise self._uploader.refused
        if unsent:
            raise PlatformFault(f"not sent within {seconds:g} seconds: {unsent}")

    def leave(self, seconds: float = LEAVING_SECONDS) -> None:
        """As Mirror."""
        if unsent := self._unsent(seconds):
            why = "refused by Cloud Storage" if self._uploader.refused else f"not sent within {seconds:g} seconds"
            log.warning(f"{why}: {unsent}; what was sent before is whole")

    def close(self) -> None:
        """As Mirror."""
        self._uploader.close()

    def _unsent(self, seconds: float) -> str:
        return ", ".join(self.where(Path(path)) for path in self._uploader.join(seconds))
