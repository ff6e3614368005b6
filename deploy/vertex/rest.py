"""Reads and cancels jobs by the REST interfaces of Vertex AI and Cloud Logging, with google-auth alone."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from deploy.vertex import api
from deploy.vertex.api import JobStatus, LogEntry
from deploy.vertex.buckets import Buckets
from deploy.vertex.failures import converted_errors, response_error
from trainer.base.storage.login import credentials

REQUEST_TIMEOUT_S = 60.0  # of one request


class Rest(Buckets):
    """Implements `deploy.vertex.api.Backend` but for `submit`. `login`: credentials, by default this machine's."""

    def __init__(self, project: str, region: str, login: Any = None) -> None:
        self._project, self._region, self._login = project, region, login
        self._parent = f"projects/{project}/locations/{region}"

    def state(self, name: str) -> JobStatus:
        """Sends a GET of the job."""
        return api.parse_job(self._call("GET", f"{self._service}/{name}"))

    def trials(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Sends a GET of the study."""
        with api.unreadable_as_lost():
            return list(self._call("GET", f"{self._service}/{name}").get("trials", []))

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Sends a GET for each page of the list, filtered by label; without one also of the studies."""
        return [api.parse_job(job) for kind in api.kinds_of(label) for job in self._listed(kind.collection, label)]

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """Sends a POST of entries:list for each page."""
        url = f"{_address('LOGGING', 'https://logging.googleapis.com')}/v2/entries:list"
        body = {"resourceNames": [f"projects/{self._project}"], "filter": api.log_filter(name, since), "pageSize": 1000}
        pages = _pages("entries", lambda token: self._call("POST", url, json={**body, **token}))
        with api.unreadable_as_lost():
            return [api.parse_log_entry(entry) for entry in pages]

    def cancel(self, name: str) -> None:
        """Sends a POST of :cancel."""
        self._call("POST", f"{self._service}/{name}:cancel", json={})

    def _listed(self, collection: str, label: str) -> Iterator[Any]:
        url, only = f"{self._service}/{self._parent}/{collection}", {"filter": api.label_filter(label)}
        return _pages(collection, lambda token: self._call("GET", url, params={**only, **token}))

    @property
    def _service(self) -> str:
        return f"{_address('AIPLATFORM', f'https://{self._region}-aiplatform.googleapis.com')}/v1"

    def _credentials(self) -> Any:
        return self._login or credentials()

    def _call(self, method: str, url: str, **request: Any) -> Any:
        from google.auth.transport.requests import AuthorizedSession

        with converted_errors(), AuthorizedSession(self._credentials()) as session:
            response = session.request(method, url, timeout=REQUEST_TIMEOUT_S, **request)
            if not response.ok:
                raise response_error(response)
            return response.json()


def _pages(key: str, call: Callable[[dict[str, str]], Any]) -> Iterator[Any]:
    """Yields the items of all pages; `call` gets {} or the token of the next page."""
    token: dict[str, str] = {}
    while True:
        page = call(token)
        with api.unreadable_as_lost():
            yield from page.get(key, [])
            if not page.get("nextPageToken"):
                return
            token = {"pageToken": str(page["nextPageToken"])}


def _address(service: str, default: str) -> str:
    """Returns the address of a service, which the user may have replaced for gcloud too."""
    return os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}", default).rstrip("/")
