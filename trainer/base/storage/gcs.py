"""Lists, reads, writes and deletes objects of Cloud Storage.

No other module uses google-cloud-storage.

The client's own policy retries requests up to a deadline, also after a refused token. This module
adds what the client leaves to its caller: it reads a long object in pieces, so that a late
connection reset costs one piece only; it verifies the checksum of every object and reads it again
if it is wrong; an upload names the generation that it replaces, so that a lost response does not
write twice. Errors are one line that says what to do.
https://cloud.google.com/storage/docs/retry-strategy

Each request has a limit on its whole time, because a socket's timeout limits only the wait for the
next byte: one byte every few seconds would hold a request forever. So a request runs in a daemon
thread, which is abandoned when its time is over; its result is then ignored.
"""

import base64
import io
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any, TypeVar

from trainer.base.errors import PlatformFault, UserError, shortened
from trainer.base.storage.local_files import Address
from trainer.base.storage.login import credentials, login_command

T = TypeVar("T")
NEVER = Event()  # is never set


@dataclass(frozen=True)
class TransferLimits:
    """Holds the limits on retries and times of requests, in seconds unless stated otherwise."""

    # how long a request is retried after 408, 429, 5xx, a reset, a timeout or a refused connection
    retry: float = 120
    pause: float = 4  # longest backoff between two attempts; the first is up to 1 second
    connect: float = 10
    # wait for the next byte, and the whole time of a request that moves no content
    read: float = 20
    # bytes a second of content: a slower transfer is cut like a silent connection
    rate: int = 40_000
    # of an upload that conflicts with another one, and of an object that arrives with a wrong
    # checksum
    tries: int = 3
    workers: int = 16  # concurrent transfers
    # bytes per read request, held in memory; reading them takes less than `retry`
    block: int = 2 * 2**20


LIMITS = TransferLimits()
_POLL_SECONDS = 0.1  # between two looks whether a request has ended or is cancelled
# identifies this process: another machine may have the same name and process number
_START = uuid.uuid4().hex
_FIELDS = "nextPageToken,items(name,size,crc32c,generation,contentEncoding)"
_LIST = "list its objects (roles/storage.objectViewer)"
_READ = "read it (roles/storage.objectViewer)"
_WRITE = "write it (roles/storage.objectUser)"
# bytes; smaller files are read whole before the upload, because they may grow meanwhile
_IN_MEMORY = 64 * 2**20


class Cancelled(Exception):
    """Ends a transfer because another one failed or a signal arrived."""


class TooSlow(ConnectionError):
    """Ends a request whose time is over; the client retries it like a connection that was cut."""


class RefusedToken(UserError):
    """Reports refused credentials; after a new login the same request may succeed."""


class NoPermission(UserError):
    """Reports a missing permission of this machine's account; the account of a job may have it."""


class Conflict(PlatformFault):
    """Reports an object that another process changes while it is replaced."""


@dataclass(frozen=True, slots=True)  # a bucket may have a million objects
class Remote:
    """Describes an object as it was listed; `generation` identifies this exact content."""

    address: Address
    size: int
    crc32c: str
    generation: int
    encoding: str = ""
    metadata: Mapping[str, str] | None = None  # see `writer`; None in listings
    updated: datetime | None = None  # None in listings
    metageneration: int | None = None  # changes with the metadata; None in listings

    def below(self, address: Address) -> str:
        """Returns the object's name below an address; "" if it is the address itself."""
        return self.address.name[len(address.prefix) :]

    @property
    def writer(self) -> str:
        """Returns who wrote the object, and when."""
        written = f", {self.updated:%Y-%m-%d %H:%M:%S} UTC" if self.updated else ""
        return (self.metadata or {}).get("trainer-writer", "an unknown program") + written


def connect(limits: TransferLimits | None = None) -> "Gcs":
    """Returns the client of this process for these limits. Raises UserError without credentials."""
    return _connect(os.environ.get("STORAGE_EMULATOR_HOST", ""), limits or LIMITS)


@lru_cache(maxsize=4)
# another emulator needs another client
def _connect(_emulator: str, limits: TransferLimits) -> "Gcs":
    return Gcs(limits)


class Gcs:
    """Lists, reads, writes and deletes objects.

    Every method raises UserError or PlatformFault, one line each.
    """

    def __init__(self, limits: TransferLimits) -> None:
        # Otherwise the client requests each bucket's metadata, which an account that may only read
        # objects cannot get.
        os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
        self.limits = limits
        self.log_in()
        from google.api_core.retry import Retry
        from google.cloud.storage.retry import DEFAULT_RETRY

        delays = {"initial": min(1.0, limits.pause), "maximum": limits.pause}
        self._retry_temporary = DEFAULT_RETRY.with_delay(**delays).with_timeout(limits.retry)
        self._retry_refused = Retry(is_refused_token, timeout=limits.retry, **delays)
        # `_request` retries, not the client.
        self._once = {"retry": None, "timeout": (limits.connect, limits.read)}

    def log_in(self) -> None:
        """Reads the credentials again: the user may have logged in meanwhile."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old Python versions and optional packages
            from google.cloud import storage
        from requests.adapters import HTTPAdapter

        with explained("Cloud Storage"):
            login = None if os.environ.get("STORAGE_EMULATOR_HOST") else credentials(anew=True)
            # google-cloud-storage's own, also for what this class does not do.
            self.client: Any = storage.Client(project=None, credentials=login)
        for scheme in ("https://", "http://"):  # one pooled connection per worker
            self.client._http.mount(scheme, HTTPAdapter(pool_maxsize=self.limits.workers))  # noqa: SLF001

    def list(self, below: Address, most: int | None = None) -> list[Remote]:
        """Returns the objects below an address, sorted by name; at most `most` of them."""
        listed: list[Remote] = []
        token: str | None = None

        def page() -> tuple[list[Remote], str | None]:
            remaining = None if most is None else most - len(listed)
            blobs = self.client.list_blobs(
                below.bucket,
                prefix=below.prefix or None,
                fields=_FIELDS,
                max_results=remaining,
                page_token=token,
                **self._once,
            )
            remotes = [_remote(below.bucket, blob) for blob in next(blobs.pages)]
            return remotes, blobs.next_page_token

        while True:
            remotes, token = self._request(page, below, _LIST)
            listed += remotes
            if not token or len(listed) == most:
                return listed

    def get(self, address: Address) -> Remote | None:
        """Returns the object of exactly this name, or None."""
        blob = self._request(
            lambda: self._blob(address).bucket.get_blob(address.name, **self._once), address, _READ
        )
        return _remote(address.bucket, blob) if blob else None

    def location(self, bucket: str) -> str:
        """Returns the location of a bucket, as US or EUROPE-WEST4."""
        needed = "read its location (roles/storage.bucketViewer)"
        content = self._request(
            lambda: self.client.get_bucket(bucket, **self._once), Address(bucket, ""), needed
        )
        return str(content.location)

    def download(
        self,
        remote: Remote,
        file: Path,
        on_bytes: Callable[[int], None] = lambda size: None,
        cancelled: Event = NEVER,
    ) -> None:
        """Writes the object to `file`, complete and verified, or removes the file.

        Calls `on_bytes` with the progress.

        Raises PlatformFault if the content is wrong `limits.tries` times or the object no longer
        exists.
        """
        try:
            with explained(str(remote.address)), open(file, "wb") as raw:
                self._read(remote, raw, on_bytes, cancelled)
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def read(self, remote: Remote) -> bytes:
        """Returns the verified content of a small object. Raises the errors of `download`."""
        content = io.BytesIO()
        self._read(remote, content, lambda size: None, NEVER)
        return content.getvalue()

    def _read(
        self, remote: Remote, target: IO[bytes], on_bytes: Callable[[int], None], cancelled: Event
    ) -> None:
        if remote.encoding == "gzip":
            raise UserError(
                f"{remote.address}: stored with Content-Encoding gzip: upload it without this"
                " encoding"
            )
        import google_crc32c

        def read_block(start: int, end: int) -> bytes:
            blob = self._blob(remote.address, remote.generation)
            return bytes(
                blob.download_as_bytes(
                    start=start,
                    end=end,
                    raw_download=True,
                    checksum=None,
                    single_shot_download=True,
                    **self._once,
                )
            )

        # Again from the start if the content arrived damaged.
        for _ in range(self.limits.tries):
            target.seek(0)
            target.truncate()
            checksum = google_crc32c.Checksum()
            for start in range(0, remote.size, self.limits.block):
                end = min(start + self.limits.block, remote.size) - 1
                request = partial(read_block, start, end)
                block = self._request(request, remote.address, _READ, end - start, cancelled)
                target.write(block)
                checksum.update(block)
                on_bytes(len(block))
            if (target.tell(), encoded(checksum)) == (remote.size, remote.crc32c):
                return
            on_bytes(-target.tell())
        raise PlatformFault(
            f"{remote.address}: wrong checksum after {self.limits.tries} downloads: it is damaged"
            " on its way, or where it is stored: upload it again"
        )

    def upload(
        self, content: Path | bytes, address: Address, replaced: int = 0, strict: bool = False
    ) -> int:
        """Uploads a file or bytes and returns the new generation.

        `replaced`: the generation to replace, 0 for none.

        If the object has another generation, its content is compared first: nothing is written if
        it is the same, as after a lost response. Raises Conflict if another process has written the
        object meanwhile; with `strict`, if the object has any generation but `replaced`.
        """
        if isinstance(content, Path) and content.stat().st_size <= _IN_MEMORY:
            content = content.read_bytes()
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        # ours: this process has written the object before
        checksum = crc32c_of(content)
        ours = bool(replaced)
        for _ in range(1 if strict else self.limits.tries):
            send = partial(self._send, content, size, address, replaced)
            present: Remote | None = self._request(send, address, _WRITE, size) or self.get(address)
            if present and (present.size, present.crc32c) == (size, checksum):
                return present.generation
            if ours and present and present.metadata != writer():
                break
            replaced = present.generation if present else 0
        raise Conflict(
            f"{address}: another run writes it:"
            f" {present.writer if present else 'one that deleted it'}"
        )

    def _send(
        self, content: Path | bytes, size: int, address: Address, replaced: int
    ) -> Remote | None:
        """Returns the object as it was stored; None if `replaced` is not its generation."""
        from google.api_core.exceptions import PreconditionFailed

        blob = self._blob(address)
        blob.metadata = writer()
        # The client sends a large object in several requests, and retries each.
        retries = {"retry": self._retry_temporary} if size > self.limits.block else {}
        # Opened for each attempt, because an abandoned one may still be reading.
        with open(content, "rb") if isinstance(content, Path) else io.BytesIO(content) as stream:
            try:
                blob.upload_from_file(
                    stream,
                    size=size,
                    checksum="crc32c",
                    if_generation_match=replaced,
                    **{**self._once, **retries},
                )
            except PreconditionFailed:
                return None
        return _remote(address.bucket, blob)

    def touch(self, address: Address) -> bool:
        """Sets the object's last update to now; returns False if there is no object."""
        from google.api_core.exceptions import NotFound

        def request() -> bool:
            blob = self._blob(address)
            blob.metadata = {**writer(), "trainer-touched": str(time.time())}
            with suppress(NotFound):
                blob.patch(**self._once)
                return True
            return False

        return self._request(request, address, _WRITE)

    def delete(self, remote: Remote) -> None:
        """Deletes this generation, unless it is missing, touched or replaced."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        def request() -> None:
            with suppress(NotFound, PreconditionFailed):
                self._blob(remote.address).delete(
                    if_generation_match=remote.generation,
                    if_metageneration_match=remote.metageneration,
                    **self._once,
                )

        self._request(request, remote.address, _WRITE)

    def _blob(self, address: Address, generation: int | None = None) -> Any:
        return self.client.bucket(address.bucket).blob(address.name, generation=generation)

    def _request(
        self,
        work: Callable[[], T],
        address: Address,
        needed: str,
        moved_bytes: int = 0,
        cancelled: Event = NEVER,
    ) -> T:
        """Sends a request, with retries while they may help, and returns its answer.

        `needed`: see `explained`.
        """
        seconds = self.limits.read + moved_bytes / self.limits.rate
        with explained(str(address), needed):
            retried: Callable[..., T] = self._retry_refused(self._retry_temporary(in_time))
            return retried(work, seconds, cancelled)


def writer() -> dict[str, str]:
    """Returns who writes, as metadata of each object: machine, process, job on Vertex AI."""
    job = os.environ.get("CLOUD_ML_JOB_ID", "")
    name = f"host {os.uname().nodename} process {os.getpid()}{' job ' * bool(job)}{job}"
    return {"trainer-writer": name, "trainer-start": _START}


def _remote(bucket: str, blob: Any) -> Remote:
    content = int(blob.size), blob.crc32c or "", int(blob.generation), blob.content_encoding or ""
    return Remote(
        Address(bucket, blob.name), *content, blob.metadata, blob.updated, blob.metageneration
    )


def crc32c_of(content: Path | bytes) -> str:
    """Returns the CRC32C of a local file or of bytes."""
    import google_crc32c

    checksum = google_crc32c.Checksum()
    with open(content, "rb") if isinstance(content, Path) else io.BytesIO(content) as stream:
        for _ in checksum.consume(stream, 2**20):
            pass
    return encoded(checksum)


def encoded(checksum: Any) -> str:
    """Returns a checksum as Cloud Storage states it: base64 of the big-endian number."""
    return base64.b64encode(checksum.digest()).decode()


def in_time(work: Callable[[], T], seconds: float, cancelled: Event = NEVER) -> T:
    """Calls `work` and returns its result.

    Raises TooSlow after `seconds`, Cancelled soon after the event.
    """
    if cancelled.is_set():
        raise Cancelled
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    Thread(target=run, name="request", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not wait([outcome], timeout=_POLL_SECONDS).done:
        if cancelled.is_set():
            raise Cancelled
        if time.monotonic() > deadline:
            raise TooSlow(f"no complete answer within {seconds:.3g} s")
    return outcome.result()


def is_refused_token(error: BaseException | None) -> bool:
    """Returns whether a request failed for want of a token that Google accepts."""
    from google.api_core.exceptions import Unauthorized
    from google.auth.exceptions import DefaultCredentialsError, InvalidOperation, RefreshError

    return isinstance(
        error, (Unauthorized, RefreshError, InvalidOperation, DefaultCredentialsError)
    )


@contextmanager
def explained(subject: str, needed: str = "") -> Iterator[None]:
    """Turns errors of the client and the network into one line.

    `needed`: what the account must be permitted to do.
    """
    try:
        yield
    except (UserError, PlatformFault, Cancelled):
        raise
    except Exception as error:
        from google.api_core import exceptions as api
        from google.auth import exceptions as auth
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        cause = error.cause if isinstance(error, api.RetryError) else error
        text = " ".join(str(cause).split())
        network = (
            api.GoogleAPIError,
            auth.GoogleAuthError,
            RequestException,
            HTTPError,
            ConnectionError,
            TimeoutError,
        )
        # By its cause: login, permission, missing object, request, network, or disk.
        kind: type[UserError | PlatformFault] = UserError
        if is_refused_token(cause):
            kind = RefusedToken
            line = (
                f"no valid Google credentials: run `{login_command()}`, or set"
                f" GOOGLE_APPLICATION_CREDENTIALS to a key file ({text.partition('. ')[0][:160]})"
            )
        elif isinstance(cause, api.Forbidden):
            kind = NoPermission
            line = f"no permission to {needed}: have it granted to the account that runs this"
        elif isinstance(cause, api.NotFound) and (
            "bucket does not exist" in text.lower() or "/o/" not in text
        ):
            line = "bucket not found: check its name, or create it (gcloud storage buckets create)"
        elif isinstance(cause, api.NotFound):
            kind = PlatformFault
            line = "deleted or replaced while it was read"
        elif isinstance(cause, api.ClientError) and cause is error:  # it was not retried
            line = f"Cloud Storage rejected the request: {shortened(text)}"
        elif isinstance(error, network):
            kind = PlatformFault
            line = f"request to Cloud Storage failed: {shortened(text)}"
        elif isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            line = f"cannot be stored on the local disk ({error.strerror}): see --cache_dir"
        else:
            raise
        raise kind(f"{subject}: {line}") from error
