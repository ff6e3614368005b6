"""Jobs by Google's Python packages, with application default credentials: no gcloud is needed.

The REST transport of google-cloud-aiplatform's generated client, Cloud Logging's REST interface, google-cloud-storage.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from deploy.vertex.api import LABEL, ApiError, CustomJob, JobStatus, LogEntry, log_filter, read_entry, read_status
from trainer.errors import UserError

TIMEOUT_S = 60.0  # of one request
_LOGIN = "gcloud auth application-default login"  # Python programs have a login of their own


class Sdk:
    """The protocol `deploy.vertex.api.Backend`. Endpoints and credentials are Google's unless given."""

    def __init__(
        self,
        project: str,
        region: str,
        api: str = "",
        logging: str = "https://logging.googleapis.com",
        credentials: Any = None,
    ) -> None:
        self._project, self._region = project, region
        self._api = api or f"https://{region}-aiplatform.googleapis.com"
        self._logging = logging
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
        options = {"api_endpoint": self._api}
        return JobServiceClient(credentials=self._credentials, transport="rest", client_options=options)

    @cached_property
    def _storage(self) -> Any:
        from google.cloud import storage

        return storage.Client(self._project, self._credentials)

    def submit(self, request: CustomJob) -> str:
        """One POST, never repeated by the client."""
        client = self._client  # says what to install where it is missing
        from google.cloud.aiplatform_v1 import types

        content = {"displayName": request.display_name, "jobSpec": request.spec, "labels": request.labels}
        with _translated():
            job = types.CustomJob.from_json(json.dumps(content))
            made = client.create_custom_job(parent=self._parent, custom_job=job, retry=None, timeout=TIMEOUT_S)
            return str(made.name)

    def state(self, name: str) -> JobStatus:
        """GET of the job."""
        with _translated():
            return _status(self._client.get_custom_job(name=name, retry=None, timeout=TIMEOUT_S))

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """POST of entries:list, page by page."""
        from google.auth.transport.requests import AuthorizedSession

        body = {"resourceNames": [f"projects/{self._project}"], "filter": log_filter(name, since), "pageSize": 1000}
        entries: list[LogEntry] = []
        with _translated(), AuthorizedSession(self._credentials) as session:
            while True:
                answer = session.post(f"{self._logging}/v2/entries:list", json=body, timeout=TIMEOUT_S)
                if not answer.ok:
                    raise ApiError(answer.status_code, answer.text, _LOGIN)
                page = answer.json()
                entries += [read_entry(entry) for entry in page.get("entries", [])]
                if not page.get("nextPageToken"):
                    return entries
                body["pageToken"] = page["nextPageToken"]

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """GET of the list, with a filter by label."""
        wanted = f"labels.{LABEL}={label}" if label else f"labels.{LABEL}:*"
        request = {"parent": self._parent, "filter": wanted}
        with _translated():
            return [_status(job) for job in self._client.list_custom_jobs(request, retry=None, timeout=TIMEOUT_S)]

    def cancel(self, name: str) -> None:
        """POST of :cancel."""
        with _translated():
            self._client.cancel_custom_job(name=name, retry=None, timeout=TIMEOUT_S)

    def upload(self, file: Path, uri: str) -> None:
        """A POST, checksum and all, on condition that nothing is there: the address says which sources that holds."""
        from google.api_core.exceptions import PreconditionFailed
        from google.cloud.storage import Blob

        with _translated(), contextlib.suppress(PreconditionFailed):
            blob = Blob.from_uri(uri, client=self._storage)
            blob.upload_from_filename(str(file), if_generation_match=0, checksum="crc32c")

    def holds(self, address: str) -> bool:
        """GET of one object's name, at most."""
        bucket, _, name = address.removeprefix("gs://").rstrip("/").partition("/")
        try:
            with _translated():
                below = self._storage.list_blobs(bucket, prefix=f"{name}/" if name else "", max_results=1)
                return any(True for _ in below) or self._storage.bucket(bucket).get_blob(name or " ") is not None
        except ApiError as error:
            if error.code == 403:  # the job's account may
                return True
            raise

    def location(self, bucket: str) -> str:
        """GET of the bucket."""
        try:
            with _translated():
                return str(self._storage.get_bucket(bucket.removeprefix("gs://")).location)
        except ApiError as error:
            if error.code == 403:  # its objects may be used without this permission
                return ""
            raise

    @property
    def _parent(self) -> str:
        return f"projects/{self._project}/locations/{self._region}"


def _status(job: Any) -> JobStatus:
    from google.protobuf.json_format import MessageToDict

    return read_status(MessageToDict(type(job).pb(job)))


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Google's exceptions as ApiError."""
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    try:
        yield
    except GoogleAPICallError as error:
        raise ApiError(int(error.code or 0), str(error.message), _LOGIN) from None
    except (RequestException, RetryError, TransportError) as error:
        raise ApiError(0, f"no answer: {error}") from None
    except GoogleAuthError as error:
        raise ApiError(401, str(error), _LOGIN) from None
