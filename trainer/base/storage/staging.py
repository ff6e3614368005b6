"""Downloads data from Cloud Storage to a cache: once, several objects at a time, verified and atomically.

Each address has one folder in the cache: `local`, the copy, with complete files only; `parts`, unfinished downloads;
`lock`, so that two processes do not download the same. Files whose size and checksum match are not downloaded again.
"""

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from trainer.base.errors import PlatformFault, UserError
from trainer.base.log import log
from trainer.base.storage.address import Address, expanded, parse
from trainer.base.storage.checksum import crc32c_of
from trainer.base.storage.gcs import Remote, connect
from trainer.base.storage.gcs_errors import explained
from trainer.base.storage.transfers import in_parallel, transfer_bar

_FORBIDDEN = re.compile(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_LONGEST_NAME, _LONGEST_PATH = 255, 4000  # bytes, the limits of Linux file systems


def stage(path: str, name: str, cache_dir: str = "") -> Path:
    """Returns a local copy of the address in the setting `name`, or `path` itself if it is local or below /gcs/.

    Raises UserError if nothing is found, reading is not permitted, a name is not usable or the disk is too small.
    """
    address = parse(path, name)
    return Staged(address, name, cache_dir).fetch() if address else expanded(path)


def cache_home(cache_dir: str = "") -> Path:
    """Returns `cache_dir`, or by default a folder in the user's cache."""
    return expanded(cache_dir or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/vertex-trainer")


def home_of(address: Address, cache_dir: str = "") -> Path:
    """Returns the folder of `address` in the cache, a different one for each address."""
    digest = hashlib.sha256(str(address).encode()).hexdigest()[:16]
    return cache_home(cache_dir) / f"{address.bucket}-{digest}"


_listed: dict[Address, list[Remote]] = {}  # by `listing`, until they are staged


def listing(address: Address) -> list[Remote]:
    """Returns the objects of an address; `Staged` then stages these, so that a run reads what it has compared."""
    gcs = connect()
    remotes = gcs.list(address)
    if not remotes and address.name and (single := gcs.get(address)):
        remotes = [single]
    # Consoles create an empty object with a trailing slash for a folder.
    _listed[address] = [remote for remote in remotes if remote.size or not remote.address.name.endswith("/")]
    return _listed[address]


@contextmanager
def naming(local: Path, address: Address | None) -> Iterator[None]:
    """Names the address in place of its local copy in errors within the block: the user does not know the copy."""
    try:
        yield
    except (UserError, PlatformFault) as error:
        kind, text = UserError if isinstance(error, UserError) else PlatformFault, str(error)
        if address is None or str(local) not in text:
            raise
        raise kind(text.replace(str(local), str(address).rstrip("/"))) from error


class Staged:
    """Holds the listed objects of an address by their names below it ("" for a single object), and downloads them."""

    def __init__(self, address: Address, name: str, cache_dir: str = "") -> None:
        self._gcs, self._setting = connect(), f"{name}={address}"
        listed = _listed.pop(address, None) or listing(address)
        _listed.pop(address, None)
        single = len(listed) == 1 and listed[0].address == address
        self.objects = {remote.address.name[len(address.prefix) :]: remote for remote in listed}
        if not self.objects:
            raise UserError(f"{self._setting}: no objects found: check with `gcloud storage ls {address}`")
        self.home = home_of(address, cache_dir)
        self.local = self.home / "local" / (PurePosixPath(address.name).name or address.bucket)
        _refuse_names([self.local.name], self.home, self._setting)
        if not single:
            _refuse_names(self.objects, self.local, self._setting)

    def fetch(self, is_needed: Callable[[str], bool] = lambda below: True, quiet: bool = False) -> Path:
        """Downloads objects, removes files without an object, and returns the local copy.

        is_needed: tells by a name below the folder whether the object is downloaded.
        """
        chosen = {below: remote for below, remote in self.objects.items() if is_needed(below)}
        with explained(self._setting), self._alone():
            _clear(self.local, self.objects.keys())
            with ThreadPoolExecutor(self._gcs.limits.workers) as pool:
                same = list(pool.map(lambda item: _is_same(self.local / item[0], item[1]), chosen.items()))
            missing = {below: chosen[below] for below, whole in zip(chosen, same, strict=True) if not whole}
            if missing:
                self._fetch(missing, quiet)
            elif not quiet:
                size = sum(remote.size for remote in chosen.values())
                log.info(f"{self._setting}: {len(chosen):,} files, {size / 1e6:,.1f} MB, are in {self.local} already")
        return self.local

    def _fetch(self, missing: dict[str, Remote], quiet: bool) -> None:
        size = sum(remote.size for remote in missing.values())
        free = shutil.disk_usage(self.home).free
        if size > free:
            raise UserError(
                f"{self._setting}: {size / 1e9:,.2f} GB to download, but {free / 1e9:,.2f} GB free in {self.home}: "
                "use a larger disk with --cache_dir=FOLDER, or on Vertex AI read them through /gcs/BUCKET/…"
            )
        numbers = {below: number for number, below in enumerate(missing)}
        with transfer_bar(self._setting, size, len(missing), quiet) as advance:

            def transfer(below: str, cancelled: threading.Event) -> None:
                part, whole = self.home / "parts" / str(numbers[below]), self.local / below
                self._gcs.download(missing[below], part, advance, cancelled)
                whole.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, whole)

            in_parallel(transfer, missing, self._gcs.limits.workers)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Locks this address against other processes within the block, and removes stale parts."""
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            parts = self.home / "parts"
            shutil.rmtree(parts, ignore_errors=True)
            parts.mkdir()
            self.local.parent.mkdir(exist_ok=True)
            yield


def _refuse_names(names: Iterable[str], root: Path, setting: str) -> None:
    """Raises UserError for the first name that a local file below `root` cannot have."""
    files = set(names)
    for name in sorted(files):
        parts = name.split("/")
        reason = ""
        if any(part in ("", ".", "..") for part in parts):
            reason = "it contains an empty part, . or .. between slashes"
        elif _FORBIDDEN.search(name):
            reason = "it contains a backslash or a control character"
        elif max(map(_bytes, parts)) > _LONGEST_NAME or _bytes(f"{root}/{name}") > _LONGEST_PATH:
            reason = "it is too long"
        else:
            beside = next(("/".join(parts[:n]) for n in range(1, len(parts)) if "/".join(parts[:n]) in files), None)
            reason = f"{beside[:100]!r} is an object too" if beside else ""
        if reason:
            raise UserError(f"{setting}: the object {name[:100]!r} cannot be a local file: {reason}: rename it")


def _bytes(name: str) -> int:
    return len(name.encode(errors="surrogatepass"))


def _is_same(file: Path, remote: Remote) -> bool:
    try:
        return not file.is_symlink() and file.stat().st_size == remote.size and crc32c_of(file) == remote.crc32c
    except OSError:
        return False


def _clear(local: Path, names: Iterable[str]) -> None:
    """Removes files without an object from the local copy, also a file in place of a folder and vice versa."""
    kept = {str(local / name) for name in names}
    if not local.is_dir():
        if str(local) not in kept:
            local.unlink(missing_ok=True)
        return
    for folder, _, files in os.walk(local, topdown=False):
        for file in files:
            if os.path.join(folder, file) not in kept:
                os.unlink(os.path.join(folder, file))
        if not os.listdir(folder):
            os.rmdir(folder)
