"""Keeps the files of a job directory in Cloud Storage, or leaves them in the local folder.

A run reads and writes local files only. If its job directory is an address, it works in a scratch
folder: `prepare` downloads the small files before anything is read, and starts the thread that
uploads what is `put`, in the order in which it was queued; `fetch` downloads the rest of a
checkpoint when it is needed.

A failed upload is retried until `close`, with a warning each time, even if the login is refused. If
an upload is rejected, because a permission is missing or another run writes the same object, the
next `put` raises the error.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.base.run_files.job_files import MANIFEST, RUN_FILES
from trainer.base.storage.gcs import Conflict, RefusedToken, Remote, connect
from trainer.base.storage.local_files import Address
from trainer.base.storage.staging import in_parallel

# of the 15 until a preempted machine stops; the other 5 are for the checkpoint
LEAVING_SECONDS = 10.0
_RETRY_SECONDS = 15
_LOGS_SECONDS = 60.0  # between uploads of the logs: each sends whole event files

_UNSENT = ".unsent"  # marks a scratch folder with files that were not uploaded when its run ended
_CHECKPOINT_FILE = re.compile(r"(\w[\w.-]{,99})/(\w[\w.-]{,99})", re.ASCII)  # folder and file name


class Mirror:
    """Mirrors scratch folders to Cloud Storage.

    `addresses`: the address of each folder; files elsewhere stay local.

    Uploads run one after another; a file is read when its turn comes. `put`, `remove` and `close`
    return at once, and may be called from any thread. The manifest of a checkpoint is uploaded last
    and deleted first, so that its presence always means a complete folder. Every method but `leave`
    may raise UserError or PlatformFault.
    """

    def __init__(self, addresses: Mapping[Path, Address] | None = None) -> None:
        # The innermost folder first.
        self._addresses = dict(
            sorted((addresses or {}).items(), key=lambda item: -len(item[0].parts))
        )
        # files that `fetch` downloads, by checkpoint and name
        self._remote_files: dict[Path, dict[str, Remote]] = {}
        self._incomplete: list[Path] = []  # checkpoints whose upload ended with a killed process
        self._logs: Path | None = None
        # size and modification time by file
        self._logs_due = 0.0
        self._logs_sent = dict[Path, tuple[int, int]]()
        self._tasks: dict[Path, Callable[[Path], None]] = {}  # queued work by path, in its order
        self._running: Path | None = None
        # folders to remove when a newer one is complete
        self._outdated: dict[Path, Callable[[Path], None]] = {}
        self._generations: dict[Address, int] = {}
        self.rejection: Exception | None = None  # why nothing more can be uploaded
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run_tasks, name="uploader", daemon=True)

    def address_of(self, path: Path) -> Address | None:
        """Returns the address of `path`; None outside the mirrored folders."""
        for local, address in self._addresses.items():
            if path.is_relative_to(local):
                return address if path == local else address / path.relative_to(local).as_posix()
        return None

    def where(self, path: Path) -> str:
        """Returns the name of `path` for messages: its address, if it has one."""
        return str(self.address_of(path) or path)

    def holds(self, folder: Path) -> bool:
        """Returns whether `folder` has a file, without probes and unfinished parts (".…")."""
        if address := self.address_of(folder):
            names = [remote.below(address) for remote in connect().list(address, most=100)]
        else:
            names = os.listdir(folder) if folder.is_dir() else []
        return any(name and not name.startswith(".") and not name.endswith("/") for name in names)

    def prepare(self, root: Path, checkpoints: Path) -> None:
        """Downloads the run's files and the manifests of its checkpoints, then starts to upload.

        The folders must be locked: what another process has left in them is removed.
        """
        # the bucket is right, not what an earlier process left in the scratch folders
        for scratch in self._addresses:
            # keep the newest files that could not be uploaded, in a backup folder
            if (scratch / _UNSENT).exists():
                backup = scratch.with_name("unsent")
                shutil.rmtree(backup, ignore_errors=True)
                scratch.rename(backup)
                log.warning(
                    "files that an earlier start of this run could not upload are kept in"
                    f" {backup}: copy what you miss, or remove it"
                )
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
        if address := self.address_of(root):
            for name in RUN_FILES:
                if remote := connect().get(address / name):
                    connect().download(remote, root / name)
        if address := self.address_of(checkpoints):
            folders: dict[Path, dict[str, Remote]] = {}
            for remote in connect().list(address):
                if match := _CHECKPOINT_FILE.fullmatch(remote.below(address)):
                    folders.setdefault(checkpoints / match[1], {})[match[2]] = remote
            for folder, files in folders.items():
                if manifest := files.pop(MANIFEST, None):
                    folder.mkdir(parents=True)
                    connect().download(manifest, folder / MANIFEST)
                    self._remote_files[folder] = files
                else:
                    self._incomplete.append(folder)
        if self._addresses:
            self._thread.start()

    def fetch(self, checkpoint: Path) -> None:
        """Downloads the files of a checkpoint of which only the manifest is local."""
        if files := self._remote_files.pop(checkpoint, {}):
            gcs = connect()
            in_parallel(
                lambda name, cancelled: gcs.download(
                    files[name], checkpoint / name, cancelled=cancelled
                ),
                files,
                gcs.limits.workers,
            )

    def begin(self, logs: Path) -> None:
        """Removes checkpoints whose upload was cut off, and starts to upload growing `logs`."""
        for folder in self._incomplete:
            self.remove(folder)
        self._logs = logs
        self._logs_due = time.monotonic() + _LOGS_SECONDS

    def put(self, path: Path) -> None:
        """Queues a file or all files of a folder and, once a minute, the logs that have changed.

        Raises the error of an earlier upload that was rejected.
        """
        if self.address_of(path):
            with self._changed:
                if self.rejection:
                    raise self.rejection
                if path.is_dir():
                    self._forget(path)
                # a queued task will send the newest content
                self._tasks.setdefault(path, self._upload)
                self._changed.notify_all()
        if time.monotonic() >= self._logs_due:
            self._put_logs()

    def _put_logs(self) -> None:
        self._logs_due = time.monotonic() + _LOGS_SECONDS
        for file in sorted(self._logs.rglob("*")) if self._logs else []:
            with suppress(FileNotFoundError):  # TensorBoard or the user may remove one
                state = file.stat().st_size, file.stat().st_mtime_ns
                if file.is_file() and self._logs_sent.get(file) != state:
                    self._logs_sent[file] = state
                    self.put(file)

    def remove(self, folder: Path) -> None:
        """Removes a folder and its queued tasks locally, and later its objects.

        The objects are deleted after the next upload of a folder with a manifest, or when the queue
        is empty: even if checkpoints are written faster than they are uploaded, the bucket always
        has a complete one. An upload that is running is finished first.
        """
        self._remote_files.pop(folder, None)
        with self._changed:
            self._forget(folder)
            if self.address_of(folder):
                self._outdated[folder] = self._delete_folder
                self._changed.notify_all()
            running = self._running == folder
        if not running:
            shutil.rmtree(folder, ignore_errors=True)

    def finish(self, seconds: float = 600.0) -> None:
        """Waits for all uploads.

        Raises PlatformFault, naming pending files, after `seconds`; UserError if rejected.
        """
        pending = self.join(seconds)
        if self.rejection:
            raise self.rejection
        if pending:
            raise PlatformFault(f"not uploaded within {seconds:g} seconds: {', '.join(pending)}")

    def leave(self) -> None:
        """Waits for all uploads; after LEAVING_SECONDS, or a rejection, logs what is not sent."""
        try:
            self.finish(LEAVING_SECONDS)
        except Exception as error:  # the process ends for another reason
            log.warning(f"{error}; files uploaded earlier are intact")

    def close(self) -> None:
        """Ends the uploads after the running one, and marks scratch folders with files left."""
        with self._changed:
            if self._tasks or self._running:
                for scratch in self._addresses:
                    with suppress(OSError):
                        (scratch / _UNSENT).touch()
            self._closed = True
            self._changed.notify_all()

    def join(self, seconds: float) -> list[str]:
        """Queues changed logs, and waits up to `seconds` until all is sent or one is rejected.

        Returns the addresses of what is still pending, which stays queued.
        """
        with suppress(UserError, PlatformFault):  # of an earlier upload
            self._put_logs()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.rejection or not (self._tasks or self._running or self._outdated),
                seconds,
            )
            paths = filter(None, dict.fromkeys([self._running, *self._tasks]))
            return [*map(self.where, paths)]

    def _forget(self, folder: Path) -> None:
        for path in [*self._tasks]:
            if path.is_relative_to(folder):
                del self._tasks[path]
        self._outdated.pop(folder, None)

    def _run_tasks(self) -> None:
        """Runs the tasks in order, each until it succeeds; ends after `close` or a rejection."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self.rejection or self._tasks or self._outdated
                )
                if self._closed or self.rejection:
                    return
                # The oldest task, or with an empty queue the removal of what is outdated.
                if not self._tasks:
                    self._tasks = self._outdated
                    self._outdated = {}
                path = self._running = next(iter(self._tasks))
                work = self._tasks.pop(path)
            try:
                work(path)
            except FileNotFoundError as error:
                log.warning(f"{error.filename}: deleted before it could be uploaded")
            except Conflict as error:
                self.rejection = UserError(
                    f"{error}: wait until it has ended, or use another --job_dir"
                )
            except (RefusedToken, PlatformFault, OSError) as error:  # these may pass
                log.warning(f"{error} (retrying in {_RETRY_SECONDS} s)")
                with self._changed:
                    self._tasks = {path: work, **self._tasks}
                    self._changed.wait(_RETRY_SECONDS)  # a join or a new task ends the wait
                if isinstance(error, RefusedToken):
                    with suppress(UserError, PlatformFault):
                        connect().log_in()
            # a missing permission or a bug: nothing more can be uploaded
            except Exception as error:
                self.rejection = error
            with self._changed:
                if not self.rejection:
                    self._running = None
                self._changed.notify_all()

    def _upload(self, path: Path) -> None:
        """Uploads a file, or a folder, whose manifest is deleted first and uploaded last."""
        files = [path]
        manifest = path / MANIFEST
        if path.is_dir():
            files = sorted(
                filter(Path.is_file, path.rglob("*")), key=lambda file: (file == manifest, file)
            )
        if (
            manifest in files
            and (address := self.address_of(manifest))
            and (older := connect().get(address))
        ):
            self._delete(older)
        for file in files:
            if address := self.address_of(file):
                self._generations[address] = connect().upload(
                    file, address, self._generations.get(address, 0)
                )
        if manifest in files:
            # The folder is whole in the bucket: the outdated ones are removed next, but not this
            # one.
            with self._changed:
                later = {path: self._outdated.pop(path)} if path in self._outdated else {}
                self._tasks = {**self._outdated, **self._tasks}
                self._outdated = later

    def _delete_folder(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if address := self.address_of(folder):
            marker = address / MANIFEST
            remotes = connect().list(address)
            for remote in sorted(remotes, key=lambda remote: remote.address != marker):
                self._delete(remote)

    def _delete(self, remote: Remote) -> None:
        connect().delete(remote)
        self._generations.pop(remote.address, None)
