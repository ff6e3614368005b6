"""Uploads local results to Cloud Storage in a background thread, in the order in which they were queued.

Failed uploads, for a refused login too, are retried until `close`, with a warning each time. A rejected one, as for a
missing permission or because another run writes the object too, is raised at the next `put`.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.base.storage.address import Address
from trainer.base.storage.gcs import Gcs, Remote, connect
from trainer.base.storage.gcs_errors import Conflict, RefusedToken

_RETRY_SECONDS = 15


class Uploader:
    """Uploads local folders to Cloud Storage. `addresses`: the address of each local folder; other paths stay local.

    Tasks run one after another; a file is read when its task runs. All methods but `join` return at once; they may be
    called from any thread. The file `marker` of a folder is uploaded last and deleted first, so that its presence
    always means a complete folder.
    """

    def __init__(self, addresses: Mapping[Path, Address], marker: str) -> None:
        self._marker = marker
        self._addresses = dict(sorted(addresses.items(), key=lambda item: -len(item[0].parts)))  # innermost first
        self._tasks: dict[Path, Callable[[], None]] = {}  # in order; those of a path are one
        self._running: Path | None = None
        self._outdated: dict[Path, Callable[[], None]] = {}  # folders to remove when a newer one is complete
        self._generations: dict[Address, int] = {}
        self.rejection: Exception | None = None  # why nothing more can be uploaded
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)

    @property
    def _gcs(self) -> Gcs:
        return connect()

    def put(self, path: Path) -> None:
        """Queues a file, or all files of a folder. Raises the error of an earlier upload that was rejected."""
        if self.address_of(path) is None:
            return
        with self._changed:
            if self.rejection:
                raise self.rejection
            is_folder = path.is_dir()
            if is_folder:
                self._drop(path)
            # A queued task will send the newest content.
            self._tasks.setdefault(path, partial(self._send_folder if is_folder else self._send, path))
            self._wake()

    def remove(self, folder: Path) -> None:
        """Removes a folder and its queued tasks locally, and later its objects.

        The objects are deleted after the next upload of a folder with a marker, or when the queue is empty: even if
        checkpoints are written faster than they are uploaded, the bucket always has a complete one. A running upload
        is finished.
        """
        with self._changed:
            self._drop(folder)
            if self.address_of(folder):
                self._outdated[folder] = partial(self._remove, folder)
                self._wake()
            running = self._running == folder
        if not running:
            shutil.rmtree(folder, ignore_errors=True)

    def join(self, seconds: float) -> list[str]:
        """Waits up to `seconds` until the queue is empty. Returns the local paths still pending; they stay queued."""
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.rejection or not (self.unsent or self._outdated), seconds)
            running = [self._running] if self._running else []
            return list(dict.fromkeys(map(str, [*running, *self._tasks])))

    def close(self) -> None:
        """Ends the thread after its current task; queued tasks are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def unsent(self) -> bool:
        """Returns whether something was put that is not uploaded."""
        with self._changed:
            return bool(self._tasks or self._running)

    def address_of(self, path: Path) -> Address | None:
        """Returns the address of `path`; None outside the mirrored folders."""
        for local, address in self._addresses.items():
            if path.is_relative_to(local):
                return address if path == local else address / path.relative_to(local).as_posix()
        return None

    def _drop(self, folder: Path) -> None:
        self._tasks = {path: work for path, work in self._tasks.items() if not path.is_relative_to(folder)}
        self._outdated.pop(folder, None)

    def _wake(self) -> None:
        """Starts the thread with the first task. After a rejection it has ended and does not start again."""
        if self._thread.ident is None:
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while work := self._next():
            while not self._succeeds(work):
                if self._closed or self.rejection:
                    return
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Returns the first task; None at the end."""
        with self._changed:
            while not (self._closed or self.rejection):
                if not self._tasks:
                    self._tasks, self._outdated = self._outdated, {}
                if self._tasks:
                    self._running = next(iter(self._tasks))
                    return self._tasks.pop(self._running)
                self._changed.wait()
            return None

    def _succeeds(self, work: Callable[[], None]) -> bool:
        """Runs a task; after a failure that may pass it waits, others make `rejection`."""
        try:
            work()
        except FileNotFoundError as error:
            log.warning(f"{error.filename}: deleted before it could be uploaded")
        except Exception as error:
            if isinstance(error, Conflict) or not isinstance(error, (RefusedToken, PlatformFault, OSError)):
                with self._changed:  # or a bug of this package: nothing more can be uploaded
                    self.rejection = error
                    self._changed.notify_all()
                return False
            log.warning(f"{error} (retrying in {_RETRY_SECONDS} s)")
            with self._changed:  # a join or a new task ends the wait
                self._changed.wait(_RETRY_SECONDS)
            if isinstance(error, RefusedToken):
                with suppress(UserError, PlatformFault):
                    self._gcs.log_in()
            return False
        return True

    def _send(self, path: Path) -> None:
        if address := self.address_of(path):
            self._generations[address] = self._gcs.upload(path, address, self._generations.get(address, 0))

    def _send_folder(self, folder: Path) -> None:
        marker, address = folder / self._marker, self.address_of(folder / self._marker)
        marked = marker.is_file()
        if marked and address and (older := self._gcs.get(address)):
            self._delete(older)
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file != marker)
        for file in [*files, *[marker] * marked]:
            self._send(file)
        if marked:
            with self._changed:
                again = {folder: self._outdated.pop(folder)} if folder in self._outdated else {}
                self._tasks, self._outdated = {**self._outdated, **self._tasks}, again

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if address := self.address_of(folder):
            marker = address / self._marker
            for remote in sorted(self._gcs.list(address), key=lambda remote: remote.address != marker):
                self._delete(remote)

    def _delete(self, remote: Remote) -> None:
        self._gcs.delete(remote)
        self._generations.pop(remote.address, None)
