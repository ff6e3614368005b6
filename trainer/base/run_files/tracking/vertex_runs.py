"""Sends runs to Vertex AI Experiments and TensorBoard by REST, in the form that Google's SDK reads.

An experiment and its runs are contexts of the metadata store; points are time series of a
TensorBoard instance, which an artifact names:
https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/experiments/intro-vertex-ai-experiments
"""

import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from trainer.base.errors import UserError, shortened
from trainer.base.storage.login import credentials, gcloud_property
from trainer.base.tracker import Opened, Point, TrackedRun, TrackerAddress

TENSORBOARD = "TRAINER_TENSORBOARD"  # a variable of a job: the instance of `--tensorboard_instance`
_DISPLAY_NAME = "vertex-trainer"  # of the TensorBoard instance that is created if none is named
_STATES = {"running": "RUNNING", "finished": "COMPLETE", "failed": "FAILED", "killed": "CANCELLED"}
_TIMEOUT_S = 60.0  # of a request
_MOST = 1000  # values in a request, or items on a page
Json = dict[str, Any]


class VertexRuns:
    """Implements `Tracker` for Vertex AI: resumes a run by its id.

    Raises UserError without project or region.
    """

    def __init__(self, address: TrackerAddress) -> None:
        self._name = address.name
        self._text = f"track={address.text}"
        project = gcloud_property("core", "project")
        region = gcloud_property("ai", "region")
        if not project or not region:
            raise UserError(
                f"{self._text}: project and region are not known: gcloud config set project ID, and"
                " gcloud config set ai/region NAME"
            )
        host = f"https://{region}-aiplatform.googleapis.com"
        self._service = (
            f"{os.environ.get('CLOUDSDK_API_ENDPOINT_OVERRIDES_AIPLATFORM', host).rstrip('/')}/v1"
        )
        self._parent = f"projects/{project}/locations/{region}"
        self._context = ""
        self._board_run = ""
        self._metadata = Json()
        self._series: dict[str, str] = {}  # ids of time series, by the name of the metric

    def begin(self, run: TrackedRun) -> Opened:
        name = self._name
        identity = f"{self._name}-{run.id}"
        store = f"{self._parent}/metadataStores"
        contexts = f"{self._ensured(store, 'default', 'metadataStoreId', {})['name']}/contexts"
        experiment = self._ensured_context(
            contexts, name, "system.Experiment", name, {"experiment_deleted": False}
        )
        # The TensorBoard that keeps its series.
        stored = experiment.get("metadata", {})
        board = os.environ.get(TENSORBOARD) or stored.get("backing_tensorboard_resource")
        if not board:  # this package's, created if it is missing
            instances = f"{self._parent}/tensorboards"
            listed = self._listed(instances, "tensorboards")
            boards = {item.get("displayName"): item for item in listed}
            ours = (
                boards.get(_DISPLAY_NAME)
                or self._call("POST", instances, {"displayName": _DISPLAY_NAME})
                or {}
            )
            board = ours["name"]
        metadata = {**stored, "backing_tensorboard_resource": board}
        self._call("PATCH", experiment["name"], {"metadata": metadata}, updateMask="metadata")
        # The run, as a context of the experiment.
        empty = {"_params": {}, "_metrics": {}, "_state": "RUNNING"}
        context = self._ensured_context(contexts, identity, "system.ExperimentRun", run.name, empty)
        self._context = context["name"]
        self._metadata = {**empty, **context.get("metadata", {})}
        self._call(
            "POST", f"{experiment['name']}:addContextChildren", {"childContexts": [self._context]}
        )
        # The same experiment and run in TensorBoard, and an artifact that links the two.
        body = {
            "displayName": name,
            "labels": {"vertex_tensorboard_experiment_source": "vertex_experiment"},
        }
        experiments = f"{board}/experiments"
        board_experiment = self._ensured(experiments, name, "tensorboardExperimentId", body)
        runs = f"{board_experiment['name']}/runs"
        board_run = self._ensured(runs, run.id, "tensorboardRunId", {"displayName": run.id})
        self._board_run = board_run["name"]
        artifact = self._ensured(
            f"{contexts.removesuffix('/contexts')}/artifacts",
            f"{identity}-tb-run",
            "artifactId",
            {
                "displayName": f"{identity}-tb-run",
                "schemaTitle": "google.VertexTensorboardRun",
                "schemaVersion": "0.0.1",
                "state": "LIVE",
                # the SDK finds the run by it
                "uri": f"https://aiplatform.googleapis.com/v1/{self._board_run}",
                "metadata": {"resourceName": self._board_run, "vertex_experiment_tracking": True},
            },
        )
        self._call(
            "POST",
            f"{self._context}:addContextArtifactsAndExecutions",
            {"artifacts": [artifact["name"]]},
        )
        # The last step of each metric that it has.
        series = self._listed(f"{self._board_run}/timeSeries", "tensorboardTimeSeries")
        self._series = {}
        steps = {}
        for metric in series:
            self._series[metric["displayName"]] = metric["name"].rsplit("/", 1)[-1]
            if metric.get("metadata"):
                steps[metric["displayName"]] = metric["metadata"].get("maxStep", 0)
        _, project, _, region = self._parent.split("/")
        page = f"https://console.cloud.google.com/vertex-ai/experiments/locations/{region}/experiments/{name}/runs/"
        return Opened(
            f"{page}{identity}?project={project}", lambda metric: int(steps.get(metric, -1))
        )

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        values = [(name, point, value) for point in points for name, value in point.values.items()]
        # A time series for each new metric, then the values.
        for name in dict.fromkeys(name for name, _, _ in values if name not in self._series):
            body = {"displayName": name, "valueType": "SCALAR", "pluginName": "scalars"}
            series = self._call("POST", f"{self._board_run}/timeSeries", body) or {}
            self._series[name] = series["name"].rsplit("/", 1)[-1]
        for start in range(0, len(values), _MOST):
            data = []
            for name, point, value in values[start : start + _MOST]:
                time_text = f"{datetime.fromtimestamp(point.time, UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
                scalar = {"step": point.step, "scalar": {"value": value}, "wallTime": time_text}
                series_id = {"tensorboardTimeSeriesId": self._series[name]}
                data.append({**series_id, "valueType": "SCALAR", "values": [scalar]})
            self._call(
                "POST",
                f"{self._board_run}:write",
                {"tensorboardRun": self._board_run, "timeSeriesData": data},
            )
        # What the run is now: its settings and tags, and the newest value of each metric.
        tags = {f"tag.{name}": value for name, value in run.tags.items()}
        if run.parent:
            tags["parent"] = run.parent
        parameters = {**self._metadata["_params"], **run.parameters, **tags}
        newest = {**self._metadata["_metrics"], **{name: value for name, _, value in values}}
        metadata = {
            **self._metadata,
            "_params": parameters,
            "_metrics": newest,
            "_state": _STATES[run.state],
        }
        if metadata != self._metadata:
            self._call("PATCH", self._context, {"metadata": metadata}, updateMask="metadata")
            self._metadata = metadata

    def _ensured_context(
        self, contexts: str, identity: str, schema: str, title: str, metadata: Json
    ) -> Json:
        body = {
            "displayName": title,
            "schemaTitle": schema,
            "schemaVersion": "0.0.1",
            "metadata": metadata,
        }
        context = self._ensured(contexts, identity, "contextId", body)
        if (actual := context.get("schemaTitle")) != schema:
            raise UserError(
                f"{self._text}: {identity} is a {actual} in {contexts}, not a {schema}: use another"
                " name"
            )
        return context

    def _call(
        self, method: str, name: str, body: Any = None, *, allowed: int = 0, **query: Any
    ) -> Json | None:
        """Sends a request and returns its answer, or None if its status is `allowed`, as 404.

        Waits for a long-running operation, and returns its result. Raises UserError if the request
        is refused.
        """
        from google.auth.transport.requests import AuthorizedSession

        url = f"{self._service}/{name}"
        while True:  # the sender limits how long an operation takes
            with AuthorizedSession(credentials()) as session:
                answer = session.request(method, url, json=body, params=query, timeout=_TIMEOUT_S)
            if answer.status_code == allowed:
                return None
            if answer.status_code in (400, 401, 403, 404):
                raise UserError(
                    f"{self._text}: Vertex AI refuses it ({answer.status_code}):"
                    f" {shortened(answer.text)}: the account needs roles/aiplatform.user"
                    " (docs/permissions.md)"
                )
            answer.raise_for_status()
            content: Json = answer.json()
            if "/operations/" not in content.get("name", ""):
                return content
            if content.get("done"):
                return dict(content.get("response", {}))
            time.sleep(1.0)
            url = f"{self._service}/{content['name']}"
            method = "GET"
            body = None
            query = {}

    def _ensured(self, collection: str, identity: str, key: str, body: Json) -> Json:
        """Returns the resource `identity`, created if missing.

        key: the query parameter that has the id.
        """
        name = f"{collection}/{identity}"
        if (resource := self._call("GET", name, allowed=404)) is not None:
            return resource
        # 409: another process was faster
        self._call("POST", collection, body, allowed=409, **{key: identity})
        return self._call("GET", name) or {}

    def _listed(self, collection: str, key: str) -> list[Json]:
        """Returns the resources of a collection, of which this package makes a page at most."""
        return list((self._call("GET", collection, pageSize=_MOST) or {}).get(key, []))
