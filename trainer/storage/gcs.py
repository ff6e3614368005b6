"""The one door to google-cloud-storage, and every limit on retries and waiting; failures.py says what a failure means.

The SDK repeats a request by itself; what it leaves to its caller is done here: a long object is read in pieces, so that
no reset comes too late to be mended; every byte read is counted into a checksum, and a wrong one is fetched again; an
upload names the generation it replaces, so that a lost answer does not write twice.
https://cloud.google.com/storage/docs/retry-strategy
"""

import functools
import io
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import PlatformFault, UserError
from trainer.storage.address import Address
from trainer.storage.checksum import Counted, contents_of
from trainer.storage.failures import Cancelled, explained


@dataclass(frozen=True)
class Limits:
    """Every limit on retries and waiting: seconds, where nothing else is said."""

    retry: float = 60  # a request that met 408, 429, 5xx, a reset, a stall or a refusal to connect is repeated so long
    pause: float = 8  # between two attempts, at most; the first pause is up to 1 second
    connect: float = 10
    silence: float = 20  # nothing heard for so long is a stall
    tries: int = 3  # of an object that arrives with a wrong checksum, or of an upload that another one overtook
    workers: int = 16  # objects under way at the same time
    piece: int = 32 * 2**20  # bytes of one read request


LIMITS = Limits()
_FIELDS = "nextPageToken,items(name,size,crc32c,generation,contentEncoding)"
_LIST, _READ = "list its objects (roles/storage.objectViewer)", "read it (roles/storage.objectViewer)"
_WRITE = "write it (roles/storage.objectUser)"


@dataclass(frozen=True)
class Remote:
    """One object as it was listed; `generation` pins this very content."""

    address: Address
    size: int
    crc32c: str
    generation: int
    encoding: str = ""


def connect(limits: Limits | None = None) -> "Gcs":
    """The process's client; UserError without credentials."""
    return _connect(os.environ.get("STORAGE_EMULATOR_HOST", ""), limits or LIMITS)


@functools.lru_cache(maxsize=4)
def _connect(_emulator: str, limits: Limits) -> "Gcs":
    return Gcs(limits)


class Gcs:
    """Lists, reads, writes and deletes objects. Every method raises UserError or PlatformFault, one line each."""

    def __init__(self, limits: Limits) -> None:
        # Else the SDK asks for each bucket's metadata, which those who may only read objects are not allowed to.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pythons to be dropped one day, of packages that are not needed
            from google.cloud import storage
            from google.cloud.storage.retry import DEFAULT_RETRY
            from requests.adapters import HTTPAdapter

        self.limits = limits
        with explained("Cloud Storage"):
            self._client = storage.Client(project=None)
        for scheme in ("https://", "http://"):  # as many kept connections as workers
            self._client._http.mount(scheme, HTTPAdapter(pool_maxsize=limits.workers))
        self._patience: dict[str, Any] = {
            "retry": DEFAULT_RETRY.with_timeout(limits.retry).with_delay(1, limits.pause, 2),
            "timeout": (limits.connect, limits.silence),
        }

    def list(self, below: Address, most: int | None = None) -> list[Remote]:
        """The objects whose names begin with `below` and a slash, sorted by name; at most `most` of them."""
        with explained(str(below), _LIST):
            found = self._client.list_blobs(
                below.bucket, prefix=below.prefix or None, fields=_FIELDS, max_results=most, **self._patience
            )
            return [_remote(below.bucket, blob) for blob in found]

    def get(self, address: Address) -> Remote | None:
        """The object of that very name, or None."""
        with explained(str(address), _READ):
            blob = self._client.bucket(address.bucket).get_blob(address.name, **self._patience)
            return _remote(address.bucket, blob) if blob else None

    def download(
        self,
        found: Remote,
        file: Path,
        heard: Callable[[int], None] = lambda size: None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Writes the object to `file`, whole and verified, or removes it; `heard` is told of the bytes as they come.

        PlatformFault where the checksum is wrong `limits.tries` times, or the object is there no more.
        """
        try:
            with open(file, "wb") as raw:
                self._read(found, Counted(raw, heard), cancelled or threading.Event())
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def read(self, found: Remote) -> bytes:
        """The content of a small object, verified; errors as of download."""
        content = io.BytesIO()
        self._read(found, Counted(content), threading.Event())
        return content.getvalue()

    def _read(self, found: Remote, counted: Counted, cancelled: threading.Event) -> None:
        if found.encoding == "gzip":
            raise UserError(f"{found.address}: stored with Content-Encoding gzip: upload it without")
        blob = self._client.bucket(found.address.bucket).blob(found.address.name, generation=found.generation)
        for _ in range(self.limits.tries):
            counted.restart()
            for start in range(0, found.size, self.limits.piece):
                if cancelled.is_set():
                    raise Cancelled
                end = min(start + self.limits.piece, found.size) - 1
                with explained(str(found.address), _READ):
                    blob.download_to_file(
                        counted, start=start, end=end, raw_download=True, checksum=None, **self._patience
                    )
            if (counted.size, counted.crc32c) == (found.size, found.crc32c):
                return
        raise PlatformFault(f"{found.address}: arrived damaged {self.limits.tries} times: its checksum is wrong")

    def upload(self, file: Path, address: Address, known: int = 0) -> int:
        """Sends `file` and returns the object's new generation. `known`: the generation that it replaces, 0 for none.

        What another generation holds is replaced only after it was looked up: where it is this very content, as after
        a lost answer, nothing is written. PlatformFault where others write there at the same time.
        """
        with contents_of(file) as (content, size, crc32c), explained(str(address), _WRITE):
            from google.api_core.exceptions import PreconditionFailed

            for _ in range(self.limits.tries):
                blob = self._client.bucket(address.bucket).blob(address.name)
                content.seek(0)
                try:
                    blob.upload_from_file(
                        content, size=size, checksum="crc32c", if_generation_match=known, **self._patience
                    )
                except PreconditionFailed:
                    there = self.get(address)
                    if there and (there.size, there.crc32c) == (size, crc32c):
                        return there.generation
                    known = there.generation if there else 0
                    continue
                if (blob.size, blob.crc32c) == (size, crc32c):
                    return int(blob.generation)
                known = int(blob.generation)
        raise PlatformFault(f"{address}: could not be written whole: is another run writing there?")

    def delete(self, found: Remote) -> None:
        """Deletes this very content; what is there no more, as after a lost answer, is deleted already."""
        from google.api_core.exceptions import NotFound

        blob = self._client.bucket(found.address.bucket).blob(found.address.name)
        with explained(str(found.address), _WRITE), suppress(NotFound):
            blob.delete(if_generation_match=found.generation, **self._patience)


def _remote(bucket: str, blob: Any) -> Remote:
    address = Address(bucket, blob.name)
    return Remote(address, int(blob.size), blob.crc32c or "", int(blob.generation), blob.content_encoding or "")
