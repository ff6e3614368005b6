"""Sends runs to MLflow: by mlflow-skinny to a server, by the whole mlflow to a database file.

https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from trainer.base.errors import UserError, reason
from trainer.base.log import log
from trainer.base.tracker import Address, Opened, Point, TrackedRun

# The package's own retries would hold up the next report, and its users' statistics are nobody's business here.
_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_DISABLE_TELEMETRY": "true",
                "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}  # fmt: skip
_STATES = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_ID = "trainer.run"  # a tag: our id of the run
_MOST = 1000, 100  # metrics, and parameters or tags, of one request


def open_tracker(address: Address) -> "MlflowRuns":
    """Returns the tracker. Raises UserError if the package that it needs is missing."""
    if find_spec("mlflow") is None:
        raise UserError(
            f"track={address.text}: the package mlflow-skinny is missing: pip install 'vertex-trainer[mlflow]'"
        )
    if address.server.startswith("sqlite") and (find_spec("sqlalchemy") is None or find_spec("alembic") is None):
        raise UserError(f"track={address.text}: a database file needs the whole package: pip install mlflow")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return MlflowRuns(address)


class MlflowRuns:
    """Finds a run by our id in a tag, so that no start makes a second one. Meets `Tracker`."""

    def __init__(self, address: Address) -> None:
        from mlflow import MlflowClient

        self._address, self._client = address, MlflowClient(address.server)
        self._run, self._tags, self._parameters = "", dict[str, str](), dict[str, str]()

    def begin(self, run: TrackedRun) -> Opened:
        with self._refusals():
            experiment = self._experiment()
            before = self._find(experiment, run.id)
            if before is None:
                tags = {_ID: run.id}
                if run.parent and (parent := self._find(experiment, run.parent)):
                    tags["mlflow.parentRunId"] = parent.info.run_id
                before = self._client.create_run(experiment, tags=tags, run_name=run.name)
            elif before.info.status != "RUNNING":
                self._client.update_run(before.info.run_id, status="RUNNING")
            self._run, self._tags, self._parameters = before.info.run_id, before.data.tags, before.data.params
        steps = {metric.key: metric.step for metric in before.data.to_proto().metrics}
        server = self._address.server
        link = f"{server}/#/experiments/{experiment}/runs/{self._run}" if server.startswith("http") else server
        return Opened(link, lambda name: steps.get(_allowed(name), -1))

    def send(self, run: TrackedRun, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics = [Metric(_allowed(name), value, int(1000 * point.time), point.step)
                   for point in points for name, value in point.values.items()]  # fmt: skip
        fresh = {
            _allowed(name): value for name, value in run.parameters.items() if _allowed(name) not in self._parameters
        }
        # A parameter of MLflow never changes: another value of it, as more replicas on resuming, is a tag.
        changed = {
            name: value
            for name, value in run.parameters.items()
            if self._parameters.get(_allowed(name), value) != value
        }
        wanted = {_allowed(name): value for name, value in {**run.tags, **changed}.items()}
        tags = {name: value for name, value in wanted.items() if self._tags.get(name) != value}
        parts = [[Param(*item) for item in fresh.items()], [RunTag(*item) for item in tags.items()]]
        with self._refusals():
            while metrics or any(parts):
                some = [part[: _MOST[1]] for part in parts]
                self._client.log_batch(self._run, metrics[: _MOST[0]], *some)
                metrics, parts = metrics[_MOST[0] :], [part[_MOST[1] :] for part in parts]
            self._tags, self._parameters = {**self._tags, **tags}, {**self._parameters, **fresh}
            if run.state != "running":
                self._client.set_terminated(self._run, _STATES[run.state])
        for file in run.files:
            self._add_file(str(file))

    def _add_file(self, file: str) -> None:
        try:
            self._client.log_artifact(self._run, file)
        except Exception as error:  # of the server's store of files, which may be another one
            log.warning(f"track={self._address.text}: {file} is not sent: {reason(error)}")

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._address.name
        if (known := self._client.get_experiment_by_name(name)) is None:
            with suppress(MlflowException):  # another run may make it at the same time
                return str(self._client.create_experiment(name))
            known = self._client.get_experiment_by_name(name)
        if known.lifecycle_stage != "active":
            raise UserError(f"track={self._address.text}: the experiment was deleted: restore it, or use another name")
        return str(known.experiment_id)

    def _find(self, experiment: str, identity: str) -> Any:
        found = self._client.search_runs([experiment], f"tags.`{_ID}` = '{identity}'", max_results=1)
        return found[0] if found else None

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raises UserError for what the server refuses; not for what a later try may send."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            code = error.get_http_status_code()
            if match := re.search(r"error code (\d+)", str(error)):
                code = int(match[1])
            if code in (401, 403):
                raise UserError(
                    f"track={self._address.text}: the server refuses the login ({code}): set MLFLOW_TRACKING_TOKEN, or "
                    "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
                ) from error
            if 400 <= code < 500 and code not in (408, 429):
                raise UserError(f"track={self._address.text}: the server refuses it: {reason(error)}") from error
            raise


def _allowed(name: str) -> str:
    """Returns a name that MLflow takes: loss.2 for loss@2."""
    return re.sub(r"[^\w\-./: ]", "_", name.replace("@", "."))[:250]
