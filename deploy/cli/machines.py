"""Prints the tiers, or the table of machines: `python -m deploy machines`."""

import dataclasses
from collections.abc import Sequence

from deploy.api.request import verb_usage
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.options import JobOptions
from deploy.report.formatting import terminal_table
from deploy.tiers.machine_table import Price, load_machines
from deploy.tiers.tier import Tier, load_tier, tier_names
from trainer.base.errors import DONE
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of


@options_class
class MachinesFlags:
    """Holds the flags of `machines`."""

    all: bool = setting(False, "all machines, not only those of the tiers")
    prices: str = setting_of(JobOptions, "prices")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Prints the tiers; with --all the machines."""
    summary = (
        "Lists the tiers or, with --all, the machines of Vertex AI training: price an hour, quota,"
        " regions."
    )
    args = parse_options(MachinesFlags, arguments, verb_usage("machines", "[--all]", summary))
    table = load_machines(args.prices)
    source = (
        f"~ an estimate: Compute Engine's price of {table.date} in {table.region} and Vertex AI's"
        " fee of 15 % of its list price (for spot inferred); > without that fee: a lower bound"
    )
    if not args.all:
        tiers = [load_tier(name, args.prices) for name in tier_names()]
        lines = [
            (tier.name, tier.machine, f"{usd}{'*' if tier.strategy == 'FLEX_START' else ''}", spot)
            for tier in tiers
            for usd, spot in [_prices(_own_price(tier))]
        ]
        titles = ("tier", "machines", "USD/h", "spot USD/h")
        say(
            terminal_table(titles, lines, left=2),
            f"{source}; the boot disk is in them; * as FLEX_START",
        )
        say("all machines, quota and regions: --all")
        priced = [
            {"tier": tier.name, "machine": tier.machine, "price": _own_price(tier)}
            for tier in tiers
        ]
        write_document(args, "machines", date=table.date, region=table.region, tiers=priced)
        return DONE
    rows = []
    listed = []
    accelerators = {}
    for machine, name, count in table.options():
        accelerator = table.accelerators.get(name)
        price = table.price(machine.name, name, count)
        facts = (
            count or None,
            accelerator and accelerator.memory_gb,
            machine.vcpus,
            machine.memory_gb,
        )
        cells = ["" if value is None else f"{value:g}" for value in facts]
        rows.append((machine.name, name, *cells, *_prices(price)))
        listed.append(
            {"machine": machine, "accelerator": accelerator, "count": count, "price": price}
        )
        if accelerator:
            accelerators[name] = accelerator
    header = (
        "machine type",
        "accelerator",
        "count",
        "GB each",
        "vCPUs",
        "RAM GB",
        "USD/h",
        "spot USD/h",
    )
    say(terminal_table(header, rows, left=2), f"{source}; the boot disk is not in them")
    for accelerator in accelerators.values():
        metric = accelerator.quota_metric or "unknown quota metric"
        inferred = "" if accelerator.quota_metric_seen else " (name inferred)"
        say(
            f"{accelerator.name}: {accelerator.note}",
            f"  {metric}{inferred}",
            f"  {' '.join(accelerator.regions)}",
        )
    write_document(args, "machines", date=table.date, region=table.region, machines=listed)
    return DONE


def _own_price(tier: Tier) -> Price:
    """Returns the price of all machines of a tier; the list price is by its file's strategy."""
    return dataclasses.replace(tier.price, list=tier.price.under(tier.strategy))


def _prices(price: Price) -> list[str]:
    """Returns list and spot price as texts, ~ for an estimate and > for a lower bound."""
    sign = ">" if price.lower_bound else "~" if price.inferred else ""
    return ["" if usd is None else f"{sign}{usd:.2f}" for usd in (price.list, price.spot)]
