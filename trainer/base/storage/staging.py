"""Checks the addresses of a run, and downloads its data to a cache: once, in parallel, verified and
atomically.

Each address has one folder in the cache: `local`, the copy, with complete files only; `parts`,
unfinished downloads; `lock`, so that two processes do not download the same data. Files whose size
and checksum match are not downloaded again. Requests are those of `gcs.py`, with their retries and
errors.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from threading import Event, Lock
from typing import TypeVar

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import ProgressBar, log
from trainer.base.storage.gcs import LIMITS, Remote, TooSlow, connect, crc32c_of, explained, in_time
from trainer.base.storage.local_files import Address, expanded, output_address, parse

Item = TypeVar("Item")

SECONDS = 15  # for all checks of `preflight` together
_LIMITS = replace(LIMITS, retry=6, pause=2, connect=3, read=3)
_FORBIDDEN = re.compile(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# bytes, the limits of Linux file systems
_LONGEST_NAME = 255
_LONGEST_PATH = 4000
_LOG_SECONDS = 30.0  # between two lines of progress


def preflight(inputs: dict[str, str], outputs: dict[str, str]) -> None:
    """Checks the addresses among these settings within 15 seconds; local paths are not checked.

    inputs: settings that name something to read, and their values; outputs: settings that name
        folders to write to. Raises UserError for the first address that cannot be used, or
        PlatformFault if Cloud Storage fails.
    """
    addresses = [(name, parse(path, name), False) for name, path in inputs.items()]
    addresses += [(name, output_address(path, name), True) for name, path in outputs.items()]
    checks = []
    for name, address, written in addresses:
        if address:
            checks.append((f"{name}={address}", address, written))

    # To be readable is to have an object; to be writable, to take a small one.
    def check_all() -> None:
        for setting, address, written in checks:
            try:
                gcs = connect(_LIMITS)
                if written:
                    probe = address / f".probe-{uuid.uuid4().hex}"
                    gcs.upload(b"", probe)
                    if remote := gcs.get(probe):
                        gcs.delete(remote)
                listed = gcs.list(address, most=1)
                if not (listed or written or (address.name and gcs.get(address))):
                    raise UserError(f"no objects found: check with `gcloud storage ls {address}`")
            except (UserError, PlatformFault) as error:
                text = str(error)
                raise type(error)(
                    text if text.startswith(setting) else f"{setting}: {text}"
                ) from error

    if checks:
        try:
            in_time(check_all, SECONDS)  # also ends a look-up of credentials
        except TooSlow:
            raise PlatformFault(
                f"{checks[0][0]}: no response within {SECONDS:.0f} seconds: check the network and"
                " the credentials"
            ) from None


def stage(path: str, name: str, cache_dir: str = "") -> Path:
    """Returns a local copy of the setting's address, or `path` if it is local or in /gcs/.

    Raises UserError if nothing is found, reading is not permitted, a name is not usable or the disk
    is too small.
    """
    address = parse(path, name)
    return Staged(address, name, cache_dir).fetch() if address else expanded(path)


def cache_home(cache_dir: str) -> Path:
    """Returns `cache_dir`, or by default a folder in the user's cache."""
    return expanded(cache_dir or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/vertex-trainer")


def home_of(address: Address, cache_dir: str) -> Path:
    """Returns the folder of `address` in the cache, a different one for each address."""
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:16]
    return cache_home(cache_dir) / f"{address.bucket}-{digest}"


_listed: dict[Address, list[Remote]] = {}  # what `listing` returned, until it is staged


def listing(address: Address) -> list[Remote]:
    """Returns the objects of an address, which `Staged` then downloads as they were compared."""
    gcs = connect()
    remotes = gcs.list(address)
    if not remotes and address.name and (single := gcs.get(address)):
        remotes = [single]
    # Consoles create an empty object with a trailing slash for a folder.
    files = [item for item in remotes if item.size or not item.address.name.endswith("/")]
    _listed[address] = files
    return files


@contextmanager
def naming(local: Path, address: Address | None) -> Iterator[None]:
    """Replaces the local copy's path by the address in errors of the block."""
    try:
        yield
    except (UserError, PlatformFault) as error:
        kind = UserError if isinstance(error, UserError) else PlatformFault
        text = str(error)
        if address is None or str(local) not in text:
            raise
        raise kind(text.replace(str(local), str(address).rstrip("/"))) from error


class Staged:
    """Holds the listed objects of an address by name ("" for a single one), and downloads them."""

    def __init__(self, address: Address, name: str, cache_dir: str = "") -> None:
        self._gcs = connect()
        self._setting = f"{name}={address}"
        listed = _listed.get(address) or listing(address)
        _listed.pop(address, None)
        self.objects = {remote.below(address): remote for remote in listed}
        if not self.objects:
            raise UserError(
                f"{self._setting}: no objects found: check with `gcloud storage ls {address}`"
            )
        self.home = home_of(address, cache_dir)
        self.local = self.home / "local" / (PurePosixPath(address.name).name or address.bucket)
        _refuse_names([self.local.name], self.home, self._setting)
        if [remote.address for remote in listed] != [address]:
            _refuse_names(self.objects, self.local, self._setting)

    def fetch(
        self, is_needed: Callable[[str], bool] = lambda below: True, quiet: bool = False
    ) -> Path:
        """Downloads objects, removes local files that have no object, and returns the local copy.

        is_needed: returns whether to download an object, from its name below the address.
        """
        chosen = {below: remote for below, remote in self.objects.items() if is_needed(below)}
        expected = {str(self.local / name) for name in self.objects}
        parts = self.home / "parts"

        def is_present(below: str) -> bool:
            file = self.local / below
            remote = chosen[below]
            try:
                return (
                    not file.is_symlink()
                    and file.stat().st_size == remote.size
                    and crc32c_of(file) == remote.crc32c
                )
            except OSError:
                return False

        with explained(self._setting):
            self.home.mkdir(parents=True, exist_ok=True)
            with open(self.home / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another process may download the same address
                shutil.rmtree(parts, ignore_errors=True)  # of a process that was killed
                parts.mkdir()
                self.local.parent.mkdir(exist_ok=True)
                # Remove files that have no object, also a file where a folder is needed and the
                # other way round.
                if not self.local.is_dir() and str(self.local) not in expected:
                    self.local.unlink(missing_ok=True)
                for folder, _, files in os.walk(self.local, topdown=False):
                    for file in files:
                        if os.path.join(folder, file) not in expected:
                            os.unlink(os.path.join(folder, file))
                    if not os.listdir(folder):
                        os.rmdir(folder)
                # Download what is missing, if the disk has room for it.
                with ThreadPoolExecutor(self._gcs.limits.workers) as pool:
                    present = list(pool.map(is_present, chosen))
                missing = [below for below, whole in zip(chosen, present, strict=True) if not whole]
                size = sum(chosen[below].size for below in missing or chosen)
                if not missing:
                    if not quiet:
                        log.info(
                            f"{self._setting}: {len(chosen):,} files, {size / 1e6:,.1f} MB, are in"
                            f" {self.local} already"
                        )
                    return self.local
                free = shutil.disk_usage(self.home).free
                if size > free:
                    raise UserError(
                        f"{self._setting}: {size / 1e9:,.2f} GB to download, but {free / 1e9:,.2f}"
                        f" GB free in {self.home}: use a larger disk with --cache_dir=FOLDER, or on"
                        " Vertex AI read them through /gcs/BUCKET/…"
                    )
                with transfer_bar(self._setting, size, len(missing), quiet) as advance:

                    def transfer(below: str, cancelled: Event) -> None:
                        # a short name without folders
                        part = parts / hashlib.sha256(below.encode()).hexdigest()
                        self._gcs.download(chosen[below], part, advance, cancelled)
                        whole = self.local / below
                        whole.parent.mkdir(parents=True, exist_ok=True)
                        os.replace(part, whole)

                    in_parallel(transfer, missing, self._gcs.limits.workers)
        return self.local


def _refuse_names(names: Iterable[str], root: Path, setting: str) -> None:
    """Raises UserError for the first name that a local file below `root` cannot have."""
    files = set(names)
    for name in sorted(files):
        parts = name.split("/")
        lengths = [len(part.encode(errors="surrogatepass")) for part in parts]
        length = len(f"{root}/{name}".encode(errors="surrogatepass"))
        folders = {"/".join(parts[:count]) for count in range(1, len(parts))} & files
        why = f"{setting}: the object {name[:100]!r} cannot be a local file"
        if {"", ".", ".."} & {*parts}:
            raise UserError(f"{why}: it contains an empty part, . or .. between slashes: rename it")
        if _FORBIDDEN.search(name):
            raise UserError(f"{why}: it contains a backslash or a control character: rename it")
        if max(lengths) > _LONGEST_NAME or length > _LONGEST_PATH:
            raise UserError(f"{why}: it is too long: rename it")
        if folders:
            raise UserError(
                f"{why}: {min(folders, default='')[:100]!r} is an object too: rename it"
            )


def in_parallel(work: Callable[[Item, Event], None], items: Collection[Item], workers: int) -> None:
    """Calls `work` with each item and an event, set at the first failure or Ctrl-C."""
    cancelled = Event()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for transfer in as_completed([pool.submit(work, item, cancelled) for item in items]):
                transfer.result()
        except BaseException:
            cancelled.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def transfer_bar(label: str, size: int, files: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Yields a thread-safe function that adds transferred bytes; negative for a repetition.

    Shows a bar on a terminal, a log line every 30 seconds elsewhere, and logs files, bytes and
    seconds at the end.
    """
    began = logged = time.monotonic()
    transferred = 0
    lock = Lock()

    def advance(count: int) -> None:
        nonlocal transferred, logged
        with lock:
            transferred += count
            if not (bar.shown or quiet) and time.monotonic() > logged + _LOG_SECONDS:
                logged = time.monotonic()
                log.info(f"{label}: {transferred / 1e6:,.0f} of {size / 1e6:,.0f} MB")
        bar.update(advance=count)

    with closing(ProgressBar("bar", "bytes", "speed", "left", total=size, hidden=quiet)) as bar:
        yield advance
    if not quiet:
        seconds = time.monotonic() - began
        log.info(f"{label}: fetched {files:,} files, {size / 1e6:,.1f} MB, in {seconds:.1f} s")
