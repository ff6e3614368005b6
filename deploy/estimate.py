"""Estimates from a short run the hours and money of the full job on each tier, and says all that was assumed.

What cannot be known from the short run is an interval, never one number: on N times the devices a step takes between
1/N of its time (ideal) and all of it (no gain at all). Two measured tiers of one machine with the same accelerator
narrow that for larger ones: a step on N devices takes a / N + b (docs/scaling.md). A tier that was itself in the short
run has its own times.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.arguments import add_flags, parse, parser
from deploy.compare import Plan, compare, read_tiers
from deploy.measure import Row, measure
from deploy.rehearse import LocalRunner
from deploy.report import numbers_by_tier, read_prices
from deploy.runs import ESTIMATE, Collection, Run, collect
from deploy.table import counted_devices, figures, money
from deploy.tier import Tier, TierFacts
from deploy.timing import timed
from trainer.config import MAY_CHANGE, TrainConfig, resolve
from trainer.errors import DONE, UserError
from trainer.flags import Parser, whole
from trainer.storage import local_path, make_writable, write_whole


@dataclass(frozen=True)
class Interval:
    """A number between two bounds; the middle is no promise."""

    low: float
    middle: float
    high: float

    def times(self, factor: float) -> "Interval":
        """All three numbers, multiplied."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)


@dataclass(frozen=True)
class Estimate:
    """The full job on one tier: seconds from start to end, USD; None with the reason why."""

    tier: str
    seconds: Interval | None
    usd: Interval | None
    reason: str = ""


def main(arguments: Sequence[str]) -> int:
    """`python -m deploy estimate TIER … --recipe=… [--from=DIR] [flags of its own and of the trainer]`"""
    found, flags = parse(_flags(), arguments)
    specs = read_tiers(found.tiers, found.prices, read_prices(found.price_per_hour))
    tiers = [tier.facts for tier in specs]
    config = resolve(flags).config
    out = local_path(found.out, "out")
    source = getattr(found, "from") or str(_short_run(specs[0], flags, out / "short-run", found.short_steps))
    speeds = numbers_by_tier("relative_speed", found.relative_speed)
    estimates, assumptions = estimate(collect([source]), tiers, config, speeds)
    make_writable(out, "out")
    content = {"from": source, "tiers": {each.tier: asdict(each) for each in estimates}, "assumptions": assumptions}
    write_whole(out / ESTIMATE, json.dumps(content, indent=2) + "\n")
    print("\n".join([*(_line(each) for each in estimates), "", "Assumed:", *(f"- {line}" for line in assumptions)]))
    return DONE


def _flags() -> Parser:
    own = parser("estimate", __doc__ or "", "TIER … --recipe=NAME [--from=DIR] [any trainer flag]")
    own.add_argument("tiers", nargs="+", metavar="TIER", help="bare names of job_configs/, as l4x4, or files of yours")
    own.add_argument("--from", default="", metavar="DIR", help="job directory of a short run, or a comparison of some, "
                     "local or gs:// (default: a short run of the first tier is made on this machine)")  # fmt: skip
    own.add_argument(
        "--short_steps", type=whole(20, 10**6), default=100, metavar="STEPS", help="length of that run (default: 100)"
    )
    own.add_argument("--out", default="runs/comparison", metavar="FOLDER", help="where estimate.json is kept; "
                     "`compare` with the same folder says how far off it was (default: %(default)s)")  # fmt: skip
    own.add_argument("--relative_speed", action="append", default=[], metavar="TIER=FACTOR",
                     help="how many times as fast one device of a tier is as one of the short run")  # fmt: skip
    add_flags(own, "prices", "price_per_hour")
    return own


def _short_run(tier: Tier, flags: Sequence[str], out: Path, steps: int) -> Path:
    """Trains `steps` steps on this machine and returns the folder of the one-tier comparison."""
    left_out = ("--steps=", "--epochs=", "--report_every_steps=")
    shortened = [flag for flag in flags if not flag.startswith(left_out)]
    plan = Plan((tier.facts,), (*shortened, f"--steps={steps}", f"--report_every_steps={steps // 10}"))
    code = compare(plan, out, LocalRunner([tier]))
    if code != DONE:
        raise UserError(f"the short run ended with exit code {code}: see the log in {out / tier.name}")
    return out


def estimate(
    measured: Collection, tiers: Sequence[TierFacts], config: TrainConfig, speeds: Mapping[str, float]
) -> tuple[list[Estimate], list[str]]:
    """An estimate a tier, and what was assumed. UserError where the short run is of another training.

    `speeds`: by tier, how many times as fast one of its devices is as one of the short run, where that was given.
    """
    rows = {row.tier: row for row in measure(measured)}
    runs = {tier.name: _first(tier.runs) for tier in measured.tiers if rows[tier.name].step_seconds}
    if not runs:
        raise UserError("the short run has no step times: let it take at least two reports")
    reference = next(iter(runs))
    for run in runs.values():
        _same_training(run, config)
    assumptions = [
        f"the short run is {runs[reference].folder}: {rows[reference].steps} steps on "
        f"{counted_devices(rows[reference].devices)} ({rows[reference].simulated or rows[reference].kind})",
        "the time to get machines and to start a container is not included",
        "saving and evaluation take at least what they took in the short run, at most as many times that as the job is "
        "longer",
    ]
    found = []
    for tier in tiers:
        given, alike = speeds.get(tier.name), [each for each in runs if _is_of(tier, rows[each])]
        base = alike[0] if alike and given is None else reference
        name = tier.name if tier.name in runs else base
        beyond = _beyond(tier, [rows[each] for each in runs]) if name != tier.name and given is None else None
        if beyond:
            name, factor, reason = beyond
        else:
            factor, reason = _factor(tier, rows[name], given)
        assumptions.append(f"{tier.name}: {reason}")
        if factor and given is None and rows[name].kind in _UNNAMED:
            kind = tier.accelerator_type or tier.machine_type
            assumptions.append(f"{tier.name}: the {rows[name].kind} of the short run is taken for {kind}")
        seconds = _seconds(runs[name], rows[name], config, factor) if factor else None
        usd = seconds.times(tier.price_per_hour / 3600) if seconds and tier.price_per_hour is not None else None
        unpriced = f"no price: give --price_per_hour={tier.name}=USD" if seconds and not usd else ""
        found.append(Estimate(tier.name, seconds, usd, unpriced if factor else reason))
    return found, assumptions


def _first(runs: Iterable[Run]) -> Run:
    """Of the runs that were timed the first that is done, whose times the row has; where none is, the first."""
    return min((run for run in runs if timed(run)), key=lambda run: run.state != "done")


def _same_training(run: Run, config: TrainConfig) -> None:
    differing = [key for key, value in asdict(config).items() if key not in MAY_CHANGE and key in run.config
                 and run.config[key] != value]  # fmt: skip
    if differing:
        key = differing[0]
        raise UserError(
            f"{run.folder} is another training ({key}: {run.config[key]!r} there, {getattr(config, key)!r} here): "
            "give the flags of the full job, only steps or epochs may differ"
        )


_UNNAMED = ("CPU", "GPU")  # all that is known of some devices


def _is_of(tier: TierFacts, row: Row) -> bool:
    """Whether the row was taken on real devices of the tier's kind; of a GPU the tier's own name may say so."""
    if row.simulated:
        return False
    if not tier.accelerators:
        return row.kind in ("CPU", tier.machine_type)
    return row.kind == tier.accelerator_type or (row.kind, row.tier) == ("GPU", tier.name)


def _beyond(tier: TierFacts, rows: Iterable[Row]) -> tuple[str, Interval | None, str] | None:
    """For more devices of one machine than two measured tiers have: the larger of them, its factor, and in words why.

    The step takes a / N + b: the bandwidth of a ring all-reduce is of that form too. At most b doubles, or nothing is
    gained.
    """
    alike = [row for row in rows if _is_of(tier, row) and row.workers == tier.workers == 1]
    few, many = (choose(alike, key=lambda row: row.devices, default=None) for choose in (min, max))
    if not few or not many or not few.devices < many.devices < tier.devices:
        return None
    small, large = few.step_seconds, many.step_seconds
    assert small is not None, "only measured rows come here"
    assert large is not None, "only measured rows come here"

    def parts(of_few: float, of_many: float) -> tuple[float, float]:
        stays = (many.devices * of_many - few.devices * of_few) / (many.devices - few.devices)
        stays = min(max(stays, 0.0), of_many)
        return (of_many - stays) * many.devices / tier.devices, stays

    middle, (shrinks, stays) = sum(parts(small.median, large.median)), parts(small.low, large.high)
    high = min(shrinks + 2 * stays, large.high)
    factor = Interval(sum(parts(small.high, large.low)) / large.low, middle / large.median, high / large.high)
    words = f"by a / N + b through {few.devices} and {many.devices} devices, {tier.devices} take "
    return many.tier, factor, f"{words}{figures(factor.low)} to {figures(factor.high)} x the time of {many.devices}"


def _factor(tier: TierFacts, row: Row, given: float | None) -> tuple[Interval | None, str]:
    """What the tier multiplies the measured seconds of a step by, and in words why; None where nothing is known."""
    if given is None and not _is_of(tier, row):
        kind, cure = tier.accelerator_type or tier.machine_type, f"give --relative_speed={tier.name}=FACTOR"
        return None, f"the speed of one {kind} was not measured: {cure}, or with --from= a run on it"
    if given is None and row.tier == tier.name:
        return Interval(1, 1, 1), "its own step times, the quartiles as interval"
    speed, ratio = given or 1.0, tier.devices / row.devices
    low, high = sorted((1 / ratio, 1.0))
    words = [f"one device is {figures(speed)} x as fast as one of the short run" + ("" if given else " (not measured)")]
    if ratio != 1:
        words.append(f"{tier.devices} devices take {figures(low)} to {figures(high)} x the time of {row.devices}")
    return Interval(low, math.sqrt(low * high), high).times(1 / speed), "; ".join(words)


def _steps(run: Run, config: TrainConfig) -> int:
    """The steps of the full job, whose epochs have as many as those of the short run."""
    if config.steps:
        return config.steps
    if not run.steps_per_epoch:
        raise UserError(f"{run.folder} does not say how many steps an epoch has: give --steps= instead of --epochs=")
    return (config.epochs or 1) * run.steps_per_epoch


def _seconds(run: Run, row: Row, config: TrainConfig, factor: Interval) -> Interval:
    """Start-up, all steps, and the rest of the short run (saving, evaluating), which may grow with the steps."""
    assert row.step_seconds is not None, "only measured rows come here"
    steps = _steps(run, config)
    start, longer = run.startup_seconds or 0.0, max(1.0, steps / (run.steps or steps))
    rest = max(0.0, (run.wall_seconds or 0.0) - start - (run.steps or 0) * row.step_seconds.median)
    return Interval(
        start + steps * row.step_seconds.low * factor.low + rest,
        start + steps * row.step_seconds.median * factor.middle + rest,
        start + steps * row.step_seconds.high * factor.high + rest * longer,
    )


_UNITS = (("hours", 3600.0), ("minutes", 60.0))


def _line(each: Estimate) -> str:
    if each.seconds is None:
        return f"{each.tier}: not known: {each.reason}"
    unit, length = next((pair for pair in _UNITS if each.seconds.middle >= pair[1]), ("seconds", 1.0))
    time = each.seconds.times(1 / length)
    text = f"{each.tier}: {figures(time.middle)} {unit} ({figures(time.low)} - {figures(time.high)})"
    if each.usd is None:
        return f"{text}; {each.reason}"
    return f"{text}, {money(each.usd.middle)} ({money(each.usd.low)} - {money(each.usd.high)})"
