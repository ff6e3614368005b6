"""Trains one recipe on several tiers, the same work on each, and reports what came out.

The state of a comparison is its folder: comparison.json says what was asked, TIER/repeat-N is the job directory of each
run, or the copy of what a report reads of it. The same command again repeats nothing that is done; what failed or was
interrupted goes on where it stood. On Vertex AI an interrupted comparison leaves its jobs running, to be found again.
"""

import dataclasses
import signal
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from deploy.arguments import check_tiers, command_line, parse, parser
from deploy.backends.local import on_signals
from deploy.checks import sent_to_the_cloud
from deploy.desk import DESK, Desk, add_backend
from deploy.folder import any_begun, check_folder, error_of, is_done, refusal, remember
from deploy.job_flags import add_sending_flags
from deploy.jobspec import training
from deploy.rehearse import LocalRunner
from deploy.report import add_table_flags, read_prices, write_report
from deploy.runs import repeat_folder
from deploy.tier import Tier, TierFacts, load_tier
from deploy.vertex import VertexRunner
from trainer.config import TrainConfig
from trainer.errors import DONE, FAULT, INTERRUPTED, USER_MUST_CHANGE, PlatformFault, UserError
from trainer.flags import Parser, whole
from trainer.recipe import resolve
from trainer.storage import keep_others_out, local_path, make_writable

SCALINGS = ("strong", "weak")


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


def main(arguments: Sequence[str], desk: Desk = DESK) -> int:
    """`python -m deploy compare TIER … --recipe=… [flags of its own and of the trainer]`"""
    found, flags = parse(_flags(), arguments)
    usd_by_tier = read_prices(found.price_per_hour)
    specs = read_tiers(found.tiers, found.prices, usd_by_tier)
    with sent_to_the_cloud() if found.on == "vertex" else nullcontext():
        resolve(flags)  # mistakes of the command itself are told before what depends on the account
    asked = command_line("compare", arguments)
    plan = Plan(tuple(tier.facts for tier in specs), tuple(flags), found.scaling, found.repeats, asked)
    if found.baseline and found.baseline not in (tier.name for tier in specs):
        raise UserError(f"baseline={found.baseline}: it must be one of {', '.join(tier.name for tier in specs)}")
    out, at_once = local_path(found.out, "out"), found.parallel or (1 if found.on == "local" else len(plan.runs()))
    runner = _runner(specs, found, desk)
    if found.dry_run:
        announced(plan, out, runner)
        if not _left(plan, out):
            print(f"nothing to send: all runs in {out} are done")
        return DONE
    try:
        code = compare(plan, out, runner, at_once)
    except KeyboardInterrupt:
        print("stopped: the same command again goes on", file=sys.stderr)
        return INTERRUPTED
    if any_begun(out):
        write_report([found.out], found.out, found.baseline, usd_by_tier)
    return code


def _flags() -> Parser:
    own = parser("compare", __doc__ or "", "TIER … --recipe=NAME [--scaling=weak] [--repeats=3] [any trainer flag]")
    own.add_argument("tiers", nargs="+", metavar="TIER", help="bare names of job_configs/, as l4x4, or files of yours")
    own.add_argument(
        "--out", default="runs/comparison", metavar="FOLDER", help="folder of the comparison (default: %(default)s)"
    )
    own.add_argument("--scaling", choices=SCALINGS, default="strong", help="strong: the same global batch on every "
                     "tier (default); weak: the same batch per replica")  # fmt: skip
    own.add_argument("--repeats", type=whole(1, 100), default=1, metavar="COUNT", help="runs of each tier (default: 1)")
    own.add_argument(
        "--parallel", type=whole(1, 100), metavar="COUNT", help="runs at a time (default: 1; on Vertex AI all at once)"
    )
    own.add_argument("--on", choices=("local", "vertex"), default="local", help="processes of this machine (default), "
                     "or jobs of Vertex AI, without restarts; the flags of `submit` say where")  # fmt: skip
    own.add_argument("--dry_run", action="store_true", help="say what the jobs may cost at most, and send nothing")
    add_sending_flags(own)
    add_backend(own)
    own.set_defaults(name="", disable_retries=True, backend="")
    add_table_flags(own)
    return own


def _runner(tiers: Sequence[Tier], found: Namespace, desk: Desk) -> Runner:
    if found.on == "vertex":
        return VertexRunner(tiers, found, desk)
    for name in ("project", "region", "bucket", "package", "image", "max_cost", "backend", "dry_run"):
        if getattr(found, name):
            raise UserError(f"--{name} is for jobs of Vertex AI: add --on=vertex, or leave it out")
    return LocalRunner(tiers)


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
    runner.preflight({tier: flags[tier.name] for tier in _left(plan, out)})
    keep_others_out(out, "out", str(out))
    refused: list[str] = []
    with on_signals(signal.default_int_handler, signal.SIGTERM), ThreadPoolExecutor(parallel) as pool:  # as Ctrl-C
        remember(out, plan.asked(runner.name, parallel))
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
    for line in runner.costs([(tier, flags[tier.name], count) for tier, count in _left(plan, out).items()]):
        print(line, flush=True)
    return flags


def _left(plan: Plan, out: Path) -> Counter[TierFacts]:
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
