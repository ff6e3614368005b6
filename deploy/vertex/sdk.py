"""Implements the backend with Google's Python packages and application default credentials, without gcloud.

Uses the REST transport of google-cloud-aiplatform, Cloud Logging's REST interface and google-cloud-storage.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from deploy.vertex import api
from deploy.vertex.api import ApiError, CustomJob, JobStatus, LogEntry
from trainer.errors import UserError

TIMEOUT_S = 60.0  # of one request
_LOGIN = "gcloud auth application-default login"  # Python programs do not use gcloud's own login


class Sdk:
    """Implements `deploy.vertex.api.Backend`. Endpoints and credentials are Google's unless given."""

    def __init__(
        self, project: str, region: str, api_url: str = "", log_url: str = "", credentials: Any = None
    ) -> None:
        self._project, self._region = project, region
        self._api_url = api_url or f"https://{region}-aiplatform.googleapis.com"
        self._log_url = log_url or "https://logging.googleapis.com"
        self._given_credentials = credentials

    @cached_property
    def _credentials(self) -> Any:
        if self._given_credentials:
            return self._given_credentials
        import google.auth

        return google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])[0]

    @cached_property
    def _client(self) -> Any:
        try:
            from google.cloud.aiplatform_v1 import JobServiceClient
        except ImportError:
            raise UserError(
                "google-cloud-aiplatform is not installed: pip install '.[deploy]', or use gcloud"
            ) from None
        options = {"api_endpoint": self._api_url}
        return JobServiceClient(credentials=self._credentials, transport="rest", client_options=options)

    @cached_property
    def _storage(self) -> Any:
        from google.cloud import storage

        return storage.Client(self._project, self._credentials)

    def submit(self, request: CustomJob) -> str:
        """Sends one POST, which the client never repeats."""
        client = self._client  # first: its error states what to install
        from google.cloud.aiplatform_v1 import types

        spec = {"jobSpec": request.spec} if request.kind is api.CUSTOM else request.spec
        content = {"displayName": request.display_name, "labels": request.labels, **spec}
        content |= {"encryptionSpec": {"kmsKeyName": request.kms_key}} if request.kms_key else {}
        message = types.CustomJob if request.kind is api.CUSTOM else types.HyperparameterTuningJob
        name, text = request.kind.message, json.dumps(content)
        with _converted_errors():
            create = getattr(client, f"create_{name}")
            job = {name: message.from_json(text)}
            return api.created_name(create(parent=self._parent, retry=None, timeout=TIMEOUT_S, **job).name)

    def state(self, name: str) -> JobStatus:
        """Sends a GET of the job."""
        with _converted_errors():
            return api.parse_job(self._get(name))

    def trials(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Sends a GET of the study."""
        with _converted_errors():
            return list(self._get(name).get("trials", []))

    def _get(self, name: str) -> dict[str, Any]:
        get = getattr(self._client, f"get_{api.kind_of(name).message}")
        return _as_json(get(name=name, retry=None, timeout=TIMEOUT_S))

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """Sends a POST of entries:list for each page."""
        from google.auth.transport.requests import AuthorizedSession

        body = {"resourceNames": [f"projects/{self._project}"], "filter": api.log_filter(name, since), "pageSize": 1000}
        entries: list[LogEntry] = []
        with _converted_errors(), AuthorizedSession(self._credentials) as session:
            while True:
                response = session.post(f"{self._log_url}/v2/entries:list", json=body, timeout=TIMEOUT_S)
                if not response.ok:
                    raise ApiError(response.status_code, response.text, _LOGIN)
                page = response.json()
                entries += [api.parse_log_entry(entry) for entry in page.get("entries", [])]
                if not page.get("nextPageToken"):
                    return entries
                body["pageToken"] = page["nextPageToken"]

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Sends a GET of the list, filtered by label; without one also of the studies."""
        request = {"parent": self._parent, "filter": api.label_filter(label)}
        with _converted_errors():
            lists = [getattr(self._client, f"list_{kind.message}s") for kind in api.kinds_of(label)]
            found = [job for one in lists for job in one(request, retry=None, timeout=TIMEOUT_S)]
            return [api.parse_job(_as_json(job)) for job in found]

    def cancel(self, name: str) -> None:
        """Sends a POST of :cancel."""
        with _converted_errors():
            cancel = getattr(self._client, f"cancel_{api.kind_of(name).message}")
            cancel(name=name, retry=None, timeout=TIMEOUT_S)

    def upload(self, file: Path, uri: str) -> None:
        """Sends a GET and, unless the object exists, a POST with a checksum: the address has a hash of the sources."""
        from google.api_core.exceptions import PreconditionFailed
        from google.cloud.storage import Blob

        with _converted_errors(), contextlib.suppress(PreconditionFailed):
            blob = Blob.from_uri(uri, client=self._storage)
            if not blob.exists():
                blob.upload_from_filename(str(file), if_generation_match=0, checksum="crc32c")

    def read(self, uri: str) -> tuple[str, int] | None:
        """Sends a GET of the object, and one of the content of that generation."""
        bucket, _, name = uri.removeprefix("gs://").partition("/")
        with _converted_errors():
            blob = self._storage.bucket(bucket).get_blob(name)
            if blob is None:
                return None
            generation = int(blob.generation)  # the download may clear it
            return blob.download_as_bytes(if_generation_match=generation).decode(), generation

    def write(self, uri: str, text: str, generation: int) -> bool:
        """Sends a POST with a precondition."""
        from google.api_core.exceptions import PreconditionFailed
        from google.cloud.storage import Blob

        with _converted_errors():
            blob = Blob.from_uri(uri, client=self._storage)
            try:
                blob.upload_from_string(text, "application/json", if_generation_match=generation)
            except PreconditionFailed:
                return False
        return True

    def delete(self, uri: str, generation: int) -> None:
        """Sends a DELETE with a precondition."""
        from google.cloud.storage import Blob

        with _converted_errors():
            Blob.from_uri(uri, client=self._storage).delete(if_generation_match=generation)

    def exists(self, address: str) -> bool:
        """Sends a GET of at most one object's name, and one of the object itself."""
        bucket, _, name = address.removeprefix("gs://").rstrip("/").partition("/")

        def found() -> bool:
            with _converted_errors():
                below = self._storage.list_blobs(bucket, prefix=f"{name}/" if name else "", max_results=1)
                return any(True for _ in below) or self._storage.bucket(bucket).get_blob(name or " ") is not None

        return api.unless_forbidden(found, default=True)

    def location(self, bucket: str) -> str:
        """Sends a GET of the bucket."""

        def read() -> str:
            with _converted_errors():
                return str(self._storage.get_bucket(bucket.removeprefix("gs://")).location)

        return api.unless_forbidden(read, default="")

    @property
    def _parent(self) -> str:
        return f"projects/{self._project}/locations/{self._region}"


def _as_json(job: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    found: dict[str, Any] = MessageToDict(type(job).pb(job))
    return found


@contextlib.contextmanager
def _converted_errors() -> Iterator[None]:
    """Raises Google's exceptions as ApiError."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.protobuf.json_format import ParseError
    from requests.exceptions import RequestException

    with api.unreadable_as_lost(ParseError):
        try:
            yield
        except GoogleAPICallError as error:
            raise ApiError(int(error.code or 0), str(error.message), _LOGIN) from None
        except (RequestException, RetryError, TransportError) as error:
            raise api.connection_error(f"{type(error).__name__}: {error}") from None
        except GoogleAuthError as error:
            raise ApiError(401, str(error), _LOGIN) from None
