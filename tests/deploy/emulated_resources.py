"""Emulates the persistent resources of Vertex AI: created, used and deleted by long-running operations."""

import json
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from google.cloud.aiplatform_v1.types import CustomJobSpec, PersistentResource
from google.protobuf.json_format import MessageToDict

Response = tuple[int, dict[str, Any] | bytes]


class Resources:
    """Holds persistent resources by id.

    One is RUNNING after `provisioning` looks, or in the state ERROR with the message `error`, and gone after `stopping`
    looks. While it is PROVISIONING it is not deleted. `time`: the clock of its times.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.ever: list[dict[str, Any]] = []
        self.provisioning, self.stopping, self.error = 1, 1, ""
        self.time: Callable[[], float] = time.time
        self._cancel = cancel  # all jobs in the resource with this id
        self.looks: dict[str, int] = {}

    def create(self, parent: str, id: str, content: dict[str, Any]) -> Response:
        """Begins to create one; the operation is never asked for."""
        if id in self.found:
            return 409, error(409, f"{id} already exists", "ALREADY_EXISTS")
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", id), id
        parsed = MessageToDict(PersistentResource.pb(PersistentResource.from_json(json.dumps(content))))
        name = f"projects/123456/locations/{parent.rsplit('/', 1)[-1]}/persistentResources/{id}"
        resource = {**parsed, "name": name, "state": "PROVISIONING", "createTime": self.now()}
        self.found[id], self.looks[id] = resource, self.provisioning
        self.ever.append(resource)
        return 200, {"name": f"{name.rpartition('/persistent')[0]}/operations/77"}

    def get(self, id: str) -> Response:
        """Returns one as it was, then moves it on."""
        if id not in self.found:
            return 404, error(404, f"{id} is not found")
        resource = self.found[id]
        before = dict(resource)
        self.looks[id] -= 1
        if self.looks[id] < 0:
            self._move(id, resource)
        return 200, before

    def _move(self, id: str, resource: dict[str, Any]) -> None:
        if resource["state"] == "STOPPING":
            del self.found[id]
        elif resource["state"] == "PROVISIONING" and self.error:
            resource |= {"state": "ERROR", "error": {"code": 8, "message": self.error}}
        elif resource["state"] == "PROVISIONING":
            resource |= {"state": "RUNNING", "startTime": self.now()}

    def listed(self, first: int) -> Response:
        """Returns a page of two."""
        found = list(self.found.values())
        more = {"nextPageToken": str(first + 2)} if len(found) > first + 2 else {}
        return 200, {"persistentResources": found[first : first + 2], **more}

    def delete(self, id: str) -> Response:
        """Begins to delete one, and cancels the jobs in it."""
        if id not in self.found:
            return 404, error(404, f"{id} is not found")
        if self.found[id]["state"] in ("PROVISIONING", "STOPPING"):
            return 400, error(400, f"{id} is not in the active state", "FAILED_PRECONDITION")
        self.found[id]["state"], self.looks[id] = "STOPPING", self.stopping
        self._cancel(id)
        return 200, {"name": "projects/123456/locations/us-central1/operations/78"}

    def refusal(self, spec: dict[str, Any]) -> str:
        """Returns why a job cannot run in the resource that it names; empty if it can."""
        id = spec.get("persistentResourceId", "")
        if not id:
            return ""
        if self.found.get(id, {}).get("state") != "RUNNING":
            return f"persistent resource {id} is not running"
        (has,) = self.found[id]["resourcePools"]
        parsed = MessageToDict(CustomJobSpec.pb(CustomJobSpec.from_json(json.dumps(spec))))
        pools = [pool for pool in parsed["workerPoolSpecs"] if pool]
        equal = all((pool["machineSpec"], pool["diskSpec"]) == (has["machineSpec"], has["diskSpec"]) for pool in pools)
        enough = sum(int(pool["replicaCount"]) for pool in pools) <= int(has["replicaCount"])
        return "" if equal and enough else f"persistent resource {id} has other machines"

    def now(self) -> str:
        """Returns the time as the API writes it."""
        return datetime.fromtimestamp(self.time(), timezone.utc).isoformat().replace("+00:00", "Z")


def error(status: int, message: str, name: str = "") -> dict[str, Any]:
    """Returns the content of a failed response."""
    names = {
        400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
        409: "ABORTED", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 501: "UNIMPLEMENTED",
        503: "UNAVAILABLE",
    }  # fmt: skip
    return {"error": {"code": status, "message": message, "status": name or names[status]}}


def _create(google: Any, match: re.Match[str], query: dict[str, str], body: bytes) -> Response:
    created: Response = google.resources.create(match[1], query["persistentResourceId"], json.loads(body))
    return created


def _get(google: Any, match: re.Match[str], query: dict[str, str], body: bytes) -> Response:
    found: Response = google.resources.get(match[1])
    return found


def _list(google: Any, match: re.Match[str], query: dict[str, str], body: bytes) -> Response:
    found: Response = google.resources.listed(int(query.get("pageToken") or 0))
    return found


def _delete(google: Any, match: re.Match[str], query: dict[str, str], body: bytes) -> Response:
    deleted: Response = google.resources.delete(match[1])
    return deleted


RESOURCE_ROUTES: dict[str, Callable[..., Response]] = {
    r"POST /v1/(projects/[^/]+/locations/[^/]+)/persistentResources": _create,
    r"GET /v1/projects/[^/]+/locations/[^/]+/persistentResources": _list,
    r"GET /v1/projects/[^/]+/locations/[^/]+/persistentResources/([^/]+)": _get,
    r"DELETE /v1/projects/[^/]+/locations/[^/]+/persistentResources/([^/]+)": _delete,
}
