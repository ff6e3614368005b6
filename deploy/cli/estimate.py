"""Estimates from a short run the hours and cost of the full job on each tier, and lists its assumptions.

Unknowns are intervals: on N times the devices a step takes between 1/N of its time (ideal) and all of it (no gain). Two
measured tiers of one machine with the same accelerator narrow that for larger ones: a step on N devices takes
a / N + b (docs/scaling.md). A tier that was measured in the short run keeps its own times.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deploy.cli.arguments import add_flags, numbers_by_tier, parse, parser, read_prices
from deploy.comparison.estimation import Estimate, estimate, unknown_estimate
from deploy.comparison.execution import Plan, compare, read_tiers
from deploy.comparison.local_runner import LocalRunner
from deploy.localrun.workers import local_gpus
from deploy.report.collection import ESTIMATE, collect
from deploy.report.table import figures, money
from deploy.spec.tier import Tier, check_tiers
from trainer.config.flags import Parser, whole
from trainer.config.overrides import Overrides
from trainer.errors import DONE, UserError
from trainer.storage import local_path, make_writable, write_whole


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m deploy estimate TIER … --recipe=… [--from=DIR] [its own flags and the trainer's]`."""
    found, overrides = parse(_flags(), arguments)
    specs = read_tiers(found.tiers, found.prices, read_prices(found.price_per_hour))
    tiers = [tier.facts for tier in specs]
    speeds = numbers_by_tier("relative_speed", found.relative_speed)
    check_tiers(speeds, [tier.name for tier in tiers], "relative_speed")
    config = overrides.resolve()
    out = local_path(found.out, "out")
    source = getattr(found, "from")
    if not source:
        short = _first_known(specs, speeds)
        source = str(_short_run(short, overrides, out / "short-run", found.short_steps))
    estimates, assumptions = estimate(collect([source]), tiers, config, speeds)
    make_writable(out, "out")
    by_tier = {each.tier: asdict(each) for each in estimates}
    content = {"from": source, "config": asdict(config), "tiers": by_tier, "assumptions": assumptions}
    write_whole(out / ESTIMATE, json.dumps(content, indent=2) + "\n")
    print("\n".join(map(_line, estimates)))
    if not assumptions:
        raise UserError(_NOTHING)
    print("\n".join(["", "Assumed:", *(f"- {line}" for line in assumptions)]))
    return DONE


_NOTHING = "no tier's time is known: give --relative_speed=TIER=FACTOR, or with --from= a run on one of them"


def _flags() -> Parser:
    own = parser("estimate", __doc__ or "", "TIER … --recipe=NAME [--from=DIR] [any trainer flag]")
    own.add_argument("tiers", nargs="+", metavar="TIER", help="bare names of job_configs/, as l4x4, or your own files")
    own.add_argument("--from", default="", metavar="DIR", help="job directory of a short run, or a comparison, "
                     "local or gs:// (default: a run of the first tier that can be measured here)")  # fmt: skip
    own.add_argument(
        "--short_steps", type=whole(20, 10**6), default=100, metavar="STEPS", help="length of that run (default: 100)"
    )
    own.add_argument("--out", default="runs/comparison", metavar="FOLDER", help="folder for estimate.json; "
                     "`compare` with the same folder prints its error (default: %(default)s)")  # fmt: skip
    own.add_argument("--relative_speed", action="append", default=[], metavar="TIER=FACTOR",
                     help="speed of one device of a tier relative to one of the short run")  # fmt: skip
    add_flags(own, "prices", "price_per_hour")
    return own


def _first_known(tiers: Sequence[Tier], speeds: Mapping[str, float]) -> Tier:
    """Returns the first tier that a short run here can measure, and prints which tiers it cannot.

    Without GPUs it has one device: several on one CPU would share it. Raises UserError if no tier can be measured.
    """
    gpus = bool(local_gpus())
    known = [tier for tier in tiers if gpus or not tier.accelerators or tier.name in speeds]
    lacking = [tier.name for tier in tiers if tier not in known]
    if not known:
        print("\n".join(_line(unknown_estimate(tier.facts, [each.facts for each in tiers])) for tier in tiers))
        raise UserError(f"this machine has no GPU: {_NOTHING}")
    if lacking:
        print(f"{', '.join(lacking)}: will not be known: this machine has no GPU", flush=True)
    first = known[0]
    devices = first.accelerators if gpus else min(1, first.accelerators)
    pools = (replace(first.pools[0], accelerators=devices),)
    usd = first.price_per_hour and first.price_per_hour / first.workers
    return replace(first, pools=pools, workers=1, accelerators=devices, price_per_hour=usd)


def _short_run(tier: Tier, overrides: Overrides, out: Path, steps: int) -> Path:
    """Trains `steps` steps on this machine and returns the folder of the one-tier comparison."""
    shortened = overrides.without("epochs").replace(steps=steps, report_every_steps=steps // 10, profile_steps="")
    plan, runner = Plan((tier.facts,), shortened), LocalRunner([tier])
    code = compare(plan, plan.resolve(runner), out, runner)
    if code != DONE:
        raise UserError(f"the short run ended with exit code {code}: see the log in {out / tier.name}")
    return out


_UNITS = (("hours", 3600.0), ("minutes", 60.0))


def _line(each: Estimate) -> str:
    if each.seconds is None:
        return f"{each.tier}: not known: {each.reason}" + (f"; {each.bound}" if each.bound else "")
    unit, length = next((pair for pair in _UNITS if each.seconds.middle >= pair[1]), ("seconds", 1.0))
    time = each.seconds.times(1 / length)
    text = f"{each.tier}: {figures(time.middle)} {unit} ({figures(time.low)} - {figures(time.high)})"
    if each.usd is None:
        return f"{text}; {each.reason}"
    return f"{text}, {money(each.usd.middle)} ({money(each.usd.low)} - {money(each.usd.high)})"
