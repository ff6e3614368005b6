"""Calls the REST interfaces of Vertex AI and Cloud Logging, by google-auth alone, for everything
but creating jobs."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from deploy.platform.api_error import ApiError, unreadable_as_lost
from deploy.platform.errors import converted_errors
from deploy.platform.retries import CLOCK, Clock
from deploy.platform.vertex_api import CustomJob, JobStatus, WatchLine, parse_job, parse_time
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.tier import LABEL
from trainer.base.storage.login import credentials, login_command

REQUEST_TIMEOUT_S = 60.0  # for one request


class Platform:
    """Represents Vertex AI and Cloud Logging for one project and region.

    Every method raises ApiError if a request fails, and UserError if the client that it uses is not
    installed. No method retries: callers retry with `deploy.platform.retries.retried`, except for
    `create`, which `deploy.job.sending` repeats only after it has looked for the job. The name of a
    job is projects/P/locations/R/customJobs/ID. `clock`: that by which callers wait.
    """

    def __init__(self, project: str, region: str, clock: Clock = CLOCK) -> None:
        self.gcp = GcpConfig(project, region, "")
        self.clock = clock
        self.parent = f"projects/{project}/locations/{region}"
        self.sent = False  # whether the request of the last `create` may have reached the service

    def create(self, request: CustomJob) -> str:
        """Creates the job and returns its name.

        Sends at most one request, and sets `sent` before it does.
        """
        raise NotImplementedError

    def get(self, name: str) -> JobStatus:
        """Returns the current status of a job. Raises ApiError 404 if it does not exist."""
        return parse_job(self.call("GET", name))

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Returns the status of each job that this package submitted, or only of those whose LABEL
        has this value."""
        condition = f"labels.{LABEL}={label}" if label else f"labels.{LABEL}:*"
        jobs = self.listed(f"{self.parent}/customJobs", "customJobs", filter=condition)
        return [*map(parse_job, jobs)]

    def logs(
        self, name: str, since: float, worker: str = "", last: int = 0
    ) -> Sequence[tuple[str, WatchLine]]:
        """Returns pairs of an identifier and a log line of a job, in chronological order.

        `since`: the earliest time, in seconds since 1970; `worker`: if given, only its lines;
            `last`: if given, only this many of the newest lines.
        """
        query = f'resource.type="ml_job" AND resource.labels.job_id="{name.rsplit("/", 1)[-1]}"'
        start = f"{datetime.fromtimestamp(since, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        query += f' AND timestamp>="{start}"' if since else ""
        query += f' AND resource.labels.task_name="{worker}"' if worker else ""
        url = f"{address('LOGGING', 'https://logging.googleapis.com')}/v2/entries:list"
        body = {
            "resourceNames": [f"projects/{self.gcp.project}"],
            "filter": query,
            "pageSize": min(last or 1000, 1000),
            "orderBy": "timestamp desc" if last else "timestamp asc",
        }
        entries = pages("entries", lambda token: call("POST", url, json={**body, **token}))
        lines = []
        with unreadable_as_lost():
            # https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry
            for entry in islice(entries, last or None):
                payload = entry.get("jsonPayload", {})
                place = entry.get("resource", {}).get("labels", {})
                text = entry.get("textPayload") or payload.get("message") or str(payload or "")
                time = parse_time(str(entry["timestamp"])) or 0.0
                severity = entry.get("severity", "DEFAULT")
                line = WatchLine(time, text.rstrip(), place.get("task_name", ""), severity)
                lines.append((entry.get("insertId", ""), line))
        return sorted(lines, key=lambda entry: (entry[1].time, entry[0]))

    def cancel(self, name: str) -> None:
        """Requests a job's cancellation and returns at once; `get` shows when the job is over."""
        self.call("POST", f"{name}:cancel", json={})

    @property
    def service(self) -> str:
        """Returns the address of Vertex AI in the region."""
        return f"{address('AIPLATFORM', f'https://{self.gcp.region}-aiplatform.googleapis.com')}/v1"

    def call(self, method: str, path: str, **request: Any) -> Any:
        """Sends one request to Vertex AI and returns the JSON of the response.

        `path`: a resource, such as projects/P/locations/R/models/ID; `request`: keywords of
            `requests`.
        """
        return call(method, f"{self.service}/{path}", **request)

    def listed(self, path: str, key: str, **parameters: str) -> Iterator[Any]:
        """Yields the items of a list in Vertex AI, from all its pages.

        `key`: the field of each page with the items.
        """
        return pages(key, lambda token: self.call("GET", path, params={**parameters, **token}))


def call(method: str, url: str, login: Any = None, **request: Any) -> Any:
    """Sends one request and returns the JSON of the response. Raises ApiError if the request fails.

    `login`: the credentials, by default this machine's; `request`: keywords of `requests`.
    """
    from google.auth.transport.requests import AuthorizedSession

    with converted_errors(), AuthorizedSession(login or credentials()) as session:
        response = session.request(method, url, timeout=REQUEST_TIMEOUT_S, **request)
        if not response.ok:
            try:
                message = str(response.json()["error"]["message"])
            except (ValueError, KeyError, TypeError):
                message = response.text or response.reason
            raise ApiError(response.status_code, message, login_command())
        return response.json()


def pages(key: str, call: Callable[[dict[str, str]], Any]) -> Iterator[Any]:
    """Yields the items in the field `key` of all pages; `call` returns a page for {} or
    {"pageToken": …}."""
    request: dict[str, str] | None = {}
    while request is not None:
        page = call(request)
        with unreadable_as_lost():
            yield from page.get(key, [])
            token = page.get("nextPageToken") or page.get("pageToken")
            request = {"pageToken": str(token)} if token else None


def address(service: str, default: str) -> str:
    """Returns the address of a service: `default`, unless the variable by which gcloud's is
    replaced is set."""
    return os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}", default).rstrip("/")
