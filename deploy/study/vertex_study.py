"""Runs a study on Vertex AI as one HyperparameterTuningJob of a tier and a recipe, and reads its trials.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/reference/rest/v1/projects.locations.hyperparameterTuningJobs
The job is recorded in OUT/vertex.json before it is submitted: the same command finds and follows it.
"""

import argparse
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.comparison.sent_job import SentJob
from deploy.localrun.processes import on_signals
from deploy.planning.cost_rule import cost_question
from deploy.planning.kept_plans import with_limits
from deploy.study.optuna_study import frozen_trial, load
from deploy.study.outcome import state_of
from deploy.study.space import StudyParameter
from deploy.study.study_request import StudyRequest, write_study
from deploy.tiers.gcp_config import GcpConfig, read_gcp_config
from deploy.tiers.job_request import JobOptions, TrainingRequest
from deploy.tiers.job_spec import RenderedJob, render
from deploy.tiers.output import say
from deploy.tiers.spec_changes import LIMIT_LABEL
from deploy.vertex.api import STUDY_LABEL, parse_time
from deploy.vertex.errors import api_errors, exit_code
from deploy.vertex.gcloud import Gcloud
from deploy.vertex.history import Submission, attempt_label, find_attempt, record_status
from deploy.vertex.job_end import result_of, why_stopped
from deploy.vertex.logs import watch_job
from deploy.vertex.rest import Backend
from deploy.vertex.retry import retried
from deploy.vertex.session import BACKENDS, Session
from deploy.vertex.spending import price_and_limit, price_label
from deploy.vertex.submission import check_resources, custom_job, submit_job, upload_packages
from trainer.base.errors import INTERRUPTED, UserError
from trainer.base.run_files.goodput import classes_of, share_of_steps
from trainer.base.run_files.records import mapping, number
from trainer.base.settings.fields import as_text
from trainer.base.storage import keep_others_out

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

_STATES = {"SUCCEEDED": "COMPLETE", "INFEASIBLE": "FAIL", "STOPPING": "PRUNED"}  # of trials -> Optuna's


class VertexStudy:
    """Submits the study of `plan`, or finds it again. `args`: the flags of `read_gcp_config` and --backend."""

    def __init__(
        self, plan: StudyRequest, out: Path, args: argparse.Namespace, options: JobOptions, session: Session
    ) -> None:
        if plan.repeats > 1:
            raise UserError("--repeats is for studies on this machine: a HyperparameterTuningJob runs each trial once")
        if plan.tier.spec.get("baseOutputDirectory"):
            raise UserError(f"{plan.tier.name}: remove its baseOutputDirectory: each study has a folder in --bucket")
        self._plan, self._out, self._session = plan, out, session
        self._open: Callable[[str, str], Backend] = partial(session.open, args.backend or BACKENDS[0])
        self._most_usd, self._dry_run = options.max_cost, args.dry_run
        self._submission = f"{STUDY_LABEL}{options.submission}"
        self._trial_job = self._render(args, options)
        self._gcp, self._output = self._trial_job.gcp, self._trial_job.output
        self._job = self._study_job(self._trial_job)

    def _render(self, args: argparse.Namespace, options: JobOptions) -> RenderedJob:
        """Returns the job of one trial, without the settings that the study varies."""
        plan = self._plan
        share = None if self._most_usd is None else self._most_usd / plan.most_trials
        options = dataclasses.replace(options, submission=self._submission, max_cost=share)
        config = plan.request(plan.first).config
        request = TrainingRequest(plan.tier, plan.overrides.replace(tuning_metric=plan.metric), config)
        options = with_limits(request, options)
        try:
            return render(request, read_gcp_config(args, with_project=True), options)
        except UserError as error:
            if not str(error).startswith("max_cost="):
                raise
            raise UserError(f"max_cost={self._most_usd:g} over {plan.most_trials} trials: {error}") from None

    def _study_job(self, trial: RenderedJob) -> RenderedJob:
        """Returns the trial's job with the study around it; with the limit of all trials in place of a price."""
        plan, usd = self._plan, trial.tier.most_usd
        limit = price_label(None if usd is None else usd * plan.most_trials, LIMIT_LABEL)
        options = dataclasses.replace(trial.options, labels={**trial.options.labels, **limit})
        pruning = {"medianAutomatedStoppingSpec": {"useElapsedDuration": False}} if plan.pruning else {}
        spec = {
            "studySpec": {
                "metrics": [{"metricId": plan.metric, "goal": plan.goal.upper()}],
                "parameters": [parameter_spec(parameter) for parameter in plan.space],
                "measurementSelectionType": "LAST_MEASUREMENT",
                **pruning,
            },
            "maxTrialCount": plan.most_trials,
            "parallelTrialCount": min(plan.parallel, plan.most_trials),
            "trialJobSpec": trial.spec,
        }
        tier = dataclasses.replace(trial.tier, price_per_hour=None)
        return dataclasses.replace(trial, spec=spec, tier=tier, options=options)

    def describe(self) -> Iterator[str]:
        """Yields what is submitted, what each trial costs, and the most that all may cost."""
        job, count = self._trial_job, self._plan.most_trials
        yield f"{job.name}: each trial on {job.tier.machine} in {job.gcp.region}, {job.tier.strategy}"
        if not SentJob.read(self._out):  # else it goes on in the folder of the first command
            yield f"writes to {job.output}/1 and so on"
        yield from (package.about for package in job.packages if package.about)
        yield from job.about
        yield f"each trial: {price_and_limit(job.tier)}"
        limit = "" if self._most_usd else "; --max_cost=USD limits them together"
        if job.tier.most_usd is not None:
            yield f"all {count} trials together: {count * job.tier.most_usd:.2f} USD at most{limit}"
        if self._dry_run:
            yield from cost_question([(job, count)], self._most_usd).lines()
        yield from (f"warning: {line}" for line in job.warnings)

    def paste(self) -> str:
        """Returns the command that would run, with its config."""
        gcloud = Gcloud(self._gcp.project, self._gcp.region)
        return gcloud.shell_command(custom_job(self._job, attempt_label(self._submission)))

    def run(self) -> "tuple[int, list[FrozenTrial]]":
        """Submits or finds the study and follows it; returns the exit code and its trials, none while it runs."""
        load()
        write_study(self._out, self._plan.summary("vertex"))
        keep_others_out(self._out, "out", str(self._out))
        with api_errors(self._gcp), on_signals(signal.default_int_handler, signal.SIGTERM):  # as Ctrl-C
            name = self._job_name()
            backend = self._open(self._gcp.project, self._gcp.region)
            status = watch_job(backend, name, self._gcp, self._session.clock, created=True)
            if status is None:
                say("run the same command again to go on watching")
                return INTERRUPTED, []
            with suppress(LookupError, UserError):  # the study does not need this folder's records
                record_status(*find_attempt(status.name), status, self._session.clock.now())
            trials = retried(lambda: backend.trials(status.name), self._session.clock)
        ended = [read_vertex_trial(trial, self._plan, result_of(f"{self._output}/{trial['id']}")) for trial in trials]
        return (INTERRUPTED if any(state_of(trial) == "killed" for trial in ended) else exit_code(status)), ended

    def _job_name(self) -> str:
        """Returns the name of the job that the study's folder records, whose duplicates it cancels, or of a new one."""
        clock, sent = self._session.clock, SentJob.read(self._out)
        status = sent.find(self._open(sent.project, sent.region), clock) if sent else None
        if sent and status:
            say(f"goes on with {status.name}")
            self._gcp, self._output = GcpConfig(sent.project, sent.region, self._gcp.bucket), sent.output
            return status.name
        gcp = self._gcp
        cost_question([(self._trial_job, self._plan.most_trials)], self._most_usd).agree()
        check_resources(self._trial_job)
        upload_packages(self._job.packages, gcp.bucket)
        SentJob(gcp.project, gcp.region, self._submission, self._output).write(self._out)
        return submit_job(self._job, Submission(self._submission), self._open, clock)


def parameter_spec(parameter: StudyParameter) -> dict[str, Any]:
    """Returns the ParameterSpec of Vertex AI for a setting. Numbers in a list are discrete, texts are categories."""
    kind, content = "categoricalValueSpec", dict[str, Any](values=list(map(as_text, parameter.values)))
    if parameter.values and parameter.kind in (int, float) and None not in parameter.values:
        kind, content = "discreteValueSpec", {"values": sorted(map(float, parameter.values))}
    elif not parameter.values:
        kind = "integerValueSpec" if parameter.kind is int else "doubleValueSpec"
        content = {"minValue": parameter.low, "maxValue": parameter.high}
    scale = {} if parameter.values else {"scaleType": f"UNIT_{'LOG' if parameter.log else 'LINEAR'}_SCALE"}
    return {"parameterId": parameter.name, kind: content, **scale}


def read_vertex_trial(content: Mapping[str, Any], plan: StudyRequest, result: Mapping[str, Any]) -> "FrozenTrial":
    """Converts a trial's JSON, of a study that has ended: a trial that has not was cancelled with it.

    `result`: its result.json; a trial that ended itself at a limit is not complete.
    """
    limit = why_stopped(result)
    sent = {str(setting["parameterId"]): setting.get("value") for setting in content.get("parameters", [])}
    settings = {
        parameter.name: _typed(parameter, sent[parameter.name]) for parameter in plan.space if parameter.name in sent
    }
    state = "RUNNING" if limit else _STATES.get(str(content.get("state")), "RUNNING")
    values = _metric(mapping(content, "finalMeasurement"), plan.metric)
    if state == "COMPLETE" and not values:
        state = "FAIL"
    reasons = {"FAIL": f"it reported no {plan.metric}", "RUNNING": "it was cancelled with the study"}
    reason = str(limit or content.get("infeasibleReason") or reasons.get(state, ""))
    began, ended = (parse_time(str(content.get(key) or "")) for key in ("startTime", "endTime"))
    seconds = max((ended or time.time()) - began, 0.0) if began else 0.0
    reports = [value for measured in content.get("measurements", []) for value in _metric(measured, plan.metric)]
    attributes = {"reason": reason, "seconds": seconds, "goodput": share_of_steps(classes_of(result))}
    return frozen_trial(int(content["id"]), state, plan.space, settings, values, reports, **attributes)


def _metric(measurement: Mapping[str, Any], metric: str) -> list[float]:
    sent = [entry.get("value") for entry in measurement.get("metrics", []) if entry.get("metricId") == metric]
    return [value for value in map(number, sent) if value is not None]


def _typed(parameter: StudyParameter, value: Any) -> Any:
    """Returns a value of the space as its setting has it: the service sends fractions for whole numbers, and rounds."""
    if parameter.kind in (int, float) and parameter.values and None not in parameter.values:
        return min(parameter.values, key=lambda choice: abs(choice - float(value)))
    if parameter.values:
        return next((choice for choice in parameter.values if as_text(choice) == str(value)), parameter.values[0])
    return parameter.kind(min(max(float(value), parameter.low), parameter.high))
