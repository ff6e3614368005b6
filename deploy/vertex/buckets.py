"""Reads and writes buckets with google-cloud-storage, and looks whether an image exists."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from deploy.tiers.images import tag_name
from deploy.vertex.api import ApiError
from deploy.vertex.failures import converted_errors

T = TypeVar("T")
_ONCE: dict[str, Any] = {"retry": None, "timeout": 60.0}  # callers retry; seconds


class Buckets:
    """Calls Cloud Storage, and Artifact Registry, with the process's one client. Methods raise ApiError."""

    def upload(self, file: Path, uri: str) -> None:
        """Uploads `file` with its checksum, unless the object already exists: the address has a hash of the sources."""
        from google.api_core.exceptions import PreconditionFailed

        with converted_errors(), contextlib.suppress(PreconditionFailed):
            blob = _blob(uri)
            if not blob.exists(**_ONCE):
                blob.upload_from_filename(str(file), if_generation_match=0, checksum="crc32c", **_ONCE)

    def read(self, uri: str) -> tuple[str, int] | None:
        """Returns text and generation of a small object; None if it does not exist."""
        bucket, name = _parts(uri)
        with converted_errors():
            blob = _client().bucket(bucket).get_blob(name, **_ONCE)
            if blob is None:
                return None
            generation = int(blob.generation)  # the download may clear it
            return blob.download_as_bytes(if_generation_match=generation, **_ONCE).decode(), generation

    def write(self, uri: str, text: str, generation: int) -> bool:
        """Replaces a small object of this generation, 0 for none; returns False if it has another one."""
        from google.api_core.exceptions import PreconditionFailed

        with converted_errors():
            try:
                _blob(uri).upload_from_string(text, "application/json", if_generation_match=generation, **_ONCE)
            except PreconditionFailed:
                return False
        return True

    def delete(self, uri: str, generation: int) -> None:
        """Deletes an object of this generation; ApiError if it has another one."""
        with converted_errors():
            _blob(uri).delete(if_generation_match=generation, **_ONCE)

    def exists(self, address: str) -> bool:
        """Returns whether an object is at gs://BUCKET/… or below it; True if the account may not list the bucket."""
        bucket, name = _parts(address.rstrip("/"))

        def is_there() -> bool:
            below = _client().list_blobs(bucket, prefix=f"{name}/" if name else "", max_results=1, **_ONCE)
            return any(True for _ in below) or _client().bucket(bucket).get_blob(name or " ", **_ONCE) is not None

        return _unless_forbidden(is_there, default=True)

    def location(self, bucket: str) -> str:
        """Returns the location of gs://NAME, as US or EUROPE-WEST4; empty if the account may not read it."""
        name, _ = _parts(bucket)
        return _unless_forbidden(lambda: str(_client().get_bucket(name, **_ONCE).location), default="")

    def has_image(self, uri: str) -> bool:
        """Returns whether Artifact Registry has the image; True if it is elsewhere, or the account may not read it."""
        name = tag_name(uri)
        host = os.environ.get(
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_ARTIFACTREGISTRY", "https://artifactregistry.googleapis.com"
        )
        if not name:
            return True
        with converted_errors():
            response = _client()._http.get(f"{host.rstrip('/')}/v1/{name}", timeout=_ONCE["timeout"])
        if response.status_code >= 500:
            raise ApiError(response.status_code, f"Artifact Registry: {response.reason}")
        return bool(response.status_code != 404)


def _unless_forbidden(call: Callable[[], T], default: T) -> T:
    """Returns the result of `call`, or `default` after a 403: the job's account may have the permission."""
    try:
        with converted_errors():
            return call()
    except ApiError as error:
        if error.code == 403:
            return default
        raise


def _client() -> Any:
    from trainer.base.storage.gcs import connect

    return connect().client


def _blob(uri: str) -> Any:
    bucket, name = _parts(uri)
    return _client().bucket(bucket).blob(name)


def _parts(uri: str) -> tuple[str, str]:
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return bucket, name
