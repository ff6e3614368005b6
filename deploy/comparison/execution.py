"""Runs a comparison: what was requested, with the settings for each tier, and its runs until all
are done."""

import contextvars
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deploy.base.console import say
from deploy.comparison.directory import (
    any_begun,
    check_folder,
    error_of,
    is_done,
    refusal,
    write_comparison,
)
from deploy.comparison.runners import LocalRunner, VertexRunner
from deploy.job.workload import Program, Training, Workload, workload_on
from deploy.platform.local import on_signals
from deploy.report.collection import repeat_folder
from deploy.tiers.tier import Tier
from trainer.base.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.base.storage import lock_folder, make_writable

Runner = LocalRunner | VertexRunner  # writes the output of a run to JOB_DIR.log


@dataclass(frozen=True)
class ComparisonRequest:
    """Holds what is to be compared: tiers, what runs on each, and how often.

    `command` is what the user typed.
    """

    tiers: Sequence[Tier]
    program: Program
    scaling: str = "strong"
    repeats: int = 1
    command: str = ""

    def summary(self, on: str, parallel: int) -> dict[str, Any]:
        """Returns the content of comparison.json."""
        return {
            "on": on,
            "parallel": parallel,
            "tiers": [asdict(tier.facts) for tier in self.tiers],
            "flags": self.program.arguments(),
            "scaling": self.scaling,
            "repeats": self.repeats,
            "command": self.command,
            "strategies": {tier.name: tier.strategy for tier in self.tiers},
        }

    def runs(self) -> list[tuple[str, int]]:
        """Returns every (tier's name, repeat), in an order in which drift favours no tier."""
        names = [tier.name for tier in self.tiers]
        runs = []
        for repeat in range(1, self.repeats + 1):
            runs += [(name, repeat) for name in names[:: 1 if repeat % 2 else -1]]
        return runs

    def resolve(self) -> dict[str, Workload]:
        """Returns what runs on each tier, by the tier's name.

        Raises UserError for settings that a comparison cannot have.
        """
        if "job_dir" in self.program.values:
            raise UserError(
                "--job_dir is not for a comparison: --out names the folder: leave it out"
            )
        if "replicas" in self.program.values:
            raise UserError(
                "--replicas is not for a comparison: the tiers set the number of devices: leave"
                " it out"
            )
        # Under weak scaling each replica gets as many rows as on the first tier.
        first = workload_on(self.tiers[0], self.program)
        runs = [first]
        rows_per_replica = 0
        if isinstance(first, Training):
            rows_per_replica = first.config.rows_per_replica(first.tier.devices)
        for tier in self.tiers[1:]:
            program = self.program
            if self.scaling == "weak":
                program = program.replace(global_batch_size=rows_per_replica * tier.devices)
            runs.append(workload_on(tier, program))
        return {run.tier.name: run for run in runs}


def run_comparison(
    request: ComparisonRequest,
    runs: Mapping[str, Workload],
    out: Path,
    runner: Runner,
    parallel: int = 1,
) -> int:
    """Runs what is not done yet, `parallel` at a time, and returns the exit code of the whole.

    A failed run does not stop the others, unless it is the first and the trainer refuses settings
    that all runs share. Raises UserError then, and if the folder holds another comparison.
    """
    missing = announce(request, runs, out, runner)
    make_writable(out, "out")
    runner.preflight(missing)
    lock_folder(out, "out", str(out))
    refused: list[str] = []
    write_comparison(out, request.summary(runner.name, parallel))
    calls = []
    for name, repeat in request.runs():
        calls.append(partial(_run, runs[name], repeat, out, runner, refused))
    # A signal, which counts as Ctrl-C, or an exception in a run stops all runs and is raised again.
    with (
        on_signals(signal.default_int_handler, signal.SIGTERM),
        ThreadPoolExecutor(parallel) as pool,
    ):
        try:
            futures = [pool.submit(contextvars.copy_context().run, call) for call in calls]
            # a signal is handled between two waits
            while (waited := wait(futures, 1.0, FIRST_EXCEPTION)).not_done:
                for future in waited.done:
                    future.result()
            codes = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stopped.set()
            raise
    if refused:
        raise UserError(refused[0])
    return next((code for code in (INTERRUPTED, FAULT, USER_MUST_CHANGE) if code in codes), DONE)


def announce(
    request: ComparisonRequest, runs: Mapping[str, Workload], out: Path, runner: Runner
) -> list[tuple[Workload, Path]]:
    """Prints what is trained and what the missing runs may cost; returns the missing runs with
    their folders.

    Raises UserError, before it prints anything, if the folder holds another comparison or a job
    would be refused.
    """
    check_folder(out, request.summary(runner.name, 1))
    first = request.tiers[0].name
    weak = f"; weak scaling: that is the batch of {first}, the others have as many rows a replica"
    folders = [(runs[name], repeat_folder(out, name, repeat)) for name, repeat in request.runs()]
    missing = [(run, job_dir) for run, job_dir in folders if not is_done(job_dir)]
    counts = Counter(run.tier.name for run, _ in missing)
    costs = [*runner.costs([(runs[name], count) for name, count in counts.items()])]
    say(f"{runs[first].about}{weak if request.scaling == 'weak' else ''}", *costs)
    return missing


def _run(run: Workload, repeat: int, out: Path, runner: Runner, refused: list[str]) -> int:
    """Runs one repeat, unless it is done, prints how it ended, and returns its exit code.

    If the trainer refuses the first run, adds the reason to `refused` instead, so that no other run
    starts.
    """
    job_dir = repeat_folder(out, run.tier.name, repeat)
    name = f"{run.tier.name}, repeat {repeat}"
    if refused:
        return USER_MUST_CHANGE
    if is_done(job_dir):
        say(f"{name}: done before")
        return DONE
    say(f"{name}: runs; its output is in {job_dir}.log")
    job_dir.parent.mkdir(parents=True, exist_ok=True)
    # Its exit code, and how it ended in words.
    began = time.monotonic()
    try:
        code = runner.run(run, job_dir)
        ended = "done"
        if code:
            ended = ": ".join(filter(None, [f"exit code {code}", error_of(job_dir)]))
    except (UserError, PlatformFault) as error:
        code = error.exit_code
        ended = str(error)
    except Exception as error:  # a run that cannot be started or watched does not stop the others
        code = FAULT
        ended = f"{type(error).__name__}: {error}"
    code = code if code in (DONE, USER_MUST_CHANGE, INTERRUPTED) else FAULT
    if code == USER_MUST_CHANGE and not any_begun(out) and (reason := refusal(job_dir)):
        refused.append(reason)
        return code
    advice = "; run the same command again" if code else ""
    if code == USER_MUST_CHANGE:
        advice = "; fix that, then run the command again"
    say(f"{name}: {ended}{advice} ({time.monotonic() - began:.1f} s)")
    return code
