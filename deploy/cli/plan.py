"""Says before anything is paid whether a run fits each tier, how long it takes and what it costs, with intervals.

Memory and work of a step come from real steps on this machine's CPU, in a process of its own; the plan is kept, and
made again only if the settings, your sources or the versions change. Times come from the step's graph; with runs at
hand (--from) from these, which is much narrower. No machine is started.
"""

from collections.abc import Sequence
from dataclasses import replace

from deploy.cli.arguments import add_flags, parse, parser, read_prices, seconds, usd
from deploy.comparison.execution import read_tiers
from deploy.planning.extrapolation import Extrapolation, estimate
from deploy.planning.forecast import forecast
from deploy.planning.kept import plan_of
from deploy.planning.plan_table import PlanTable
from deploy.report.collection import collect
from deploy.tiers.checks import NoMachines, check_region
from deploy.tiers.gcp_config import GcpConfig, checked_region
from deploy.tiers.images import remembered
from deploy.tiers.machine_table import load_machines
from deploy.tiers.tier import Tier, tier_names
from trainer.base.errors import DONE, UserError
from trainer.base.run_files.plan_file import StepPlan, read_plan
from trainer.base.settings.flags import Parser
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded, local_path, make_writable, write_whole


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m deploy plan [TIER …] --recipe=… [its own flags and the trainer's]`."""
    asked, overrides = parse(_flags(), arguments)
    places = _places(asked.regions, asked.prices)
    usd_by_tier, names = read_prices(asked.price_per_hour), asked.tiers or tier_names()
    specs = read_tiers(names, places[0][1], usd_by_tier)
    config, out = overrides.resolve(), local_path(asked.out, "out")
    make_writable(out, "out")
    plan = read_plan(expanded(asked.plan)) if asked.plan else plan_of(config, overrides)
    sources = list(getattr(asked, "from"))
    estimates: list[Extrapolation] = []
    assumed: list[str] = []
    if sources:
        estimates, assumed = estimate(collect(sources), [tier.facts for tier in specs], config)
    by_name = {each.tier: each for each in estimates}
    forecast_by_tier = []
    for region, file in places:
        for tier in read_tiers(names, file, usd_by_tier):
            if not region or _has(region, tier):
                known, own_image = by_name.get(tier.name), remembered() is not None
                told = forecast(tier, plan, config, load_machines(file), known, own_image=own_image)
                forecast_by_tier.append(replace(told, tier=f"{tier.name}@{region}") if region else told)
    within = asked.within and asked.within / 3600
    table = PlanTable(plan, forecast_by_tier, _about(plan, config), assumed, within, asked.budget)
    write_whole(out / "plan.md", table.to_markdown())  # all files come first: a closed pipe ends the program
    write_whole(out / "forecast.json", table.to_json())
    print("\n".join([table.about, "", table.to_terminal(), *table.sentences(), "", *table.notes()]))
    print(f"\n{out / 'plan.md'}")
    return DONE


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
        list(check_region(tier, GcpConfig("", region, "")))
    except NoMachines:
        return False
    return True


def _about(plan: StepPlan, config: TrainConfig) -> str:
    what = config.recipe or config.model
    return (f"{what} on {config.data or 'its data'}: {plan.total_steps(config):,} steps, global batch "
            f"{config.global_batch_size}, {config.precision}")  # fmt: skip


def _flags() -> Parser:
    cli = parser("plan", __doc__ or "", "[TIER …] --recipe=NAME [--from=DIR] [any trainer flag]")
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
    add_flags(cli, "prices", "price_per_hour")
    return cli
