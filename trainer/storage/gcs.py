"""Wraps google-cloud-storage and holds the limits on retries and timeouts; gcs_errors.py explains its errors.

This module adds what the SDK leaves to its caller: it reads a long object in pieces, so that a late connection reset
costs one piece only; it verifies the checksum of every object read and reads it again if it is wrong; an upload names
the generation that it replaces, so that a lost response does not write twice; retries.py and transport.py limit how
long a request may fail, or drip.
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
from trainer.storage.gcs_errors import Conflict, explained
from trainer.storage.login import credentials
from trainer.storage.retries import Retries, pauses
from trainer.storage.transport import Cancelled, Transport


@dataclass(frozen=True)
class Limits:
    """Holds the limits on retries and timeouts of requests, in seconds unless stated otherwise."""

    retry: float = 60  # how long a request is retried after 408, 429, 5xx, a reset, a timeout or a refused connection
    pause: float = 8  # longest backoff between two attempts; the first is up to 1 second
    connect: float = 10
    read: float = 20  # also the period in which a response must bring its share of `least`
    least: int = 100_000  # bytes a minute that a response must bring
    refused: float = 15  # how long a request is retried after a refused token
    tries: int = 3  # of an upload that conflicts with another one
    downloads: int = 10  # of an object whose bytes differ each time
    workers: int = 16  # concurrent transfers
    piece: int = 8 * 2**20  # bytes per read request, which are held in memory


LIMITS = Limits()
_WRITER = ("trainer-host", "trainer-process", "trainer-job")  # names of metadata
_FIELDS = "nextPageToken,items(name,size,crc32c,generation,contentEncoding)"
_LIST, _READ = "list its objects (roles/storage.objectViewer)", "read it (roles/storage.objectViewer)"
_WRITE = "write it (roles/storage.objectUser)"


@dataclass(frozen=True, slots=True)  # a bucket may have a million
class Remote:
    """Describes an object as it was listed; `generation` identifies this exact content."""

    address: Address
    size: int
    crc32c: str
    generation: int
    encoding: str = ""
    writer: str = "an unknown program"  # who wrote it and when
    updated: float = 0.0  # when it was written, seconds since 1970; 0 in listings


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
        self.limits = limits
        self._transport = Transport(round(limits.least * limits.read / 60), limits.read)
        self._client: Any = None
        self.log_in()
        retries = Retries(limits.retry, limits.pause, limits.refused, lambda: self._transport.cancelled)
        self._options: dict[str, Any] = {"retry": retries, "timeout": (limits.connect, limits.read)}

    def log_in(self) -> None:
        """Reads the credentials anew, as after a refused token: the user may have logged in again."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old Python versions and optional packages
            from google.cloud import storage

        with explained("Cloud Storage"):
            login = None if os.environ.get("STORAGE_EMULATOR_HOST") else credentials(anew=True)
            self._client = storage.Client(project=None, credentials=login)
        for scheme in ("https://", "http://"):  # one pooled connection per worker
            self._client._http.mount(scheme, self._transport.adapter(self.limits.workers))

    @property
    def client(self) -> Any:
        """Returns the SDK's client, for what this class does not do."""
        return self._client

    def cut(self, cancelled: threading.Event) -> None:
        """Sets the event, and ends the transfers that were started with it, also those that wait for bytes."""
        self._transport.cut(cancelled)

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

        Raises UserError if it arrives twice with the same wrong content, PlatformFault if the content is wrong
        `limits.downloads` times or the object no longer exists.
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
        before = ""
        for _, pause in zip(range(self.limits.downloads), pauses(self.limits.pause), strict=False):
            counted.restart()
            for start in range(0, found.size, self.limits.piece):
                self._read_piece(found, start, blob, counted, cancelled)
            if (counted.size, counted.crc32c) == (found.size, found.crc32c):
                return
            if (arrived := f"{counted.size} {counted.crc32c}") == before:
                raise UserError(
                    f"{found.address}: arrived twice with the same content, which does not match its checksum: it is "
                    "damaged where it is stored: upload it again"
                )
            before = arrived
            if cancelled.wait(pause):
                raise Cancelled
        raise PlatformFault(
            f"{found.address}: wrong checksum after {self.limits.downloads} downloads, with other content each time: "
            "it is damaged on its way"
        )

    def _read_piece(self, found: Remote, start: int, blob: Any, counted: Counted, cancelled: threading.Event) -> None:
        if cancelled.is_set():
            raise Cancelled
        end = min(start + self.limits.piece, found.size) - 1
        try:
            with explained(str(found.address), _READ), self._transport.of(cancelled):
                blob.download_to_file(
                    counted, start=start, end=end, raw_download=True, checksum=None, single_shot_download=True,
                    **self._options,
                )  # fmt: skip
        except PlatformFault:
            if cancelled.is_set():  # `cut` has ended the connection
                raise Cancelled from None
            raise

    def upload(self, content: Path | bytes, address: Address, replaced: int = 0, strict: bool = False) -> int:
        """Uploads a file or bytes and returns the new generation. `replaced`: the generation to replace, 0 for none.

        Before it replaces another generation, it compares the content: if that is the same already, as after a lost
        response, nothing is written. Raises Conflict if others write the object at the same time; with `strict`, if it
        is of another generation than `replaced`.
        """
        with opened(content) as (stream, size, crc32c), explained(str(address), _WRITE):
            from google.api_core.exceptions import PreconditionFailed

            present: Remote | None = None
            for _ in range(1 if strict else self.limits.tries):
                blob = self._client.bucket(address.bucket).blob(address.name)
                blob.metadata = writer()
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
        raise Conflict(
            f"{address}: upload failed because the object kept changing: is another run writing to it? Last written by "
            f"{present.writer if present else 'a run that deleted it'}"
        )

    def delete(self, found: Remote) -> None:
        """Deletes exactly this generation, unless it is missing or replaced, as after a lost response."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        blob = self._client.bucket(found.address.bucket).blob(found.address.name)
        with explained(str(found.address), _WRITE), suppress(NotFound, PreconditionFailed):
            blob.delete(if_generation_match=found.generation, **self._options)


def writer() -> dict[str, str]:
    """Returns who writes, as metadata of each object: machine, process, and the job's id on Vertex AI."""
    found = {"trainer-host": os.uname().nodename, "trainer-process": str(os.getpid())}
    job = os.environ.get("CLOUD_ML_JOB_ID", "")
    return {**found, **({"trainer-job": job} if job else {})}


def _remote(bucket: str, blob: Any) -> Remote:
    address = Address(bucket, blob.name)
    encoding, given = blob.content_encoding or "", blob.metadata or {}
    who = " ".join(f"{name.removeprefix('trainer-')} {given[name]}" for name in _WRITER if name in given)
    written = f", {blob.updated:%Y-%m-%d %H:%M:%S} UTC" if blob.updated else ""
    seconds = blob.updated.timestamp() if blob.updated else 0.0
    shown = (who or "an unknown program") + written
    return Remote(address, int(blob.size), blob.crc32c or "", int(blob.generation), encoding, shown, seconds)
