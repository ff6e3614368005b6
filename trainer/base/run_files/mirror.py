"""Mirrors the files of a job directory to Cloud Storage, or leaves them in the local folder.

A run reads and writes local files only. If its job directory is an address, it works in a scratch folder: `outline`
downloads the small files before anything is read, `fetch` downloads the rest of a checkpoint when it is needed.
"""

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.base.run_files.run_layout import MANIFEST, RUN_FILES
from trainer.base.storage.address import Address
from trainer.base.storage.gcs import Remote
from trainer.base.storage.transfers import in_parallel
from trainer.base.storage.uploader import Uploader

LEAVING_SECONDS = 10.0  # of the 15 before a machine is preempted; the others are for the checkpoint
_FINISHING_SECONDS = 600.0
_LOGS_SECONDS = 60.0  # every upload sends the whole event file
_UNSENT = ".unsent"  # marks a scratch folder with files that were not uploaded when its run ended
_CHECKPOINT_FILE = re.compile(r"(\w[\w.-]{,99})/(\w[\w.-]{,99})", re.ASCII)  # folder and file name


class Mirror(Uploader):
    """Mirrors scratch folders to Cloud Storage. `addresses`: the address of each; files elsewhere stay local.

    Every method but `leave` may raise UserError or PlatformFault.
    """

    def __init__(self, addresses: Mapping[Path, Address] | None = None) -> None:
        super().__init__(addresses or {}, MANIFEST)
        self._outlined: dict[Path, dict[str, Remote]] = {}
        self._incomplete: list[Path] = []  # checkpoints whose upload ended with a killed process
        self._logs: Path | None = None
        self._logs_due, self._logs_sent = 0.0, dict[Path, tuple[int, int]]()  # size and modification time by file

    def where(self, path: Path) -> str:
        """Returns the path or address that stands for `path` in messages."""
        return str(self.address_of(path) or path)

    def holds(self, folder: Path) -> bool:
        """Returns whether `folder` has any file but probes and unfinished parts, which have a leading dot."""
        if address := self.address_of(folder):
            names = [remote.address.name[len(address.prefix) :] for remote in self._gcs.list(address, most=100)]
        else:
            names = os.listdir(folder) if folder.is_dir() else []
        return any(name and not name.startswith(".") and not name.endswith("/") for name in names)

    def outline(self, root: Path, checkpoints: Path) -> None:
        """Downloads the run's files and the manifests of its checkpoints."""
        for scratch in self._addresses:  # the bucket counts, not what an earlier process left in the scratch folders
            _keep_unsent(scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        if address := self.address_of(root):
            for name in RUN_FILES:
                if remote := self._gcs.get(address / name):
                    self._gcs.download(remote, root / name)
        if address := self.address_of(checkpoints):
            self._outline_checkpoints(address, checkpoints)

    def _outline_checkpoints(self, address: Address, checkpoints: Path) -> None:
        folders: dict[Path, dict[str, Remote]] = {}
        for remote in self._gcs.list(address):
            if name := _CHECKPOINT_FILE.fullmatch(remote.address.name[len(address.prefix) :]):
                folders.setdefault(checkpoints / name[1], {})[name[2]] = remote
        self._incomplete = [folder for folder, files in folders.items() if MANIFEST not in files]
        self._outlined = {folder: files for folder, files in folders.items() if MANIFEST in files}
        for checkpoint, files in self._outlined.items():
            checkpoint.mkdir(parents=True)
            self._gcs.download(files.pop(MANIFEST), checkpoint / MANIFEST)

    def fetch(self, checkpoint: Path) -> None:
        """Downloads the files of a checkpoint of which only the manifest is local."""
        if files := self._outlined.pop(checkpoint, {}):

            def download(name: str, cancelled: threading.Event) -> None:
                self._gcs.download(files[name], checkpoint / name, cancelled=cancelled)

            in_parallel(download, files, self._gcs.limits.workers)

    def restore(self, folder: Path, select: Callable[[list[str]], list[str]]) -> None:
        """Downloads those files of an outlined folder which `select` returns of their names."""
        if address := self.address_of(folder):
            remotes = {remote.address.name.removeprefix(address.prefix): remote for remote in self._gcs.list(address)}
            for name in select([*remotes]):
                folder.mkdir(parents=True, exist_ok=True)
                self._gcs.download(remotes[name], folder / name)

    def begin(self, logs: Path) -> None:
        """Starts to upload the files in `logs` as they grow."""
        for folder in self._incomplete:
            self.remove(folder)
        self._logs, self._logs_due = logs, time.monotonic() + _LOGS_SECONDS

    def put(self, path: Path) -> None:
        """Queues a file or folder and, once a minute, the logs that have changed; raises as Uploader's."""
        super().put(path)
        if time.monotonic() >= self._logs_due:
            self._put_logs()

    def _put_logs(self) -> None:
        self._logs_due = time.monotonic() + _LOGS_SECONDS
        for file in sorted(self._logs.rglob("*")) if self._logs else []:
            with suppress(FileNotFoundError):  # TensorBoard or the user may remove one
                state = file.stat().st_size, file.stat().st_mtime_ns
                if file.is_file() and self._logs_sent.get(file) != state:
                    self._logs_sent[file] = state
                    super().put(file)

    def remove(self, folder: Path) -> None:
        """Removes a local folder and its copy."""
        self._outlined.pop(folder, None)
        super().remove(folder)

    def finish(self, seconds: float = _FINISHING_SECONDS) -> None:
        """Waits for all uploads. Raises PlatformFault, naming pending files, after `seconds`; UserError if rejected."""
        pending = self._pending(seconds)
        if self.rejection:
            raise self.rejection
        if pending:
            raise PlatformFault(f"not uploaded within {seconds:g} seconds: {pending}")

    def leave(self, seconds: float = LEAVING_SECONDS) -> None:
        """Waits for all uploads; after `seconds`, logs a warning that names the pending files."""
        if pending := self._pending(seconds):
            rejected = self.rejection is not None
            why = "rejected by Cloud Storage" if rejected else f"not uploaded within {seconds:g} seconds"
            log.warning(f"{why}: {pending}; files uploaded earlier are intact")

    def close(self) -> None:
        """Stops all uploads."""
        if self.unsent:
            for scratch in self._addresses:
                with suppress(OSError):
                    (scratch / _UNSENT).touch()
        super().close()

    def _pending(self, seconds: float) -> str:
        with suppress(UserError, PlatformFault):  # of an earlier upload
            self._put_logs()
        return ", ".join(self.where(Path(path)) for path in self.join(seconds))


def _keep_unsent(scratch: Path) -> None:
    """Renames a scratch folder that holds what an earlier process could not upload, in place of an older one."""
    if (scratch / _UNSENT).exists():
        for older in scratch.parent.glob("unsent-*"):
            shutil.rmtree(older, ignore_errors=True)
        backup = scratch.with_name(f"unsent-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        scratch.rename(backup)
        kept = f"files that an earlier start of this run could not upload are kept in {backup}"
        log.warning(f"{kept}: copy what you miss, or remove it")
