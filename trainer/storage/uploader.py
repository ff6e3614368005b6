"""Local results -> Cloud Storage, in the background: training writes files as ever, a thread sends them in order.

What the service does not take now is tried again until `close`; what it refuses, as for a missing permission, is raised
at the next `put`, so that no run goes on whose results cannot be kept.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from trainer.errors import PlatformFault
from trainer.log import log
from trainer.storage.address import Address
from trainer.storage.gcs import connect

_AGAIN_AFTER = 15  # seconds, when what the service did not take is tried again


@dataclass
class _Task:
    path: Path
    work: Callable[[], None]


@dataclass
class _Repeated:
    """A file, or all files of a folder, to be sent again whenever they have changed."""

    path: Path
    seconds: float
    due: float = 0.0
    sent: dict[Path, tuple[int, int]] = field(default_factory=dict)  # size and time of change when last sent

    def changed(self) -> dict[Path, tuple[int, int]]:
        """The files that are not as they were sent last."""
        files = sorted(self.path.rglob("*")) if self.path.is_dir() else [self.path]
        states = {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()}
        return {file: state for file, state in states.items() if self.sent.get(file) != state}


class Uploader:
    """Mirrors local folders to Cloud Storage. `places`: each local folder, and the address that it stands for.

    Tasks are done one after the other, in the order they were given; a file is read when its turn comes. All methods
    return at once but `join`; they may be called from any thread. Paths outside `places` raise ValueError.
    """

    def __init__(self, places: Mapping[Path, Address]) -> None:
        self._gcs = connect()
        self._places = dict(sorted(places.items(), key=lambda place: -len(place[0].parts)))
        self._tasks: list[_Task] = []  # the first is in work
        self._outdated: list[_Task] = []  # folders to remove when there is something newer
        self._repeated: list[_Repeated] = []
        self._generations: dict[Address, int] = {}
        self._refused: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()  # over an RLock: put takes it twice
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)

    def put(self, path: Path) -> None:
        """Sends a file as it will be when its turn comes. UserError where an upload before was refused."""
        with self._changed:
            if all(task.path != path for task in self._tasks[1:]):  # what waits already will send the newest content
                self._add(path, partial(self._send, path))

    def put_folder(self, folder: Path, last: str | None = None) -> None:
        """Sends all files of a folder, the one called `last` when all others are there.

        An older `last` at that address is removed first: whoever sees it sees the whole folder that it speaks of.
        """
        with self._changed:
            self._drop(folder)
            self._add(folder, partial(self._send_folder, folder, last))

    def every(self, path: Path, seconds: float) -> None:
        """Sends a file, or the files of a folder, this often and at each `join`, where they have changed."""
        with self._changed:
            self._remote(path)
            self._repeated.append(_Repeated(path, seconds, time.monotonic() + seconds))
            self._wake()

    def remove(self, folder: Path, first: str | None = None) -> None:
        """Removes a folder here and, the file called `first` before the others, there; drops what waits of it.

        There it goes when a later folder with a `last` has been sent, or all that waits: of checkpoints that are made
        faster than they can be sent, a whole one is there at any time. What is being sent is let through.
        """
        with self._changed:
            self._remote(folder)
            in_work = any(task.path == folder for task in self._tasks[:1])
            self._drop(folder)
            self._outdated.append(_Task(folder, partial(self._remove, folder, first)))
            self._wake()
        if not in_work:
            shutil.rmtree(folder, ignore_errors=True)

    def _drop(self, folder: Path) -> None:
        """Forgets what waits to be done with a folder."""
        self._tasks[1:] = [task for task in self._tasks[1:] if not task.path.is_relative_to(folder)]
        self._outdated = [task for task in self._outdated if task.path != folder]

    def join(self, seconds: float) -> list[str]:
        """Waits until all is sent, `seconds` at most. Returns the local paths that were not; they stay in the queue."""
        deadline = time.monotonic() + seconds
        with self._changed:
            for repeated in self._repeated:
                repeated.due = 0.0
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._refused or not (self._tasks or self._outdated or any(r.due == 0 for r in self._repeated)),
                max(0.0, deadline - time.monotonic()),
            )
            unsent = [task.path for task in self._tasks]
            unsent += [file for repeated in self._repeated if repeated.due == 0 for file in repeated.changed()]
            return list(dict.fromkeys(map(str, unsent)))

    @property
    def refused(self) -> Exception | None:
        """Why nothing more can be sent, None while all is well."""
        return self._refused

    def close(self) -> None:
        """Ends the thread, when the task that it is in is done or has failed; what waits is not sent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add(self, path: Path, work: Callable[[], None]) -> None:
        with self._changed:
            if self._refused:
                raise self._refused
            self._remote(path)
            self._tasks.append(_Task(path, work))
            self._wake()

    def _wake(self) -> None:
        """Begins with the first task: who sends nothing has no thread. A refusal has ended it for good."""
        if self._thread.ident is None:
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while task := self._next():
            try:
                task.work()
            except FileNotFoundError as error:  # deleted before its turn: only a delete that was asked for excuses it
                log.warning(f"{error.filename}: was gone before it could be sent")
            except (PlatformFault, OSError) as error:
                log.warning(f"{error} (tried again in {_AGAIN_AFTER} s)")
                with self._changed:  # a join, or what is put meanwhile, ends the pause
                    self._changed.wait(_AGAIN_AFTER)
                continue
            except Exception as error:  # refused for good, or a fault of ours: nothing more can be kept
                with self._changed:
                    self._refused = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._tasks.remove(task)
                self._changed.notify_all()

    def _next(self) -> _Task | None:
        """The first task; repeated files that are due become one when nothing else waits. None once it is closed."""
        with self._changed:
            while not (self._tasks or self._closed):
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
            return None if self._closed else self._tasks[0]

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
        repeated.due = time.monotonic() + repeated.seconds  # before: a join meanwhile asks for another look
        for file, state in repeated.changed().items():
            self._send(file)
            repeated.sent[file] = state

    def _remove(self, folder: Path, first: str | None) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        address = self._remote(folder)
        for remote in sorted(self._gcs.list(address), key=lambda remote: remote.address != address / (first or "")):
            self._gcs.delete(remote)
            self._generations.pop(remote.address, None)

    def address_of(self, path: Path) -> Address | None:
        """Where `path` is sent to; None outside of all places."""
        for local, address in self._places.items():
            if path == local:
                return address
            if path.is_relative_to(local):
                return address / path.relative_to(local).as_posix()
        return None

    def _remote(self, path: Path) -> Address:
        address = self.address_of(path)
        if address is None:
            raise ValueError(f"{path} is in none of {', '.join(map(str, self._places))}")
        return address
