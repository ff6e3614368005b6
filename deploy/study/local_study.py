"""Runs a study on this machine: each trial is a job of its own processes, `parallel` of them at a time.

A trial does not share a process with another. TensorFlow fixes its devices and threads once per process, keeps the
memory that it took, and Keras and a user's modules have state of their own; a crash would end all, and a signal, which
ends a hopeless trial with its state saved, is for a whole process. The price is TensorFlow's start for each trial.
"""

import dataclasses
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from deploy.comparison.directory import error_of, is_begun, is_done, refusal
from deploy.comparison.local_runner import check_local_data
from deploy.localrun.processes import LocalJob, on_signals
from deploy.localrun.workers import Share, local_workers, shares
from deploy.study import engine
from deploy.study.space import Settings, of_recipe, shown
from deploy.study.study_plan import StudyPlan, check_study_folder, write_study
from deploy.study.trials import Trial, job_dirs, read_trials, trial_name, write_trial
from trainer.errors import DONE, INTERRUPTED, USER_MUST_CHANGE, UserError
from trainer.storage import is_locked, keep_others_out
from trainer.storage.run_layout import RESULT

METRIC_FILE = "tuning_metric.jsonl"  # in a job directory: what Vertex AI would read
_KILLED = 128 + signal.SIGKILL
_POLL_S = 0.5


class LocalStudy:
    """Runs the trials of `plan` that are not over yet. Call `run` once."""

    def __init__(self, plan: StudyPlan, out: Path) -> None:
        self._plan, self._out = plan, out
        self._lock = threading.Lock()
        self._running: dict[int, LocalJob | None] = {}
        self._resumed: queue.SimpleQueue[Trial] = queue.SimpleQueue()
        self._stopped = False
        self._refusal = ""

    def run(self) -> int:
        """Runs trials until there are as many as asked, and returns the exit code.

        Raises UserError if the trainer refuses what is the same for all trials, and KeyboardInterrupt after a signal.
        """
        plan, out = self._plan, self._out
        engine.load()
        check_local_data(plan.overrides.replace(**plan.first).resolve().data)
        parts = shares(plan.parallel, plan.tier)
        check_study_folder(out, plan.asked("local"))
        write_study(out, plan.asked("local"))
        keep_others_out(out, "out", str(out))
        for trial in self._trials():
            if trial.state == "killed":
                self._resumed.put(trial)
        with on_signals(signal.default_int_handler, signal.SIGTERM), ThreadPoolExecutor(plan.parallel) as pool:
            try:
                futures = [pool.submit(self._work, part) for part in parts]
                while wait(futures, timeout=1.0).not_done:
                    pass  # a signal that arrives just before a wait is handled after it
                for future in futures:
                    future.result()
            except BaseException:
                self._stop()
                raise
        if self._refusal:
            self._forget_trials()
            raise UserError(self._refusal)
        return INTERRUPTED if any(trial.state == "killed" for trial in self._trials()) else DONE

    def _trials(self) -> list[Trial]:
        return read_trials(self._out, self._plan.metric, self._plan.repeats, self._running)

    def _stop(self) -> None:
        """Makes every trial save its state and end; starts no other."""
        with self._lock:
            self._stopped = True
            for job in self._running.values():
                if job:
                    job.stop()

    def _work(self, share: Share) -> None:
        """Runs one trial after another on a share of the machine."""
        while (found := self._next()) is not None:
            number, settings = found
            try:
                ended, reason = self._run_trial(number, settings, share)
            except BaseException:
                self._stop()
                raise
            if ended or reason:
                write_trial(self._out, number, settings, ended, reason)
            with self._lock:
                del self._running[number]
            if not self._refusal:
                self._print_end(number)

    def _next(self) -> tuple[int, Settings] | None:
        """Returns number and settings of the trial to run; a new one is recorded before it starts."""
        plan = self._plan
        with self._lock:
            while not self._stopped:
                if not self._resumed.empty():
                    trial = self._resumed.get()
                    self._running[trial.number] = None
                    print(f"trial {trial.number}: goes on: {shown(trial.settings)}", flush=True)
                    return trial.number, dict(trial.settings)
                trials = self._trials()
                settings = self._propose(trials) if len(trials) < plan.most_trials else None
                if settings is None:
                    return None
                number = max((trial.number for trial in trials), default=0) + 1
                try:
                    plan.request(settings)
                except UserError as error:
                    write_trial(self._out, number, settings, "failed", str(error))
                    print(f"trial {number}: failed: {error}", flush=True)
                    continue
                write_trial(self._out, number, settings)
                self._running[number] = None
                print(f"trial {number}: {shown(settings)}", flush=True)
                return number, settings
        return None

    def _propose(self, trials: list[Trial]) -> Settings | None:
        """Returns new settings: first those of the recipe, if they are in the space."""
        plan = self._plan
        default = of_recipe(plan.space, plan.overrides)
        if default is not None and not any(trial.settings == default for trial in trials):
            return default
        seed = plan.overrides.values.get("seed", 0)
        return engine.propose(plan.space, trials, plan.goal, 1_000_000 * seed)

    def _run_trial(self, number: int, settings: Settings, share: Share) -> tuple[str, str]:
        """Runs the repeats of a trial that are not done; returns how it ended, as `write_trial` takes it."""
        for repeat, job_dir in enumerate(job_dirs(self._out, number, self._plan.repeats), start=1):
            if is_done(job_dir):
                continue
            code, hopeless = self._run(number, settings, repeat, job_dir, share)
            if hopeless:
                return "pruned", "worse than the median of the other trials after as many reports"
            if code in (INTERRUPTED, _KILLED):
                return "", "" if code == INTERRUPTED else "killed by SIGKILL, most often out of memory"
            if code != DONE:
                reason = error_of(job_dir) or f"exit code {code}: see {job_dir}.log"
                if code == USER_MUST_CHANGE and self._same_for_all(job_dir, reason):
                    self._refusal = self._refusal or f"trial {number}: {reason}"
                    self._stop()
                    return "", ""
                return "failed", reason
        return "", ""

    def _same_for_all(self, job_dir: Path, reason: str) -> bool:
        """Returns whether a trial was refused for what all trials have in common, when none has come further."""
        common = refusal(job_dir) or reason.startswith("tuning_metric=")
        return bool(common) and not any(trial.reports for trial in self._trials())

    def _forget_trials(self) -> None:
        """Removes the folders of a study that came to nothing, so that its command may be changed."""
        for trial in self._trials():
            if not trial.reports:
                shutil.rmtree(self._out / trial_name(trial.number))

    def _run(self, number: int, settings: Settings, repeat: int, job_dir: Path, share: Share) -> tuple[int, bool]:
        """Runs one job. Returns the exit status of the worker that ended it, and whether the job was pruned."""
        plan = self._plan
        self._wait_for_orphan(number, job_dir)
        if is_done(job_dir):
            return DONE, False
        if not is_begun(job_dir):
            (job_dir / RESULT).unlink(missing_ok=True)  # a failed start is not part of the run's time
        job_dir.mkdir(parents=True, exist_ok=True)
        request = plan.request(settings, repeat).in_job_dir(str(job_dir.absolute()))
        job_id = f"{trial_name(number)}-{time.time_ns()}"  # a new id each time: this is not a restart by Vertex AI
        metric_file = {"CLOUD_ML_HP_METRIC_FILE": str(job_dir.absolute() / METRIC_FILE)}
        found = local_workers(plan.tier, request.overrides.arguments(), job_dir.absolute(), job_id, share=share)
        workers = [dataclasses.replace(one, environment={**one.environment, **metric_file}) for one in found]
        with open(f"{job_dir}.log", "a", encoding="utf-8", buffering=1) as log:
            job = LocalJob(workers, job_dir, lambda worker, line: print(f"[{worker}] {line}", file=log))
            with self._lock:
                if self._stopped:
                    return INTERRUPTED, False
                self._running[number] = job
            with self._pruning(number, job, active=plan.pruning and repeat == 1) as hopeless:
                outcome = job.run()
            print(outcome.error or outcome.state, file=log)
        return (outcome.status or outcome.code), hopeless.is_set() and outcome.code != DONE

    @contextmanager
    def _pruning(self, number: int, job: LocalJob, *, active: bool) -> Iterator[threading.Event]:
        """Stops the job, and sets the event, once its reports are hopeless."""
        hopeless, over = threading.Event(), threading.Event()

        def watch() -> None:
            reports = 0
            while not over.wait(_POLL_S):
                trials = {trial.number: trial for trial in self._trials()}
                trial = trials[number]
                if len(trial.reports) > reports and engine.is_hopeless(trial, [*trials.values()], self._plan.goal):
                    hopeless.set()
                    job.stop()
                    return
                reports = len(trial.reports)

        watcher = threading.Thread(target=watch, daemon=True)
        if active:
            watcher.start()
        try:
            yield hopeless
        finally:
            over.set()
            if active:
                watcher.join()

    def _wait_for_orphan(self, number: int, job_dir: Path) -> None:
        """Waits for a process that outlived a killed `tune`: it ends at its next line of output, or with its run."""
        said = False
        while is_locked(job_dir) and not self._stopped:
            if not said:
                print(f"trial {number}: waits for its earlier process, which still runs", flush=True)
            said = True
            time.sleep(_POLL_S)

    def _print_end(self, number: int) -> None:
        trial = next(trial for trial in self._trials() if trial.number == number)
        value = "" if trial.value is None else f" {self._plan.metric} {trial.value:.6g}"
        reason = f": {trial.reason}" if trial.reason else ""
        print(f"trial {number}: {trial.state}{value}{reason} ({trial.seconds:.0f} s)", flush=True)
