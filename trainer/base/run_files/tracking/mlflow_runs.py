"""Sends runs to MLflow: by mlflow-skinny to a server, by the whole mlflow to a database file.

https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.tracker import Opened, Point, TrackedRun, TrackerAddress

# MLflow's own retries would delay the next report; it would also send telemetry, and print to
# stdout.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_STATES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_ID = "trainer.run"  # a tag: our id of the run
# the most that one request may have
_METRICS = 1000
_TAGS = 100


class MlflowRuns:
    """Implements `Tracker` for MLflow.

    It finds a run by our id in a tag, so that a restart creates no second run.
    """

    def __init__(self, address: TrackerAddress) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._address = address
        self._text = f"track={address.text}"
        self._client = MlflowClient(address.server)
        self._run = ""
        self._tags = dict[str, str]()
        self._parameters = dict[str, str]()

    def begin(self, run: TrackedRun) -> Opened:
        from mlflow.exceptions import MlflowException

        client = self._client
        name = self._address.name
        server = self._address.server
        with self._refusals():
            # The experiment, created if there is none.
            if (experiment := client.get_experiment_by_name(name)) is None:
                try:
                    client.create_experiment(name)
                except MlflowException:  # another run may have created it at the same time
                    if client.get_experiment_by_name(name) is None:
                        raise
                experiment = client.get_experiment_by_name(name)

            # The run with our id, or a new one.
            experiment_id = str(experiment.experiment_id)
            tracked = self._find(experiment_id, run.id)
            if tracked is None:
                parent = self._find(experiment_id, run.parent) if run.parent else None
                tags = {
                    _ID: run.id,
                    **({"mlflow.parentRunId": parent.info.run_id} if parent else {}),
                }
                tracked = client.create_run(experiment_id, tags=tags, run_name=run.name)
            self._run = tracked.info.run_id
            self._tags = tracked.data.tags
            self._parameters = tracked.data.params
            if tracked.info.status != "RUNNING":
                client.update_run(self._run, status="RUNNING")
        steps = {metric.key: metric.step for metric in tracked.data.to_proto().metrics}
        link = server
        if server.startswith("http"):
            link = f"{server}/#/experiments/{experiment_id}/runs/{self._run}"
        return Opened(link, lambda name: steps.get(_allowed(name), -1))

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics = []
        for point in points:
            milliseconds = int(1000 * point.time)
            for name, value in point.values.items():
                metrics.append(Metric(_allowed(name), value, milliseconds, point.step))
        values = {_allowed(name): value for name, value in run.parameters.items()}
        fresh = {name: value for name, value in values.items() if name not in self._parameters}
        # A parameter of MLflow never changes: a new value, as of `replicas` after a restart,
        # becomes a tag.
        stored = {**values, **self._parameters}
        changed = {name: value for name, value in values.items() if stored[name] != value}
        all_tags = {_allowed(name): value for name, value in run.tags.items()} | changed
        if run.description:
            all_tags["mlflow.note.content"] = run.description
        tags = {name: value for name, value in all_tags.items() if self._tags.get(name) != value}
        parts = [[Param(*item) for item in fresh.items()], [RunTag(*item) for item in tags.items()]]
        with self._refusals():
            # Only as much at a time as one request may hold.
            while metrics or any(parts):
                self._client.log_batch(
                    self._run, metrics[:_METRICS], *(part[:_TAGS] for part in parts)
                )
                metrics = metrics[_METRICS:]
                parts = [part[_TAGS:] for part in parts]
            self._tags = {**self._tags, **tags}
            self._parameters = {**self._parameters, **fresh}
            if run.state != "running":
                self._client.set_terminated(self._run, _STATES[run.state])
        for file in run.files:
            try:
                self._client.log_artifact(self._run, str(file))
            # of the server's artifact store, which may be another server
            except Exception as error:
                log.warning(f"{self._text}: {file} is not sent: {reason(error)}")

    def _find(self, experiment_id: str, identity: str) -> Any:
        runs = self._client.search_runs(
            [experiment_id], f"tags.`{_ID}` = '{identity}'", max_results=1
        )
        return runs[0] if runs else None

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises UserError if the server refuses a request in the block for good; other errors pass
        unchanged."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            # If a reply is not JSON, such as a proxy's, MLflow gives its code in the message alone.
            match = re.search(r"error code (\d+)", str(error))
            code = int(match[1]) if match else error.get_http_status_code()
            if not 400 <= code < 500 or code in (408, 429):
                raise
            login = (
                ": set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and"
                " MLFLOW_TRACKING_PASSWORD"
            )
            advice = login if code in (401, 403) else ""
            raise UserError(
                f"{self._text}: the server refuses it ({code}): {reason(error)}{advice}"
            ) from error


def _allowed(name: str) -> str:
    """Returns `name` in the characters that MLflow allows, as loss.2 for loss@2."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "."))[:250]
