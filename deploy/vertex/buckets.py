"""Implements what the backends have in common, with google-cloud-storage: buckets, and whether an image exists."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deploy.tiers.images import tag_name
from deploy.vertex import api
from deploy.vertex.failures import converted_errors

_ONCE: dict[str, Any] = {"retry": None, "timeout": 60.0}  # callers retry; seconds


class Buckets:
    """Implements methods of `deploy.vertex.api.Backend` with the process's one client of Cloud Storage."""

    def upload(self, file: Path, uri: str) -> None:
        """Sends a GET and, unless the object exists, a POST with a checksum: the address has a hash of the sources."""
        from google.api_core.exceptions import PreconditionFailed

        with converted_errors(), contextlib.suppress(PreconditionFailed):
            blob = _blob(uri)
            if not blob.exists(**_ONCE):
                blob.upload_from_filename(str(file), if_generation_match=0, checksum="crc32c", **_ONCE)

    def read(self, uri: str) -> tuple[str, int] | None:
        """Sends a GET of the object, and one of the content of that generation."""
        bucket, name = _parts(uri)
        with converted_errors():
            blob = _client().bucket(bucket).get_blob(name, **_ONCE)
            if blob is None:
                return None
            generation = int(blob.generation)  # the download may clear it
            return blob.download_as_bytes(if_generation_match=generation, **_ONCE).decode(), generation

    def write(self, uri: str, text: str, generation: int) -> bool:
        """Sends a POST with a precondition."""
        from google.api_core.exceptions import PreconditionFailed

        with converted_errors():
            try:
                _blob(uri).upload_from_string(text, "application/json", if_generation_match=generation, **_ONCE)
            except PreconditionFailed:
                return False
        return True

    def delete(self, uri: str, generation: int) -> None:
        """Sends a DELETE with a precondition."""
        with converted_errors():
            _blob(uri).delete(if_generation_match=generation, **_ONCE)

    def exists(self, address: str) -> bool:
        """Sends a GET of at most one object's name, and one of the object itself."""
        bucket, name = _parts(address.rstrip("/"))

        def found() -> bool:
            below = _client().list_blobs(bucket, prefix=f"{name}/" if name else "", max_results=1, **_ONCE)
            return any(True for _ in below) or _client().bucket(bucket).get_blob(name or " ", **_ONCE) is not None

        return api.unless_forbidden(_converted(found), default=True)

    def location(self, bucket: str) -> str:
        """Sends a GET of the bucket."""
        name, _ = _parts(bucket)
        return api.unless_forbidden(_converted(lambda: str(_client().get_bucket(name, **_ONCE).location)), default="")

    def has_image(self, uri: str) -> bool:
        """Sends a GET of the image's tag, with the login of that client."""
        name = tag_name(uri)
        host = os.environ.get(
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_ARTIFACTREGISTRY", "https://artifactregistry.googleapis.com"
        )
        if not name:
            return True
        with converted_errors():
            response = _client()._http.get(f"{host.rstrip('/')}/v1/{name}", timeout=_ONCE["timeout"])
        if response.status_code >= 500:
            raise api.ApiError(response.status_code, f"Artifact Registry: {response.reason}")
        return bool(response.status_code != 404)


def _converted(call: Callable[[], api.T]) -> Callable[[], api.T]:
    def converted() -> api.T:
        with converted_errors():
            return call()

    return converted


def _client() -> Any:
    from trainer.base.storage.gcs import connect

    return connect().client


def _blob(uri: str) -> Any:
    bucket, name = _parts(uri)
    return _client().bucket(bucket).blob(name)


def _parts(uri: str) -> tuple[str, str]:
    bucket, _, name = uri.removeprefix("gs://").partition("/")
    return bucket, name
