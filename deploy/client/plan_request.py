"""Plans a run on tiers before anything is paid: whether it fits, how long it takes, what it costs, with intervals."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO, TypedDict

from deploy.client.arguments import VerbParser, add_flags, parse, parser, read_prices, seconds, usd
from deploy.client.call_arguments import FlagValue, as_arguments
from deploy.client.documents import add_json_flag
from deploy.comparison.execution import read_tiers
from deploy.planning.extrapolation import Extrapolation, estimate
from deploy.planning.forecast import Forecast, forecast
from deploy.planning.interval import Interval
from deploy.planning.kept_plans import FIT, cheapest_lever, plan_in, plan_of
from deploy.planning.plan_table import PlanTable
from deploy.report.collection import collect
from deploy.tiers.availability import NoMachines, check_region
from deploy.tiers.gcp_config import GcpConfig, checked_region
from deploy.tiers.images import remembered
from deploy.tiers.machine_table import load_machines
from deploy.tiers.output import printed_on, say
from deploy.tiers.tier import Tier, tier_names
from trainer.base.errors import UserError
from trainer.base.run_files.plan_file import StepPlan
from trainer.base.settings.resolution import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import make_writable

DESCRIPTION = """Says before anything is paid whether a run fits each tier, how long it takes and what it costs.

Memory and work of a step come from real steps on this machine's CPU, in a process of its own; the plan is kept, and
made again only if the settings, your sources or the versions change. Times come from the step's graph; with runs at
hand (--from) from these, which is much narrower. No machine is started.
"""


class SubmitFlags(TypedDict):
    """Holds flags of `submit` that ask for machines of one kind in one region."""

    spot: bool
    flex_start: bool
    region: str


@dataclass(frozen=True)
class OfferChoice:
    """Holds a tier under a scheduling strategy, with the hours and the USD of the whole job. `region`: "" for any."""

    tier: str
    region: str
    strategy: str
    hours: Interval
    usd: Interval

    @property
    def flags(self) -> SubmitFlags:
        """Returns the flags of `submit` that ask for this strategy and region."""
        return {"spot": self.strategy == "SPOT", "flex_start": self.strategy == "FLEX_START", "region": self.region}


@dataclass(frozen=True)
class Plan(PlanTable):
    """Holds the forecasts of all tiers, each with its offers: the hours and USD under each scheduling strategy."""

    def __str__(self) -> str:
        """Returns the table, and what is to be said about it."""
        return "\n".join([self.about, "", self.to_terminal(), *self.sentences(), "", *self.notes()])

    def best(self, within: str = "", budget: float | None = None) -> OfferChoice:
        """Returns the cheapest offer that ends `within` a time, as "8h", for at most `budget` USD.

        Prefers offers whose upper ends meet both limits; falls back to those whose middle does. Raises UserError if
        there is none.
        """
        hours = seconds(within) / 3600 if within else float("inf")
        most = float("inf") if budget is None else budget
        for end in ("high", "middle"):
            for of_tier, offer in self.offers:  # the cheapest first
                if getattr(offer.hours, end) <= hours and getattr(offer.usd, end) <= most:
                    return OfferChoice(*self.place(of_tier), offer.strategy, offer.hours, offer.usd)
        raise UserError(f"no tier ends within={within or 'any time'} for budget={budget}: {' '.join(self.sentences())}")


def plan_flags() -> VerbParser:
    """Returns the parser of `plan`."""
    cli = parser("plan", DESCRIPTION, "[TIER …] --recipe=NAME [--from=DIR] [any trainer flag]")
    cli.add_argument("tiers", nargs="*", metavar="TIER", help="bare names of job_configs/, as l4x4, or your own files "
                     "(default: all of job_configs/)")  # fmt: skip
    cli.add_argument("--from", action="append", default=[], metavar="DIR", help="job directory of a run, or a "
                     "comparison, local or gs://: times come from it")  # fmt: skip
    cli.add_argument("--plan", default="", metavar="FILE", help="a plan of `python -m trainer.plan --out=FILE`")
    cli.add_argument("--within", type=seconds, metavar="TIME", help="name the cheapest that ends within, as 8h or 2d")
    cli.add_argument("--budget", type=usd, metavar="USD", help="name the fastest that costs at most so much")
    cli.add_argument("--out", default="runs/plan", metavar="FOLDER", help="folder for plan.md and forecast.json "
                     "(default: %(default)s)")  # fmt: skip
    cli.add_argument("--regions", default="", metavar="A,B", help="plan each region, by --prices=prices-REGION.yaml, "
                     "files of `prices`")  # fmt: skip
    cli.add_boolean("fit", FIT)
    add_flags(cli, "prices", "price_per_hour")
    add_json_flag(cli)
    return cli


def plan(
    *tiers: str, recipe: str = "", regions: Sequence[str] = (), settings: Mapping[str, FlagValue] | None = None,
    stream: TextIO | None = None, **flags: FlagValue,
) -> Plan:  # fmt: skip
    """Returns the plan of a run on these tiers, by default on all; `regions` need prices="prices-REGION.yaml".

    `settings`: of the trainer; `flags`: those of `python -m deploy plan`. The first plan of new settings measures steps
    on this machine's CPU, which takes a minute. Writes no file of its own. Raises UserError as the command does.
    """
    if "out" in {**flags, **(settings or {})}:
        raise UserError("out is of the command: a function writes no files")
    arguments = as_arguments(tiers, {"recipe": recipe, "regions": list(regions), **flags}, settings)
    with printed_on(stream):
        return planned(*parse(plan_flags(), arguments))


def planned(args: argparse.Namespace, overrides: Overrides, out: Path | None = None) -> Plan:
    """Returns what `plan` was asked for. `out`: a folder that is to be writable before anything is measured."""
    places, usd_by_tier = _places(args.regions, args.prices), read_prices(args.price_per_hour)
    names, sources = args.tiers or tier_names(), list(getattr(args, "from"))
    specs, config = read_tiers(names, places[0][1], usd_by_tier), overrides.resolve()
    if out:
        make_writable(out, "out")
    step_plan = plan_in(args.plan, config) if args.plan else plan_of(config, overrides)
    extrapolations: list[Extrapolation] = []
    assumed: list[str] = []
    if sources:
        extrapolations, assumed = estimate(collect(sources), [tier.facts for tier in specs], config)
    by_name = {extrapolation.tier: extrapolation for extrapolation in extrapolations}
    forecasts: list[Forecast] = []
    for region, file in places:
        for tier in read_tiers(names, file, usd_by_tier):
            if not region or _has(region, tier):
                extrapolation, own_image = by_name.get(tier.name), remembered() is not None
                if args.fit and extrapolation:
                    say(f"# {tier.name}: --fit adds nothing: a run of --from shows it as it is")
                lever = cheapest_lever(tier, step_plan, config) if args.fit and not extrapolation else None
                run = step_plan.with_setting(config, lever.name, lever.value) if lever else (step_plan, config)
                of_tier = forecast(tier, *run, load_machines(file), extrapolation, own_image=own_image)
                forecasts.append(replace(of_tier, tier=f"{tier.name}@{region}") if region else of_tier)
    as_typed = {tier.name: name for tier, name in zip(specs, names, strict=True)}
    within = args.within and args.within / 3600
    return Plan(step_plan, forecasts, _about(step_plan, config), assumed, within, args.budget, as_typed)


def _places(regions: str, prices: str) -> list[tuple[str, str]]:
    """Returns each region with its price file, or "" with the only one. Raises UserError if a region has no file."""
    if not regions:
        return [("", prices)]
    if "REGION" not in prices:
        raise UserError(
            f"regions={regions}: each has its prices in a file: give --prices=prices-REGION.yaml, in which REGION "
            "stands for its name; `python -m deploy prices --region=us-east4 --out=prices-us-east4.yaml` makes one"
        )
    return [(checked_region(region), prices.replace("REGION", region)) for region in regions.split(",")]


def _has(region: str, tier: Tier) -> bool:
    """Returns whether the region has the tier's accelerator, by one of Google's pages at least."""
    try:
        check_region(tier, GcpConfig("", region, ""))
    except NoMachines:
        return False
    return True


def _about(step_plan: StepPlan, config: TrainConfig) -> str:
    subject = f"{config.recipe or config.model} on {config.data or 'its data'}"
    steps = f"{step_plan.total_steps(config):,} steps"
    return f"{subject}: {steps}, global batch {config.global_batch_size}, {config.precision}"
