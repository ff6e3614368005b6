"""Runs a study on this machine: each trial is a job of its own processes, `parallel` of them at a time.

Trials share no process: docs/tune.md says why.
"""

import dataclasses
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.comparison.directory import error_of, is_done, refusal
from deploy.comparison.local_runner import check_local_data
from deploy.localrun.processes import LocalJob, on_signals
from deploy.localrun.workers import Share, local_workers, shares
from deploy.report.collection import repeat_folder
from deploy.study.optuna_study import frozen_trial, load, open_journal, propose
from deploy.study.outcome import state_of
from deploy.study.space import of_recipe, shown
from deploy.study.study_request import JOURNAL, StudyRequest, write_study
from deploy.tiers.job_spec import TrainingRequest
from trainer.base.errors import DONE, INTERRUPTED, USER_MUST_CHANGE, UserError
from trainer.base.run_files.records import mapping, number, read_result, read_stats
from trainer.base.storage import is_locked, keep_others_out, make_writable

if TYPE_CHECKING:
    from optuna import Trial
    from optuna.trial import FrozenTrial

METRIC_FILE = "tuning_metric.jsonl"  # in a job directory: what Vertex AI would read
_KILLED = 128 + signal.SIGKILL
_POLL_S = 0.5
_HOPELESS = "worse than the median of the other trials after as many reports"


class LocalStudy:
    """Runs the trials of `plan` that are not over yet. Call `run` once."""

    def __init__(self, plan: StudyRequest, out: Path) -> None:
        self._plan, self._out = plan, out
        self._lock = threading.Lock()
        self._jobs: list[LocalJob] = []
        self._stopped = False

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
        write_study(out, plan.asked("local"))
        self._study = open_journal(out, plan.goal)
        self._to_run = self._begin()
        try:
            self._run_on(parts)
        except UserError:
            if not self._any_report():  # it came to nothing: its command may be changed
                (out / JOURNAL).unlink()
                for folder in out.glob("trial-*"):
                    shutil.rmtree(folder)
            raise
        trials = self._trials()
        return INTERRUPTED if any(state_of(trial) == "killed" for trial in trials) else DONE, trials

    def _run_on(self, parts: list[Share]) -> None:
        """Runs trials on each part of the machine. A signal or an exception stops them all with their state saved."""
        with on_signals(signal.default_int_handler, signal.SIGTERM), ThreadPoolExecutor(len(parts)) as pool:
            try:
                futures, ended = [pool.submit(self._work, part) for part in parts], set[Future[None]]()
                while len(ended) < len(futures):  # a signal is handled between two waits
                    ended = wait(futures, 1.0, FIRST_EXCEPTION).done
                    for future in ended:
                        future.result()
            except BaseException:
                with self._lock:
                    self._stopped = True
                    for job in self._jobs:
                        job.stop()
                raise

    def _trials(self) -> "list[FrozenTrial]":
        """Returns the trials that have a folder: one whose folder was removed does not count."""
        trials = self._study.get_trials(deepcopy=False)
        return [trial for trial in trials if (self._out / trial_name(trial.number + 1)).exists()]

    def _any_report(self) -> bool:
        return any(metric_reports(job_dir, self._plan.metric) for job_dir in self._out.glob("trial-*/repeat-*"))

    def _work(self, share: Share) -> None:
        """Runs one trial after another on a share of the machine."""
        while (trial := self._next()) is not None:
            self._record(trial, *self._run_trial(trial, share))

    def _next(self) -> "Trial | None":
        with self._lock:
            return None if self._stopped else next(self._to_run, None)

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
            number = len(self._study.get_trials(deepcopy=False))
            (self._out / trial_name(number + 1)).mkdir(exist_ok=True)
            self._study.add_trial(frozen_trial(number + 1, "RUNNING", plan.space, settings))  # one line of the journal
            yield self._begun(number)

    def _begun(self, number: int, how: str = "") -> "Trial":
        """Announces a trial of the journal, and returns it as `ask` would: Optuna itself resumes none."""
        trial = self._frozen(number)
        print(f"trial {number + 1}: {how}{shown(trial.params)}", flush=True)
        return load().Trial(self._study, trial._trial_id)

    def _frozen(self, number: int) -> "FrozenTrial":
        return self._study.get_trials(deepcopy=False)[number]

    def _run_trial(self, trial: "Trial", share: Share) -> tuple[str, str]:
        """Runs the repeats of a trial that are not done; returns the name of its Optuna state, and why."""
        for repeat, job_dir in enumerate(self._folders(trial), start=1):
            self._wait_for_orphan(trial, job_dir)
            if is_done(job_dir):
                continue
            try:
                request = self._plan.request(trial.params, repeat)
            except UserError as error:
                return "FAIL", str(error)
            code, hopeless = self._run_job(trial, request, job_dir, share, prune=self._plan.pruning and repeat == 1)
            if hopeless:
                return "PRUNED", _HOPELESS
            if code in (INTERRUPTED, _KILLED):
                return "RUNNING", "killed by SIGKILL, most often out of memory" if code == _KILLED else ""
            if code != DONE:
                reason = error_of(job_dir) or f"exit code {code}: see {job_dir}.log"
                for_all = code == USER_MUST_CHANGE and (refusal(job_dir) or reason.startswith("tuning_metric="))
                if for_all and not self._any_report():
                    raise UserError(f"trial {trial.number + 1}: {reason}")
                return "FAIL", reason
        return "COMPLETE", ""

    def _run_job(
        self, trial: "Trial", request: TrainingRequest, job_dir: Path, share: Share, *, prune: bool
    ) -> tuple[int, bool]:
        """Runs one job. Returns the exit status of the worker that ended it, and whether it was to be pruned."""
        job_dir.mkdir(parents=True, exist_ok=True)
        folder = job_dir.absolute()
        job_id = f"{job_dir.parent.name}-{time.time_ns()}"  # a new id each time: this is not a restart by Vertex AI
        arguments = request.in_job_dir(str(folder)).arguments()
        metric_file = {"CLOUD_ML_HP_METRIC_FILE": str(folder / METRIC_FILE)}
        workers = [
            dataclasses.replace(worker, environment={**worker.environment, **metric_file})
            for worker in local_workers(self._plan.tier, arguments, folder, job_id, share=share)
        ]
        hopeless = False
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log, ThreadPoolExecutor(1) as pool:
            job = LocalJob(workers, job_dir, lambda worker, line: print(f"[{worker}] {line}", file=log))
            with self._lock:
                if self._stopped:
                    return INTERRUPTED, False
                self._jobs.append(job)
            running = pool.submit(job.run)
            try:
                while not (hopeless or wait([running], _POLL_S).done):
                    hopeless = prune and any(trial.should_prune() for _ in self._report(trial, job_dir))
            finally:
                job.stop()  # if it still runs
            outcome = running.result()
            print(outcome.error or outcome.state, file=log)
        return (outcome.status or outcome.code), hopeless and outcome.code != DONE

    def _report(self, trial: "Trial", job_dir: Path) -> Iterator[None]:
        """Reports the metric's new values to Optuna, and yields after each."""
        known = len(self._frozen(trial.number).intermediate_values)
        for step, value in enumerate(metric_reports(job_dir, self._plan.metric)[known:], start=known):
            trial.report(value, step)
            yield

    def _record(self, trial: "Trial", state: str, reason: str) -> None:
        """Records how a trial ended. One that was killed is left as it is, to be resumed."""
        folders, plan = self._folders(trial), self._plan
        reports = [metric_reports(folder, plan.metric) for folder in folders if is_done(folder)]
        values = [of_run[-1] for of_run in reports if of_run]  # at the end of each run
        seconds = sum(number(read_result(folder)[0].get("wall_seconds")) or 0.0 for folder in folders)
        if state != "PRUNED":  # the value of a pruned trial is that of the report which decided
            list(self._report(trial, folders[0]))
        if state == "COMPLETE" and len(values) < plan.repeats:
            state, reason = "FAIL", f"it never reported {plan.metric}"
        for name, attribute in {"values": values, "seconds": seconds, "reason": reason}.items():
            trial.set_user_attr(name, attribute)
        if state != "RUNNING":
            mean = statistics.fmean(values) if state == "COMPLETE" else None
            self._study.tell(trial, mean, load().trial.TrialState[state])
        frozen = self._frozen(trial.number)
        value = "" if frozen.value is None else f" {plan.metric} {frozen.value:.6g}"
        ended = f"{state_of(frozen)}{value}{reason and f': {reason}'}"
        print(f"trial {trial.number + 1}: {ended} ({seconds:.0f} s)", flush=True)

    def _folders(self, trial: "Trial") -> list[Path]:
        repeats = range(1, self._plan.repeats + 1)
        return [repeat_folder(self._out, trial_name(trial.number + 1), repeat) for repeat in repeats]

    def _wait_for_orphan(self, trial: "Trial", job_dir: Path) -> None:
        """Waits for a process that outlived a killed `tune`: it ends at its next line of output, or with its run."""
        if is_locked(job_dir):
            print(f"trial {trial.number + 1}: waits for its earlier process, which still runs", flush=True)
        while is_locked(job_dir) and not self._stopped:
            time.sleep(_POLL_S)


def trial_name(number: int) -> str:
    """Returns the name of a trial's folder, as the trial's number counts from 1."""
    return f"trial-{number:03d}"


def metric_reports(job_dir: Path, metric: str) -> list[float]:
    """Returns the metric's values in stats.jsonl, as the trainer reports them to hyperparameter tuning.

    That is without the means over an epoch, of which each step was reported already.
    """
    entries = [entry for entry in read_stats(job_dir)[0] if entry["kind"] != "epoch"]
    reported = [{**mapping(entry, "losses"), **mapping(entry, "metrics")}.get(metric) for entry in entries]
    return [value for value in map(number, reported) if value is not None]
