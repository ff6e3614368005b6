"""Wraps google-cloud-storage and holds the limits on retries and timeouts; gcs_errors.py explains its errors.

The SDK retries single requests. This module adds what the SDK leaves to its caller: it reads a long object in pieces,
so that a late connection reset costs one piece only; it verifies the checksum of every object read and reads it again
if it is wrong; an upload names the generation that it replaces, so that a lost response does not write twice.
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
from trainer.storage.checksum import Counted, opened
from trainer.storage.gcs_errors import Cancelled, explained


@dataclass(frozen=True)
class Limits:
    """Holds the limits on retries and timeouts of requests, in seconds unless stated otherwise."""

    retry: float = 60  # how long a request is retried after 408, 429, 5xx, a reset, a timeout or a refused connection
    pause: float = 8  # longest backoff between two attempts; the first is up to 1 second
    connect: float = 10
    read: float = 20
    tries: int = 3  # of reading an object with a wrong checksum, and of an upload that conflicts with another one
    workers: int = 16  # concurrent transfers
    piece: int = 32 * 2**20  # bytes per read request


LIMITS = Limits()
_FIELDS = "nextPageToken,items(name,size,crc32c,generation,contentEncoding)"
_LIST, _READ = "list its objects (roles/storage.objectViewer)", "read it (roles/storage.objectViewer)"
_WRITE = "write it (roles/storage.objectUser)"


@dataclass(frozen=True)
class Remote:
    """Describes an object as it was listed; `generation` identifies this exact content."""

    address: Address
    size: int
    crc32c: str
    generation: int
    encoding: str = ""


def connect(limits: Limits | None = None) -> "Gcs":
    """Returns the process's client. Raises UserError without credentials."""
    return _connect(os.environ.get("STORAGE_EMULATOR_HOST", ""), limits or LIMITS)


@functools.lru_cache(maxsize=4)
def _connect(_emulator: str, limits: Limits) -> "Gcs":
    return Gcs(limits)


class Gcs:
    """Lists, reads, writes and deletes objects. Every method raises UserError or PlatformFault, one line each."""

    def __init__(self, limits: Limits) -> None:
        # Otherwise the SDK requests each bucket's metadata, which an account that may only read objects cannot get.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old Python versions and optional packages
            from google.cloud import storage
            from google.cloud.storage.retry import DEFAULT_RETRY
            from requests.adapters import HTTPAdapter

        self.limits = limits
        with explained("Cloud Storage"):
            self._client = storage.Client(project=None)
        for scheme in ("https://", "http://"):  # one pooled connection per worker
            self._client._http.mount(scheme, HTTPAdapter(pool_maxsize=limits.workers))
        self._options: dict[str, Any] = {
            "retry": DEFAULT_RETRY.with_timeout(limits.retry).with_delay(1, limits.pause, 2),
            "timeout": (limits.connect, limits.read),
        }

    def list(self, below: Address, most: int | None = None) -> list[Remote]:
        """Returns the objects below an address, sorted by name; at most `most` of them."""
        with explained(str(below), _LIST):
            found = self._client.list_blobs(
                below.bucket, prefix=below.prefix or None, fields=_FIELDS, max_results=most, **self._options
            )
            return [_remote(below.bucket, blob) for blob in found]

    def get(self, address: Address) -> Remote | None:
        """Returns the object of exactly this name, or None."""
        with explained(str(address), _READ):
            blob = self._client.bucket(address.bucket).get_blob(address.name, **self._options)
            return _remote(address.bucket, blob) if blob else None

    def download(
        self,
        found: Remote,
        file: Path,
        on_bytes: Callable[[int], None] = lambda size: None,
        cancelled: threading.Event | None = None,
    ) -> None:
        """Writes the object to `file`, complete and verified, or removes the file. Calls `on_bytes` with the progress.

        Raises PlatformFault if the checksum is wrong `limits.tries` times, or the object no longer exists.
        """
        try:
            with open(file, "wb") as raw:
                self._read(found, Counted(raw, on_bytes), cancelled or threading.Event())
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def read(self, found: Remote) -> bytes:
        """Returns the verified content of a small object. Raises the errors of `download`."""
        content = io.BytesIO()
        self._read(found, Counted(content), threading.Event())
        return content.getvalue()

    def _read(self, found: Remote, counted: Counted, cancelled: threading.Event) -> None:
        if found.encoding == "gzip":
            raise UserError(f"{found.address}: stored with Content-Encoding gzip: upload it without this encoding")
        blob = self._client.bucket(found.address.bucket).blob(found.address.name, generation=found.generation)
        for _ in range(self.limits.tries):
            counted.restart()
            for start in range(0, found.size, self.limits.piece):
                if cancelled.is_set():
                    raise Cancelled
                end = min(start + self.limits.piece, found.size) - 1
                with explained(str(found.address), _READ):
                    blob.download_to_file(
                        counted, start=start, end=end, raw_download=True, checksum=None, **self._options
                    )
            if (counted.size, counted.crc32c) == (found.size, found.crc32c):
                return
        raise PlatformFault(
            f"{found.address}: wrong checksum after {self.limits.tries} downloads: the data are damaged"
        )

    def upload(self, content: Path | bytes, address: Address, replaced: int = 0) -> int:
        """Uploads a file or bytes and returns the new generation. `replaced`: the generation to replace, 0 for none.

        Before it replaces another generation, it compares the content: if that is the same already, as after a lost
        response, nothing is written. Raises PlatformFault if others write the object at the same time.
        """
        with opened(content) as (stream, size, crc32c), explained(str(address), _WRITE):
            from google.api_core.exceptions import PreconditionFailed

            for _ in range(self.limits.tries):
                blob = self._client.bucket(address.bucket).blob(address.name)
                stream.seek(0)
                try:
                    blob.upload_from_file(
                        stream, size=size, checksum="crc32c", if_generation_match=replaced, **self._options
                    )
                except PreconditionFailed:
                    present = self.get(address)
                else:
                    present = _remote(address.bucket, blob)
                if present and (present.size, present.crc32c) == (size, crc32c):
                    return present.generation
                replaced = present.generation if present else 0
        raise PlatformFault(f"{address}: upload failed because the object kept changing: is another run writing to it?")

    def delete(self, found: Remote) -> None:
        """Deletes exactly this generation; one that is missing, as after a lost response, counts as deleted."""
        from google.api_core.exceptions import NotFound

        blob = self._client.bucket(found.address.bucket).blob(found.address.name)
        with explained(str(found.address), _WRITE), suppress(NotFound):
            blob.delete(if_generation_match=found.generation, **self._options)


def _remote(bucket: str, blob: Any) -> Remote:
    address = Address(bucket, blob.name)
    return Remote(address, int(blob.size), blob.crc32c or "", int(blob.generation), blob.content_encoding or "")
