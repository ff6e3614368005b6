"""One comparison: what was asked for, where it may run, and its runs, made until all are done."""

import dataclasses
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from deploy.cli.arguments import check_tiers
from deploy.comparison.directory import any_begun, check_folder, error_of, is_done, refusal, write_comparison
from deploy.localrun.processes import on_signals
from deploy.report.collection import repeat_folder
from deploy.spec.job_spec import training
from deploy.spec.tier import Tier, TierFacts, load_tier
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.storage import keep_others_out, make_writable


class Runner(Protocol):
    """Where the runs of a comparison take place. Every output of a run goes beside its job directory, JOB_DIR.log."""

    name: str  # as in --on

    def check(self, tier: TierFacts, flags: Sequence[str]) -> None:
        """UserError where `tier` cannot run here with `flags` of the trainer."""

    def costs(self, runs: Sequence[tuple[TierFacts, Sequence[str], int]]) -> Iterator[str]:
        """What so many runs of each tier, with flags of the trainer, may cost: lines for people."""

    def preflight(self, tiers: Mapping[TierFacts, Sequence[str]]) -> None:
        """Ends the verb, in one line, where no run of `tiers`, with these flags of the trainer, could go well."""

    def run(self, tier: TierFacts, flags: Sequence[str], job_dir: Path) -> int:
        """Trains with `flags` of the trainer until the run ends, and returns its exit code. Called in any thread."""

    def stop(self) -> None:
        """Makes every `run` return soon, so that the same command can go on with what was begun."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a comparison was asked for."""

    tiers: tuple[TierFacts, ...]
    flags: tuple[str, ...]  # of the trainer
    scaling: str = "strong"
    repeats: int = 1
    command: str = ""  # what the user typed

    def flags_of(self, tier: TierFacts, config: TrainConfig) -> list[str]:
        """The trainer's flags on `tier`. `config`: what `flags` resolve to, whose batch is that of the first tier."""
        if self.scaling == "strong":
            return list(self.flags)
        rows = config.rows_per_replica(self.tiers[0].devices)
        given = [flag for flag in self.flags if not flag.startswith("--global_batch_size=")]
        return [*given, f"--global_batch_size={rows * tier.devices}"]

    def asked(self, on: str, parallel: int) -> dict[str, Any]:
        """What the folder keeps of it: comparison.json."""
        return {"on": on, "parallel": parallel, **dataclasses.asdict(self)}

    def runs(self) -> list[tuple[TierFacts, int]]:
        """Every (tier, repeat), in alternating order: every second round goes backwards, so that drift favours none."""
        rounds = [self.tiers if repeat % 2 else self.tiers[::-1] for repeat in range(1, self.repeats + 1)]
        return [(tier, repeat) for repeat, tiers in enumerate(rounds, start=1) for tier in tiers]


def read_tiers(names: Sequence[str], price_file: str, usd_by_tier: Mapping[str, float]) -> list[Tier]:
    """The tiers of these files or bare names, each once, with the prices of `price_file`.

    Those of `usd_by_tier`, an hour of all machines, win over them; UserError where one is of no tier here.
    """
    tiers = [load_tier(name, price_file) for name in names]
    twice = [name for name, count in Counter(tier.name for tier in tiers).items() if count > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice: tiers are named after their files")
    check_tiers(usd_by_tier, [tier.name for tier in tiers], "price_per_hour")
    return [dataclasses.replace(tier, given_price=usd_by_tier.get(tier.name)) for tier in tiers]


def compare(plan: Plan, out: Path, runner: Runner, parallel: int = 1) -> int:
    """Runs what is not done yet, `parallel` at a time, and returns the exit code of the whole.

    A run that fails keeps none of the others from running, unless it is the first and the trainer refuses what is the
    same for all. UserError then, and where the folder holds another comparison.
    """
    flags = announced(plan, out, runner)
    make_writable(out, "out")
    runner.preflight({tier: flags[tier.name] for tier in left(plan, out)})
    keep_others_out(out, "out", str(out))
    refused: list[str] = []
    with on_signals(signal.default_int_handler, signal.SIGTERM), ThreadPoolExecutor(parallel) as pool:  # as Ctrl-C
        write_comparison(out, plan.asked(runner.name, parallel))
        try:
            futures = [pool.submit(_run, t, repeat, flags[t.name], out, runner, refused) for t, repeat in plan.runs()]
            while wait(futures, timeout=1.0).not_done:
                pass  # a signal that comes just before a wait is heard after it
            codes = {future.result() for future in futures}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            raise
    if refused:
        raise UserError(refused[0])
    return next((code for code in (INTERRUPTED, FAULT, USER_MUST_CHANGE) if code in codes), DONE)


def announced(plan: Plan, out: Path, runner: Runner) -> dict[str, list[str]]:
    """The trainer's flags by tier, checked; says what is trained, and what the runs may cost that are not done yet."""
    flags = {tier.name: checked_flags(plan, tier, runner) for tier in plan.tiers}
    check_folder(out, plan.asked(runner.name, 1))
    weak = f"; weak scaling: that is the batch of {plan.tiers[0].name}, the others have as many rows a replica"
    print(f"{training(resolve(plan.flags).config)}{weak if plan.scaling == 'weak' else ''}", flush=True)
    for line in runner.costs([(tier, flags[tier.name], count) for tier, count in left(plan, out).items()]):
        print(line, flush=True)
    return flags


def left(plan: Plan, out: Path) -> Counter[TierFacts]:
    """How many runs of each tier are not done yet."""
    return Counter(tier for tier, repeat in plan.runs() if not is_done(repeat_folder(out, tier.name, repeat)))


def checked_flags(plan: Plan, tier: TierFacts, runner: Runner) -> list[str]:
    """The trainer's flags on `tier`; UserError for whatever can be known to fail there."""
    for name in ("job_dir", "replicas"):
        if any(flag.partition("=")[0] == f"--{name}" for flag in plan.flags):
            better = "--out names the folder" if name == "job_dir" else "the tiers say how many devices there are"
            raise UserError(f"--{name} is not for a comparison: {better}: leave it out")
    flags = plan.flags_of(tier, resolve(plan.flags).config)
    try:
        resolve(flags).config.rows_per_replica(tier.devices)
    except UserError as error:
        raise UserError(f"{tier.name}: {error}") from None
    runner.check(tier, flags)
    return flags


def _run(tier: TierFacts, repeat: int, flags: Sequence[str], out: Path, runner: Runner, refused: list[str]) -> int:
    """One run, unless it is done; what came of it is said in a line, or is why it and all others are `refused`."""
    job_dir, name = repeat_folder(out, tier.name, repeat), f"{tier.name}, repeat {repeat}"
    if refused:
        return USER_MUST_CHANGE
    if is_done(job_dir):
        print(f"{name}: done before", flush=True)
        return DONE
    print(f"{name}: runs; its output is in {job_dir}.log", flush=True)
    job_dir.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    code, ended = _outcome(runner, tier, flags, job_dir)
    said = refusal(job_dir) if code == USER_MUST_CHANGE and not any_begun(out) else ""
    if said:
        refused.append(said)
        return code
    print(f"{name}: {ended}{_NEXT.get(code, '')} ({time.monotonic() - began:.1f} s)", flush=True)
    return code


_NEXT = {
    USER_MUST_CHANGE: "; mend that, then give the command again",
    FAULT: "; the same command again goes on with it",
    INTERRUPTED: "; the same command again goes on with it",
}


def _outcome(runner: Runner, tier: TierFacts, flags: Sequence[str], job_dir: Path) -> tuple[int, str]:
    """The exit code of a run, and in words how it ended; where it cannot be started or watched the others go on."""
    try:
        code = runner.run(tier, flags, job_dir)
    except (UserError, PlatformFault) as error:
        return error.exit_code, str(error)
    except Exception as error:
        return FAULT, f"{type(error).__name__}: {error}"
    if code == DONE:
        return DONE, "done"
    said = error_of(job_dir)
    why = f"exit code {code}" + (f": {said}" if said else "")
    return code if code in (USER_MUST_CHANGE, INTERRUPTED) else FAULT, why
