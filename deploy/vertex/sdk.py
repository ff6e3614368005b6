"""Implements the backend with Google's Python packages.

Uses the REST transport of google-cloud-aiplatform and Cloud Logging's REST interface.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from deploy.spec.spec_changes import LABEL
from deploy.vertex import api
from deploy.vertex.api import ApiError, CustomJob, JobStatus, LogEntry, PersistentResource
from deploy.vertex.buckets import Buckets
from deploy.vertex.client_errors import converted_errors
from trainer.errors import UserError
from trainer.storage.login import credentials, login_command

TIMEOUT_S = 60.0  # of one request


class Sdk(Buckets):
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
        return credentials()

    @cached_property
    def _client(self) -> Any:
        return self._service("JobServiceClient")

    @cached_property
    def _resources(self) -> Any:
        return self._service("PersistentResourceServiceClient")

    def _service(self, client: str) -> Any:
        try:
            aiplatform_v1 = importlib.import_module("google.cloud.aiplatform_v1")
        except ImportError:
            raise UserError(
                "google-cloud-aiplatform is not installed: pip install '.[deploy]', or use gcloud"
            ) from None
        options = {"api_endpoint": self._api_url}
        service = getattr(aiplatform_v1, client)
        return service(credentials=self._credentials, transport="rest", client_options=options)

    def submit(self, request: CustomJob) -> str:
        """Sends one POST, which the client never repeats."""
        with converted_errors():
            client = self._client  # first: its error states what to install
        from google.cloud.aiplatform_v1 import types

        spec = {"jobSpec": request.spec} if request.kind is api.CUSTOM else request.spec
        content = {"displayName": request.display_name, "labels": request.labels, **spec}
        content |= {"encryptionSpec": {"kmsKeyName": request.kms_key}} if request.kms_key else {}
        message = types.CustomJob if request.kind is api.CUSTOM else types.HyperparameterTuningJob
        name, text = request.kind.message, json.dumps(content)
        with converted_errors():
            create = getattr(client, f"create_{name}")
            job = {name: message.from_json(text)}
            return api.created_name(create(parent=self._parent, retry=None, timeout=TIMEOUT_S, **job).name)

    def state(self, name: str) -> JobStatus:
        """Sends a GET of the job."""
        with converted_errors():
            return api.parse_job(self._get(name))

    def trials(self, name: str) -> Sequence[Mapping[str, Any]]:
        """Sends a GET of the study."""
        with converted_errors():
            return list(self._get(name).get("trials", []))

    def _get(self, name: str) -> dict[str, Any]:
        get = getattr(self._client, f"get_{api.kind_of(name).message}")
        return _as_json(get(name=name, retry=None, timeout=TIMEOUT_S))

    def logs(self, name: str, since: str) -> Sequence[LogEntry]:
        """Sends a POST of entries:list for each page."""
        from google.auth.transport.requests import AuthorizedSession

        body = {"resourceNames": [f"projects/{self._project}"], "filter": api.log_filter(name, since), "pageSize": 1000}
        entries: list[LogEntry] = []
        with converted_errors(), AuthorizedSession(self._credentials) as session:
            while True:
                response = session.post(f"{self._log_url}/v2/entries:list", json=body, timeout=TIMEOUT_S)
                if not response.ok:
                    raise ApiError(response.status_code, response.text, login_command())
                page = response.json()
                entries += [api.parse_log_entry(entry) for entry in page.get("entries", [])]
                if not page.get("nextPageToken"):
                    return entries
                body["pageToken"] = page["nextPageToken"]

    def jobs(self, label: str = "") -> Sequence[JobStatus]:
        """Sends a GET of the list, filtered by label; without one also of the studies."""
        request = {"parent": self._parent, "filter": api.label_filter(label)}
        with converted_errors():
            lists = [getattr(self._client, f"list_{kind.message}s") for kind in api.kinds_of(label)]
            found = [job for one in lists for job in one(request, retry=None, timeout=TIMEOUT_S)]
            return [api.parse_job(_as_json(job)) for job in found]

    def cancel(self, name: str) -> None:
        """Sends a POST of :cancel."""
        with converted_errors():
            cancel = getattr(self._client, f"cancel_{api.kind_of(name).message}")
            cancel(name=name, retry=None, timeout=TIMEOUT_S)

    def create_resource(self, request: PersistentResource) -> None:
        """Sends one POST, and does not wait for the operation."""
        with converted_errors():
            client = self._resources
        from google.cloud.aiplatform_v1.types import PersistentResource as Message

        content: dict[str, Any] = {"displayName": request.id, "labels": request.labels, "resourcePools": request.pools}
        content |= {"network": request.network} if request.network else {}
        content |= {"encryptionSpec": {"kmsKeyName": request.kms_key}} if request.kms_key else {}
        own = {"serviceAccountSpec": {"enableCustomServiceAccount": True}}
        content |= {"resourceRuntimeSpec": own} if request.own_account else {}
        with converted_errors():
            message = Message.from_json(json.dumps(content))
            asked = {"parent": self._parent, "persistent_resource": message, "persistent_resource_id": request.id}
            client.create_persistent_resource(**asked, retry=None, timeout=TIMEOUT_S)

    def resource(self, id: str) -> JobStatus:
        """Sends a GET of the persistent resource."""
        with converted_errors():
            found = self._resources.get_persistent_resource(name=self._named(id), retry=None, timeout=TIMEOUT_S)
            return api.parse_resource(_as_json(found))

    def resources(self) -> Sequence[JobStatus]:
        """Sends a GET of the list, which has no filter."""
        with converted_errors():
            listed = self._resources.list_persistent_resources(parent=self._parent, retry=None, timeout=TIMEOUT_S)
            return [api.parse_resource(_as_json(found)) for found in listed if LABEL in found.labels]

    def delete_resource(self, id: str) -> None:
        """Sends a DELETE, and does not wait for the operation."""
        with converted_errors():
            self._resources.delete_persistent_resource(name=self._named(id), retry=None, timeout=TIMEOUT_S)

    def _named(self, id: str) -> str:
        return f"{self._parent}/persistentResources/{id}"

    @property
    def _parent(self) -> str:
        return f"projects/{self._project}/locations/{self._region}"


def _as_json(job: Any) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    found: dict[str, Any] = MessageToDict(type(job).pb(job))
    return found
