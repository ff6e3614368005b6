"""Uploads local results to Cloud Storage in a background thread, in the order in which they were queued.

Failed uploads are retried until `close`, those whose token or generation is refused for a limited time. A rejected one,
as for a missing permission, is raised at the next `put`, so that no run continues without a place to store its results.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trainer.errors import PlatformFault, UserError
from trainer.log import log
from trainer.storage.address import Address
from trainer.storage.gcs import connect
from trainer.storage.gcs_errors import Conflict, RefusedToken
from trainer.terminal import duration

_RETRY_SECONDS = 15
_REFUSED_SECONDS = 3600.0  # how long a run goes on, keeping its files here, while its credentials are refused
_CONFLICT_SECONDS = 120.0  # how long an upload is retried while others keep writing the object


@dataclass
class _Task:
    path: Path
    work: Callable[[], None]


@dataclass
class _Repeated:
    """Holds a file or folder that is uploaded at intervals, and the state of its files at the last upload."""

    path: Path
    seconds: float
    due: float = 0.0
    uploaded: dict[Path, tuple[int, int]] = field(default_factory=dict)  # size and modification time

    def changed(self) -> dict[Path, tuple[int, int]]:
        """Returns the files that have changed since the last upload."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        states = {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()}
        return {file: state for file, state in states.items() if self.uploaded.get(file) != state}


class Uploader:
    """Uploads local folders to Cloud Storage. `addresses`: the address of each local folder.

    Tasks run one after another; a file is read when its task runs. All methods but `join` return at once; they may be
    called from any thread. They raise ValueError for a path outside the folders.
    """

    def __init__(self, addresses: Mapping[Path, Address], clock: Callable[[], float] = time.monotonic) -> None:
        self._gcs, self._clock = connect(), clock
        self._refused_since: float | None = None  # since when every upload was refused
        self._addresses = dict(sorted(addresses.items(), key=lambda item: -len(item[0].parts)))  # innermost first
        self._tasks: list[_Task] = []  # the first is running
        self._outdated: list[_Task] = []  # folders to remove when a newer one is complete
        self._repeated: list[_Repeated] = []
        self._generations: dict[Address, int] = {}
        self.rejection: Exception | None = None  # why nothing more can be uploaded
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)

    def put(self, path: Path) -> None:
        """Queues a file. Raises the error of an earlier upload that was rejected."""
        with self._changed:
            if all(task.path != path for task in self._tasks[1:]):  # a queued task will send the newest content
                self._add(path, partial(self._send, path))

    def put_folder(self, folder: Path, last: str | None = None) -> None:
        """Queues all files of a folder, `last` after the others.

        An older `last` at the address is deleted first, so that its presence always means a complete folder.
        """
        with self._changed:
            self._drop(folder)
            self._add(folder, partial(self._send_folder, folder, last))

    def every(self, path: Path, seconds: float) -> None:
        """Uploads changed files of a file or folder at this interval and at each `join`."""
        with self._changed:
            self._remote(path)
            self._repeated.append(_Repeated(path, seconds, time.monotonic() + seconds))
            self._wake()

    def remove(self, folder: Path, first: str | None = None) -> None:
        """Removes a folder and its queued tasks locally, and later its objects, `first` before the others.

        The objects are deleted after the next `put_folder` with a `last`, or when the queue is empty: even if
        checkpoints are written faster than they are uploaded, the bucket always has a complete one. A running upload
        is finished.
        """
        with self._changed:
            self._remote(folder)
            running = any(task.path == folder for task in self._tasks[:1])
            self._drop(folder)
            self._outdated.append(_Task(folder, partial(self._remove, folder, first)))
            self._wake()
        if not running:
            shutil.rmtree(folder, ignore_errors=True)

    def _drop(self, folder: Path) -> None:
        """Removes the queued tasks of a folder."""
        self._tasks[1:] = [task for task in self._tasks[1:] if not task.path.is_relative_to(folder)]
        self._outdated = [task for task in self._outdated if task.path != folder]

    def join(self, seconds: float) -> list[str]:
        """Waits up to `seconds` until the queue is empty. Returns the local paths still pending; they stay queued."""
        with self._changed:
            for repeated in self._repeated:
                repeated.due = 0.0
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    self.rejection or not (self._tasks or self._outdated or any(r.due == 0 for r in self._repeated))
                ),
                max(0.0, seconds),
            )
            pending = [task.path for task in self._tasks]
            pending += [file for repeated in self._repeated if repeated.due == 0 for file in repeated.changed()]
            return list(dict.fromkeys(map(str, pending)))

    def close(self) -> None:
        """Ends the thread after its current task; queued tasks are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add(self, path: Path, work: Callable[[], None]) -> None:
        if self.rejection:
            raise self.rejection
        self._remote(path)
        self._tasks.append(_Task(path, work))
        self._wake()

    def _wake(self) -> None:
        """Starts the thread with the first task. After a rejection it has ended and does not start again."""
        if self._thread.ident is None:
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while task := self._next():
            try:
                task.work()
            except FileNotFoundError as error:
                log.warning(f"{error.filename}: deleted before it could be uploaded")
            except (RefusedToken, Conflict) as error:
                if given_up := self._keeps_trying(error, task):
                    self.reject(given_up)
                    return
                continue
            except (PlatformFault, OSError) as error:
                self._pause(str(error))
                continue
            except Exception as error:  # rejected, or a bug of this package: nothing more can be uploaded
                self.reject(error)
                return
            self._refused_since = None
            with self._changed:
                self._tasks.remove(task)
                self._changed.notify_all()

    def _keeps_trying(self, error: RefusedToken | Conflict, task: _Task) -> UserError | None:
        """Waits before the next attempt; returns the error that ends the run when the time is over."""
        refused = isinstance(error, RefusedToken)
        limit, now = (_REFUSED_SECONDS if refused else _CONFLICT_SECONDS), self._clock()
        if self._refused_since is None:
            self._refused_since = now
        left = self._refused_since + limit - now
        if left <= 0:
            return UserError(f"{error}: given up after {duration(limit)}; what was not sent is kept in {task.path}")
        self._pause(f"{error}; until then kept in {task.path}, given up in {duration(left)}")
        if refused:
            with suppress(UserError, PlatformFault):
                self._gcs.log_in()
        return None

    def _pause(self, line: str) -> None:
        log.warning(f"{line} (retrying in {_RETRY_SECONDS} s)")
        with self._changed:  # a join or a new task ends the wait
            self._changed.wait(_RETRY_SECONDS)

    def reject(self, error: Exception) -> None:
        """Makes every later `put` raise the error; nothing more is uploaded after the current task."""
        with self._changed:
            self.rejection = self.rejection or error
            self._changed.notify_all()

    @property
    def unsent(self) -> bool:
        """Returns whether something was put that is not uploaded."""
        with self._changed:
            return bool(self._tasks)

    def _next(self) -> _Task | None:
        """Returns the first task, or a repeated upload that is due when no other task is queued; None after `close`."""
        with self._changed:
            while not (self._tasks or self._closed or self.rejection):
                if self._outdated:
                    self._tasks, self._outdated = self._outdated, []
                    break
                now = time.monotonic()
                due = next((repeated for repeated in self._repeated if repeated.due <= now), None)
                if due:
                    self._tasks.append(_Task(due.path, partial(self._send_changed, due)))
                else:
                    soonest = min((repeated.due for repeated in self._repeated), default=None)
                    self._changed.wait(None if soonest is None else soonest - now)
            return None if self._closed or self.rejection else self._tasks[0]

    def _send(self, path: Path) -> None:
        address = self._remote(path)
        self._generations[address] = self._gcs.upload(path, address, self._generations.get(address, 0))

    def _send_folder(self, folder: Path, last: str | None) -> None:
        if last and (old := self._gcs.get(self._remote(folder / last))):
            self._gcs.delete(old)
            self._generations.pop(old.address, None)
        files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / (last or "")]
        for file in [*files, *([folder / last] if last else [])]:
            self._send(file)
        if last:
            with self._changed:
                self._tasks[1:1] = [task for task in self._outdated if task.path != folder]
                self._outdated = [task for task in self._outdated if task.path == folder]

    def _send_changed(self, repeated: _Repeated) -> None:
        repeated.due = time.monotonic() + repeated.seconds  # first, because a join meanwhile resets it
        for file, state in repeated.changed().items():
            self._send(file)
            repeated.uploaded[file] = state

    def _remove(self, folder: Path, first: str | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        address = self._remote(folder)
        for remote in sorted(self._gcs.list(address), key=lambda remote: remote.address != address / (first or "")):
            self._gcs.delete(remote)
            self._generations.pop(remote.address, None)

    def address_of(self, path: Path) -> Address | None:
        """Returns the address of `path`; None outside the mirrored folders."""
        for local, address in self._addresses.items():
            if path == local:
                return address
            if path.is_relative_to(local):
                return address / path.relative_to(local).as_posix()
        return None

    def _remote(self, path: Path) -> Address:
        address = self.address_of(path)
        if address is None:
            raise ValueError(f"{path} is in none of {', '.join(map(str, self._addresses))}")
        return address
