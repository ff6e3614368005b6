"""Runs a study on Vertex AI as one HyperparameterTuningJob of a tier and a recipe, and reads its trials.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest/v1/projects.locations.hyperparameterTuningJobs
The job is recorded in OUT/vertex.json before it is submitted: the same command finds and follows it.
"""

import argparse
import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.localrun.processes import on_signals
from deploy.spec.checks import sent_to_the_cloud
from deploy.spec.gcp_config import GcpConfig, read_gcp_config
from deploy.spec.job_spec import Job, JobOptions, TrainingRequest, render
from deploy.study.space import Parameter
from deploy.study.study_plan import SENT_STUDY, StudyPlan, write_study
from deploy.study.trials import Trial
from deploy.vertex.api import STUDY, Backend, JobStatus, parse_time
from deploy.vertex.cancellation import cancel_doubles, oldest_first
from deploy.vertex.costs import price_and_limit
from deploy.vertex.errors import exit_code, exit_on_api_error
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.history import Submission, find_attempt, record_status
from deploy.vertex.logs import watch_job
from deploy.vertex.retry import retried
from deploy.vertex.session import BACKENDS, Session
from deploy.vertex.submission import attempt_label, check_resources, custom_job, submit_job, upload_packages
from trainer.config.fields import as_text
from trainer.errors import INTERRUPTED, UserError
from trainer.reporting.run_files import mapping, number, read_json
from trainer.storage import keep_others_out, write_whole

_STATES = {"SUCCEEDED": "complete", "INFEASIBLE": "failed", "STOPPING": "pruned"}


class VertexStudy:
    """Submits the study of `plan`, or finds it again. `args`: the flags of `read_gcp_config` and --backend."""

    def __init__(
        self, plan: StudyPlan, out: Path, args: argparse.Namespace, options: JobOptions, session: Session
    ) -> None:
        if plan.repeats > 1:
            raise UserError("--repeats is for studies on this machine: a HyperparameterTuningJob runs each trial once")
        if plan.tier.spec.get("baseOutputDirectory"):
            raise UserError(f"{plan.tier.name}: remove its baseOutputDirectory: each study has a folder in --bucket")
        self._plan, self._out, self._session = plan, out, session
        self._backend_name = args.backend or BACKENDS[0]
        self._most_usd = options.max_cost
        self._submission = f"{STUDY}{options.submission}"
        self._trial_job = self._render(args, options)
        self._gcp = self._trial_job.gcp
        self._job = self._study_job(self._trial_job)

    def _render(self, args: argparse.Namespace, options: JobOptions) -> Job:
        """Returns the job of one trial, without the settings that the study varies."""
        plan = self._plan
        share = None if self._most_usd is None else self._most_usd / plan.most_trials
        options = dataclasses.replace(options, submission=self._submission, max_cost=share)
        with sent_to_the_cloud():
            config = plan.request(plan.first).config
        request = TrainingRequest(plan.tier, plan.overrides.replace(tuning_metric=plan.metric), config)
        try:
            return render(request, read_gcp_config(args, with_project=True), options)
        except UserError as error:
            if not str(error).startswith("max_cost="):
                raise
            raise UserError(f"max_cost={self._most_usd:g} over {plan.most_trials} trials: {error}") from None

    def _study_job(self, trial: Job) -> Job:
        """Returns the trial's job with the study around it; without a price, which is that of one trial alone."""
        plan = self._plan
        study: dict[str, Any] = {
            "metrics": [{"metricId": plan.metric, "goal": plan.goal.upper()}],
            "parameters": [parameter_spec(parameter) for parameter in plan.space],
            "measurementSelectionType": "LAST_MEASUREMENT",
        }
        if plan.pruning:
            study["medianAutomatedStoppingSpec"] = {"useElapsedDuration": False}
        spec = {
            "studySpec": study,
            "maxTrialCount": plan.most_trials,
            "parallelTrialCount": min(plan.parallel, plan.most_trials),
            "trialJobSpec": trial.spec,
        }
        return dataclasses.replace(trial, spec=spec, tier=dataclasses.replace(trial.tier, price_per_hour=None))

    def describe(self) -> Iterator[str]:
        """Yields what is submitted, what each trial costs, and the most that all may cost."""
        job, count = self._trial_job, self._plan.most_trials
        yield f"{job.name}: each trial on {job.tier.machine} in {job.gcp.region}, {job.tier.strategy}"
        yield f"writes to {job.output}/1 and so on"
        yield from (package.about for package in job.packages if package.about)
        yield from job.about
        yield f"each trial: {price_and_limit(job.tier)}"
        limit = "" if self._most_usd else "; --max_cost=USD limits them together"
        if job.tier.most_usd is not None:
            yield f"all {count} trials together: {count * job.tier.most_usd:.2f} USD at most{limit}"
        yield from (f"warning: {line}" for line in job.warnings)

    def paste(self) -> str:
        """Returns the command that would run, with its config."""
        gcloud = Gcloud(self._gcp.project, self._gcp.region)
        return gcloud.shell_command(custom_job(self._job, attempt_label(self._submission)))

    def run(self) -> tuple[int, tuple[Trial, ...]]:
        """Submits or finds the study and follows it; returns the exit code and its trials so far."""
        write_study(self._out, self._plan.asked("vertex"))
        keep_others_out(self._out, "out", str(self._out))
        with exit_on_api_error(self._gcp), on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
            name = self._find() or self._send()
            backend = self._open(self._gcp.project, self._gcp.region)
            status = watch_job(backend, name, self._gcp, self._session.clock, created=True)
            if status is None:
                print("run the same command again to go on watching", flush=True)
                return INTERRUPTED, ()
            self._record(status)
            found = retried(lambda: backend.trials(status.name), self._session.clock)
        return exit_code(status), tuple(read_vertex_trial(trial, self._plan, status.over) for trial in found)

    def _find(self) -> str:
        """Returns the name of the job that this study's folder records, and cancels its doubles; empty if none."""
        sent, problem = read_json(self._out / SENT_STUDY)
        if not (self._out / SENT_STUDY).exists():
            return ""
        try:
            project, region, submission = (str(sent[name]) for name in ("project", "region", "submission"))
        except KeyError:
            raise UserError(
                f"{self._out / SENT_STUDY} is damaged{problem and f' ({problem})'}: see `python -m deploy jobs` for "
                "running studies, then remove the file"
            ) from None
        backend = self._open(project, region)
        jobs = oldest_first(attempt_label(submission), backend, self._session.clock)
        status = next(reversed(cancel_doubles(jobs, backend, self._session.clock).values()), None)
        if status is None:
            return ""
        print(f"goes on with {status.name}", flush=True)
        self._gcp = GcpConfig(project, region, self._gcp.bucket)
        return status.name

    def _send(self) -> str:
        clock, gcp = self._session.clock, self._gcp
        backend = self._open(gcp.project, gcp.region)
        check_resources(self._trial_job, backend, clock)
        upload_packages(self._job.packages, gcp.bucket, backend, clock)
        sent = {
            "project": gcp.project,
            "region": gcp.region,
            "submission": self._submission,
            "output": self._job.output,
        }
        write_whole(self._out / SENT_STUDY, json.dumps(sent, indent=2) + "\n")
        return submit_job(self._job, Submission(self._submission), self._open, clock)

    def _record(self, status: JobStatus) -> None:
        with suppress(LookupError, UserError):  # the study does not need this folder's records
            record_status(*find_attempt(status.name), status, self._session.clock.now())

    def _open(self, project: str, region: str) -> Backend:
        return self._session.open(self._backend_name, project, region)


def parameter_spec(parameter: Parameter) -> dict[str, Any]:
    """Returns the ParameterSpec of Vertex AI for a setting. Numbers in a list are discrete, texts are categories."""
    spec: dict[str, Any] = {"parameterId": parameter.name}
    if parameter.values and parameter.kind in (int, float) and None not in parameter.values:
        spec["discreteValueSpec"] = {"values": sorted(float(value) for value in parameter.values)}
    elif parameter.values:
        spec["categoricalValueSpec"] = {"values": [as_text(value) for value in parameter.values]}
    else:
        kind = "integerValueSpec" if parameter.kind is int else "doubleValueSpec"
        spec[kind] = {"minValue": parameter.low, "maxValue": parameter.high}
    if not parameter.values:
        spec["scaleType"] = "UNIT_LOG_SCALE" if parameter.log else "UNIT_LINEAR_SCALE"
    return spec


def read_vertex_trial(content: Mapping[str, Any], plan: StudyPlan, over: bool) -> Trial:
    """Converts a Trial's JSON. `over`: of a study that has ended, a trial that has not was cancelled with it."""
    kinds = {parameter.name: parameter.kind for parameter in plan.space}
    given = {str(one["parameterId"]): one.get("value") for one in content.get("parameters", [])}
    settings = {name: _typed(kinds.get(name, str), value) for name, value in given.items()}
    state = _STATES.get(str(content.get("state")), "killed" if over else "running")
    values = _metric(mapping(content, "finalMeasurement"), plan.metric)
    if state == "complete" and not values:
        state = "failed"
    reason = str(content.get("infeasibleReason") or "") or _reason(state, plan.metric)
    began, ended = (parse_time(str(content.get(key) or "")) for key in ("startTime", "endTime"))
    seconds = max((ended or time.time()) - began, 0.0) if began else 0.0
    reports = [value for one in content.get("measurements", []) for value in _metric(one, plan.metric)]
    return Trial(int(content["id"]), settings, state, tuple(values), tuple(reports), reason, seconds)


def _reason(state: str, metric: str) -> str:
    return {"failed": f"it reported no {metric}", "killed": "it was cancelled with the study"}.get(state, "")


def _metric(measurement: Mapping[str, Any], metric: str) -> list[float]:
    found = [one.get("value") for one in measurement.get("metrics", []) if one.get("metricId") == metric]
    return [value for one in found if (value := number(one)) is not None]


def _typed(kind: type, value: Any) -> Any:
    """Returns a parameter's value as its setting has it: the service sends whole numbers as fractions."""
    if kind is bool:
        return str(value).lower() == "true"
    return int(value) if kind is int and isinstance(value, (int, float)) else value
