"""Sends runs to Vertex AI Experiments and TensorBoard by REST, in the form that Google's SDK reads.

An experiment and its runs are contexts of the metadata store; points are time series of a TensorBoard instance, which
an artifact names: https://docs.cloud.google.com/vertex-ai/docs/experiments/intro-vertex-ai-experiments
"""

import os
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from trainer.base.errors import UserError, shortened
from trainer.base.storage.login import credentials, gcloud_property
from trainer.base.tracker import Address, Opened, Point, TrackedRun

TENSORBOARD = "TRAINER_TENSORBOARD"  # a variable of a job: the instance of `--tensorboard_instance`
_DISPLAY_NAME = "vertex-trainer"  # of the instance that is made where none is named
_STATES = {"running": "RUNNING", "finished": "COMPLETE", "failed": "FAILED", "killed": "CANCELLED"}
_TIMEOUT_S, _MOST = 60.0, 1000  # of a request; values of one
_SCALAR = "SCALAR"


class VertexApi:
    """Calls Vertex AI in one project and region. Methods raise UserError for what the account may not do."""

    def __init__(self, project: str, region: str, subject: str) -> None:
        if not project or not region:
            raise UserError(
                f"{subject}: project and region are not known: gcloud config set project ID, and gcloud config "
                "set ai/region NAME"
            )
        host = f"https://{region}-aiplatform.googleapis.com"
        self._service = f"{os.environ.get('CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM', host).rstrip('/')}/v1"
        self.parent, self._subject = f"projects/{project}/locations/{region}", subject
        self.project, self.region = project, region

    def call(
        self, method: str, name: str, body: Any = None, *, allowed: int = 0, **query: Any
    ) -> dict[str, Any] | None:
        """Returns the answer, of a long operation its result; None for the status `allowed`, as 404."""
        from google.auth.transport.requests import AuthorizedSession

        with AuthorizedSession(credentials()) as session:
            answer = session.request(
                method,
                f"{self._service}/{name}",
                json=body,
                params=query,
                timeout=_TIMEOUT_S,
                max_allowed_time=_TIMEOUT_S,
            )
        if answer.status_code == allowed:
            return None
        if answer.status_code in (400, 401, 403, 404):
            raise UserError(
                f"{self._subject}: Vertex AI refuses it ({answer.status_code}): {shortened(answer.text)}: the "
                f"account needs roles/aiplatform.user on {self.project} (docs/permissions.md)"
            )
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
        if "/operations/" in content.get("name", ""):
            return self._result(content)
        return content

    def _result(self, operation: dict[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + _TIMEOUT_S
        while not operation.get("done"):
            if time.monotonic() > until:
                raise TimeoutError(f"{operation['name']} has not ended within {_TIMEOUT_S:g} seconds")
            time.sleep(1.0)
            operation = self.call("GET", operation["name"].partition("/v1/")[2] or operation["name"]) or {}
        return dict(operation.get("response", {}))

    def pages(self, name: str, key: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yields the items of all pages of a list."""
        while True:
            page = self.call("GET", name, **query) or {}
            yield from page.get(key, [])
            if not page.get("nextPageToken"):
                return
            query["pageToken"] = page["nextPageToken"]

    def made(self, collection: str, identity: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the resource with this id, which is made if it is not there; `key`: of the id in the request."""
        name = f"{collection}/{identity}"
        if (known := self.call("GET", name, allowed=404)) is not None:
            return known
        self.call("POST", collection, body, allowed=409, **{key: identity})  # 409: another process was faster
        return self.call("GET", name) or {}

    def tensorboard(self) -> str:
        """Returns the name of the TensorBoard instance that this package makes once a region."""
        for instance in self.pages(f"{self.parent}/tensorboards", "tensorboards"):
            if instance.get("displayName") == _DISPLAY_NAME:
                return str(instance["name"])
        made = self.call("POST", f"{self.parent}/tensorboards", {"displayName": _DISPLAY_NAME}) or {}
        return str(made["name"])


class VertexRuns:
    """Goes on with a run by its id. Meets `Tracker`; raises UserError if project or region are not known."""

    def __init__(self, address: Address) -> None:
        place = gcloud_property("core", "project"), gcloud_property("ai", "region")
        self._address, self._api = address, (api := VertexApi(*place, f"track={address.text}"))
        self._store = f"{api.parent}/metadataStores/default"
        self._context, self._board_run, self._metadata = "", "", dict[str, Any]()
        self._series: dict[str, str] = {}  # ids of time series, by the name of the metric

    def begin(self, run: TrackedRun) -> Opened:
        api, name = self._api, self._address.name
        api.made(f"{api.parent}/metadataStores", "default", "metadataStoreId", {})
        board = os.environ.get(TENSORBOARD) or ""
        experiment = self._made_context(name, "system.Experiment", name, {"experiment_deleted": False})
        if not board and not (board := experiment.get("metadata", {}).get("backing_tensorboard_resource", "")):
            board = api.tensorboard()
        metadata = {**experiment.get("metadata", {}), "backing_tensorboard_resource": board}
        api.call("PATCH", experiment["name"], {"metadata": metadata}, updateMask="metadata")
        start = {"_params": {}, "_metrics": {}, "_state": "RUNNING"}
        context = self._made_context(f"{name}-{run.id}", "system.ExperimentRun", run.name, start)
        self._context, self._metadata = context["name"], {**start, **context.get("metadata", {})}
        api.call("POST", f"{experiment['name']}:addContextChildren", {"childContexts": [self._context]})
        self._board(board, run)
        found = {
            series["displayName"]: series
            for series in api.pages(f"{self._board_run}/timeSeries", "tensorboardTimeSeries")
        }
        self._series = {metric: series["name"].rsplit("/", 1)[-1] for metric, series in found.items()}
        # A series without points has no metadata; one with points has the last step.
        steps = {
            metric: int(series["metadata"].get("maxStep", 0))
            for metric, series in found.items()
            if series.get("metadata")
        }
        page = f"https://console.cloud.google.com/vertex-ai/experiments/locations/{api.region}/experiments/{name}/runs/"
        return Opened(f"{page}{name}-{run.id}?project={api.project}", lambda metric: steps.get(metric, -1))

    def _made_context(self, identity: str, schema: str, title: str, metadata: dict[str, Any]) -> dict[str, Any]:
        about = {"displayName": title, "schemaTitle": schema, "schemaVersion": "0.0.1", "metadata": metadata}
        context = self._api.made(f"{self._store}/contexts", identity, "contextId", about)
        if context.get("schemaTitle") != schema:
            raise UserError(
                f"track={self._address.text}: {identity} is a {context.get('schemaTitle')} in the metadata of "
                f"{self._api.parent}, not a {schema}: use another name"
            )
        return context

    def _board(self, board: str, run: TrackedRun) -> None:
        """Makes the run of the TensorBoard instance, and the artifact that tells the SDK where it is."""
        api, identity = self._api, f"{self._address.name}-{run.id}-tb-run"
        labels = {"vertex_tensorboard_experiment_source": "vertex_experiment"}
        about = {"displayName": self._address.name, "labels": labels}
        experiment = api.made(f"{board}/experiments", self._address.name, "tensorboardExperimentId", about)
        runs = f"{experiment['name']}/runs"
        self._board_run = api.made(runs, run.id, "tensorboardRunId", {"displayName": run.id})["name"]
        artifact = api.made(f"{self._store}/artifacts", identity, "artifactId", {
            "displayName": identity, "state": "LIVE",
            "schemaTitle": "google.VertexTensorboardRun", "schemaVersion": "0.0.1",
            "uri": f"https://{api.region}-aiplatform.googleapis.com/v1/{self._board_run}",
            "metadata": {"resourceName": self._board_run, "vertex_experiment_tracking": True},
        })  # fmt: skip
        api.call("POST", f"{self._context}:addContextArtifactsAndExecutions", {"artifacts": [artifact["name"]]})

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        values = [(name, point, value) for point in points for name, value in point.values.items()]
        for name in dict.fromkeys(name for name, _, _ in values if name not in self._series):
            about = {"displayName": name, "valueType": _SCALAR, "pluginName": "scalars"}
            made = self._api.call("POST", f"{self._board_run}/timeSeries", about) or {}
            self._series[name] = made["name"].rsplit("/", 1)[-1]
        for start in range(0, len(values), _MOST):
            series: dict[str, list[Any]] = {}
            for name, point, value in values[start : start + _MOST]:
                wall = datetime.fromtimestamp(point.time, timezone.utc).isoformat().replace("+00:00", "Z")
                series.setdefault(name, []).append({"step": point.step, "wallTime": wall, "scalar": {"value": value}})
            data = [{"tensorboardTimeSeriesId": self._series[name], "valueType": _SCALAR, "values": some}
                    for name, some in series.items()]  # fmt: skip
            self._api.call(
                "POST", f"{self._board_run}:write", {"tensorboardRun": self._board_run, "timeSeriesData": data}
            )
        newest = {name: value for name, _, value in values}
        parameters = {
            **run.parameters,
            **{f"tag.{name}": value for name, value in run.tags.items()},
            "parent": run.parent,
        }
        known = self._metadata
        metadata = {**known, "_params": {**known["_params"], **parameters}, "_state": _STATES[run.state],
                    "_metrics": {**known["_metrics"], **newest}}  # fmt: skip
        if metadata != known:
            self._api.call("PATCH", self._context, {"metadata": metadata}, updateMask="metadata")
            self._metadata = metadata
