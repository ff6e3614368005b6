"""Runs a study on this machine: each trial is a job of its own processes, `parallel` of them at a time.

Trials share no process: docs/tune.md says why.
"""

import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.comparison.directory import error_of, is_done, refusal
from deploy.comparison.local_runner import check_local_data
from deploy.localrun.local_jobs import LocalJobs, in_threads
from deploy.localrun.processes import ASK_S
from deploy.localrun.workers import Share, shares
from deploy.report.collection import repeat_folder
from deploy.study.optuna_study import frozen_trial, load, open_journal, propose
from deploy.study.outcome import state_of
from deploy.study.space import of_recipe, shown
from deploy.study.study_request import JOURNAL, StudyRequest, write_study
from deploy.tiers.output import say
from trainer.base.errors import DONE, INTERRUPTED, USER_MUST_CHANGE, UserError
from trainer.base.run_files.goodput import classes_of, share_of_steps
from trainer.base.run_files.records import mapping, number, read_result, read_stats
from trainer.base.storage import is_locked, keep_others_out, make_writable

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.trial import FrozenTrial

METRIC_FILE = "tuning_metric.jsonl"  # in a job directory: what Vertex AI would read
_KILLED = 128 + signal.SIGKILL
_HOPELESS = "worse than the median of the other trials after as many reports"


class LocalStudy:
    """Runs the trials of `plan` that are not over yet. Call `run` once."""

    def __init__(self, plan: StudyRequest, out: Path) -> None:
        self._plan, self._out = plan, out
        self._jobs, self._lock = LocalJobs(), threading.Lock()

    def run(self) -> "tuple[int, list[FrozenTrial]]":
        """Runs trials until there are as many as asked; returns the exit code and all trials.

        Raises UserError if the trainer refuses what is the same for all trials, and KeyboardInterrupt after a signal.
        """
        plan, out = self._plan, self._out
        check_local_data(plan.overrides.replace(**plan.first).resolve().data)
        parts = shares(plan.parallel, plan.tier)
        load()
        make_writable(out, "out")
        keep_others_out(out, "out", str(out))
        write_study(out, plan.summary("local"))
        self._study = open_journal(out, plan.goal)
        self._to_run = self._begin()
        try:
            in_threads([partial(self._work, part) for part in parts], len(parts), self._jobs.stop)
        except UserError:
            if not self._any_report():  # it came to nothing: its command may be changed
                (out / JOURNAL).unlink()
                for folder in out.glob("trial-*"):
                    shutil.rmtree(folder)
            raise
        trials = self._trials()
        return INTERRUPTED if any(state_of(trial) == "killed" for trial in trials) else DONE, trials

    def _trials(self) -> "list[FrozenTrial]":
        return self._study.get_trials(deepcopy=False)

    def _any_report(self) -> bool:
        return any(metric_reports(job_dir, self._plan.metric) for job_dir in self._out.glob("trial-*/repeat-*"))

    def _work(self, share: Share) -> None:
        """Runs one trial after another on a share of the machine."""
        while True:
            with self._lock:
                trial = None if self._jobs.stopped else next(self._to_run, None)
            if trial is None:
                return
            folders = [repeat_folder(self._out, f"trial-{trial.number + 1:03d}", repeat)
                       for repeat in range(1, self._plan.repeats + 1)]  # fmt: skip
            self._record(trial, folders, *self._run_trial(trial, folders, share))

    def _begin(self) -> "Iterator[Trial]":
        """Yields the trials that were killed, then new ones until there are as many as asked or no other settings."""
        plan = self._plan
        for trial in [trial for trial in self._trials() if state_of(trial) == "killed"]:
            yield self._begun(trial.number, "goes on: ")
        default = of_recipe(plan.space, plan.overrides)
        while len(trials := self._trials()) < plan.most_trials:
            settings = default
            if not default or any(trial.params == default for trial in trials):
                settings = propose(plan.space, trials, plan.goal, 1_000_000 * plan.overrides.values.get("seed", 0))
            if not settings:
                return
            self._study.add_trial(frozen_trial(len(trials) + 1, "RUNNING", plan.space, settings))  # one line on disk
            yield self._begun(len(trials))

    def _begun(self, number: int, how: str = "") -> "Trial":
        """Announces a trial of the journal, and returns it as `ask` would: Optuna itself resumes none."""
        trial = self._trials()[number]
        say(f"trial {number + 1}: {how}{shown(trial.params)}")
        return load().Trial(self._study, trial._trial_id)

    def _run_trial(self, trial: "Trial", folders: list[Path], share: Share) -> tuple[str, str]:
        """Runs the repeats of a trial that are not done; returns the name of its Optuna state, and why."""
        for repeat, job_dir in enumerate(folders, start=1):
            self._wait_for_orphan(trial, job_dir)
            if is_done(job_dir):
                continue
            try:
                request = self._plan.request(trial.params, repeat)
            except UserError as error:
                return "FAIL", str(error)
            prune = self._plan.pruning and repeat == 1
            metric_file = {"CLOUD_ML_HP_METRIC_FILE": str(job_dir.absolute() / METRIC_FILE)}
            end = self._jobs.run(request, job_dir, share, metric_file, partial(self._report, trial, job_dir, prune))
            code = end.status or end.code
            if end.code == DONE:
                continue
            if end.state == "CANCELLED" and not self._jobs.stopped:
                return "PRUNED", _HOPELESS
            if code in (INTERRUPTED, _KILLED):
                return "RUNNING", "killed by SIGKILL, most often out of memory" if code == _KILLED else ""
            reason = error_of(job_dir) or f"exit code {code}: see {job_dir}.log"
            for_all = code == USER_MUST_CHANGE and (refusal(job_dir) or reason.startswith("tuning_metric="))
            if for_all and not self._any_report():
                raise UserError(f"trial {trial.number + 1}: {reason}")
            return "FAIL", reason
        return "COMPLETE", ""

    def _report(self, trial: "Trial", job_dir: Path, prune: bool) -> bool:
        """Reports the metric's new values to Optuna, up to one by which, with `prune`, the trial is hopeless."""
        reported = len(self._trials()[trial.number].intermediate_values)
        for step, value in enumerate(metric_reports(job_dir, self._plan.metric)[reported:], start=reported):
            trial.report(value, step)
            if prune and trial.should_prune():
                return True
        return False

    def _record(self, trial: "Trial", folders: list[Path], state: str, reason: str) -> None:
        """Records how a trial ended. One that was killed is left as it is, to be resumed."""
        plan = self._plan
        reports = [metric_reports(folder, plan.metric) for folder in folders if is_done(folder)]
        values = [of_run[-1] for of_run in reports if of_run]  # at the end of each run
        results = [read_result(folder)[0] for folder in folders]
        seconds = sum(number(result.get("wall_seconds")) or 0.0 for result in results)
        if state != "PRUNED":  # the value of a pruned trial is that of the report which decided
            self._report(trial, folders[0], False)
        if state == "COMPLETE" and len(values) < plan.repeats:
            state, reason = "FAIL", f"it never reported {plan.metric}"
        for name, attribute in {
            "values": values,
            "seconds": seconds,
            "goodput": share_of_steps(*map(classes_of, results)),
            "reason": reason,
        }.items():
            trial.set_user_attr(name, attribute)
        if state != "RUNNING":
            mean = statistics.fmean(values) if state == "COMPLETE" else None
            self._study.tell(trial, mean, load().trial.TrialState[state])
        frozen = self._trials()[trial.number]
        value = "" if frozen.value is None else f" {plan.metric} {frozen.value:.6g}"
        ended = f"{state_of(frozen)}{value}{reason and f': {reason}'}"
        say(f"trial {trial.number + 1}: {ended} ({seconds:.0f} s)")

    def _wait_for_orphan(self, trial: "Trial", job_dir: Path) -> None:
        """Waits for a process that outlived a killed `tune`: it ends at its next line of output, or with its run."""
        if is_locked(job_dir):
            say(f"trial {trial.number + 1}: waits for its earlier process, which still runs")
        while is_locked(job_dir) and not self._jobs.stopped:
            time.sleep(ASK_S)


def metric_reports(job_dir: Path, metric: str) -> list[float]:
    """Returns the metric's values in stats.jsonl, as the trainer reports them to hyperparameter tuning.

    That is without the means over an epoch, of which each step was reported already.
    """
    entries = [entry for entry in read_stats(job_dir)[0] if entry["kind"] != "epoch"]
    reported = [{**mapping(entry, "losses"), **mapping(entry, "metrics")}.get(metric) for entry in entries]
    return [value for value in map(number, reported) if value is not None]
