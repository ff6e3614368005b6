"""Asks Google for the prices of a region: `python -m deploy prices --region=NAME
--out=prices.yaml`.

Reads the Cloud Billing Catalog with this machine's login, writes a file for --prices= with the
identifiers of the SKUs, and prints what differs from the table of this package. A part without
exactly one SKU leaves its machine without a price, with the names that were found: nothing is
guessed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, NamedTuple

from deploy.api.request import verb_usage
from deploy.base.console import say
from deploy.cli.output import JSON, write_document
from deploy.job.options import JobOptions
from deploy.platform.api_error import unreadable_as_lost
from deploy.platform.errors import billing_errors
from deploy.platform.rest import address, call, pages
from deploy.platform.retries import CLOCK, retried
from deploy.tiers.gcp_config import needed_region
from deploy.tiers.machine_table import HOURS_A_MONTH, KINDS, Machine, Machines, Price, load_machines
from trainer.base.errors import DONE, UserError
from trainer.base.settings.fields import options_class, parse_options, setting, setting_of
from trainer.base.storage import local_path, write_whole

SERVICES = {"vertex": "C7E2-9256-1C43", "compute": "6F81-5844-456A"}
_FEE = {"management", "fee"}
_NEVER = {
    "commitment",
    "reserved",
    "sole",
    "tenancy",
    "custom",
    "extended",
    "upgrade",
    "prediction",
    "predictions",
}
# strategy, or a part with the same SKU under every strategy -> the SKUs that add up to the price of
# a part: (service, words in their description, words not in it).
_KINDS: Mapping[str, Sequence[tuple[str, set[str], set[str]]]] = {
    "list": [("vertex", {"training", "pipelines"}, _FEE)],
    "spot": [
        ("compute", {"spot", "preemptible"}, {"dws"}),
        ("vertex", {"training", "pipelines", *_FEE}, set()),
    ],
    "flex_start": [
        ("compute", {"dws", "defined", "duration"}, {"spot"}),
        ("vertex", {"training", "pipelines", *_FEE}, set()),
    ],
    "local SSD": [("compute", {"local", "ssd"}, {"spot", "dws"})],
}


class Sku(NamedTuple):
    """Holds a SKU: USD an hour of its unit (a GPU, a core, a GiB)."""

    service: str
    identifier: str
    description: str
    usd: float


# What a machine has of one unit: its name, how many, and the words that its SKUs have in their
# text, and have not.
Part = tuple[str, float, set[str], set[str]]


def read_skus(region: str) -> list[Sku]:
    """Returns the SKUs of a region with a single price in USD.

    Raises ApiError if the catalog cannot be read whole.
    """
    catalog = address("CLOUDBILLING", "https://cloudbilling.googleapis.com")
    skus = []
    for service, number in SERVICES.items():
        page = partial(_page, f"{catalog}/v1/services/{number}/skus")
        with unreadable_as_lost():
            for sku in pages("skus", page):
                expression = (
                    sku["pricingInfo"][-1]["pricingExpression"] if sku.get("pricingInfo") else {}
                )
                prices = [rate["unitPrice"] for rate in expression.get("tieredRates", ())]
                sums = [
                    int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9
                    for price in prices
                ]
                usd = [amount for amount in sums if amount]
                hours = {"h": 1, "GiBy.h": 1, "GiBy.mo": HOURS_A_MONTH}.get(
                    expression.get("usageUnit", "")
                )
                if hours and len(usd) == 1 and region in sku.get("serviceRegions", ()):
                    skus.append(Sku(service, sku["skuId"], sku["description"], usd[0] / hours))
    return skus


def _page(url: str, token: dict[str, str]) -> Any:
    request = {"currencyCode": "USD", "pageSize": "5000", **token}
    return retried(lambda: call("GET", url, params=request))


@cache
def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]*\d[a-z0-9]*|[a-z]+", text.lower())) - {"nvidia", "tesla"}


def _parts(machine: Machine, table: Machines) -> Iterator[Part]:
    """Yields the parts of a machine's price, with its own accelerators."""
    if not machine.attached:
        ((accelerator, counts),) = machine.counts.items()
        yield _gpu(accelerator, counts[0], table)
    family = machine.name.split("-")[0]
    yield "cores", machine.vcpus or 0, {family, "core"}, {"gpu"}
    yield "memory", machine.memory_gb or 0, {family, "ram"}, {"gpu"}
    if machine.local_ssd_gib:
        yield "local SSD", machine.local_ssd_gib, set(), set()


def _gpu(accelerator: str, count: int, table: Machines) -> Part:
    """Returns the part for an accelerator, without the SKUs of its relatives, as H100 Mega."""
    own = _words(accelerator)
    relatives = [words for words in map(_words, table.accelerators) if own < words]
    return accelerator, count, own, set[str]().union(*relatives) - own


def price_of(parts: Iterable[Part], skus: Sequence[Sku], kind: str) -> tuple[float | None, str]:
    """Returns the price in USD an hour and the SKUs' identifiers, or None and the reason.

    `kind`: `list`, `spot` or `flex_start`.
    """
    total = 0.0
    identifiers = []
    for name, number, words, without in parts:
        for service, of_kind, not_of_kind in _KINDS.get(name, _KINDS[kind]):
            barred = without | not_of_kind | _NEVER - of_kind
            priced = [
                sku
                for sku in skus
                if sku.service == service
                and words | of_kind <= _words(sku.description)
                and not barred & _words(sku.description)
            ]
            if len(priced) != 1:
                names = "; ".join(sku.description for sku in priced[:4])
                seen = f"{len(priced)} SKUs: {names}" if priced else "no SKU"
                return None, f"{name} ({' '.join(sorted(of_kind))}): {seen}"
            total += number * priced[0].usd
            identifiers.append(priced[0].identifier)
    return total, ", ".join(identifiers)


@options_class
class PricesFlags:
    """Holds the flags of `prices`."""

    region: str = setting_of(JobOptions, "region")
    out: str = setting("prices.yaml", "the price file", "FILE")
    json: bool = JSON


def main(arguments: Sequence[str]) -> int:
    """Writes the price file and prints how its prices differ from the table's."""
    args = parse_options(
        PricesFlags, arguments, verb_usage("prices", "--region=NAME [--out=FILE]", __doc__)
    )
    region = needed_region(args.region)
    out = local_path(args.out, "out")
    with billing_errors(
        "the Cloud Billing Catalog", "enable cloudbilling.googleapis.com in gcloud's project"
    ):
        skus = read_skus(region)
    table = load_machines()
    parts = {
        name: [*_parts(machine, table)] for name, machine in table.machines.items() if machine.vcpus
    }
    attached = {
        name for machine in table.machines.values() if machine.attached for name in machine.counts
    }
    parts |= {name: [_gpu(name, 1, table)] for name in sorted(attached)}
    date = datetime.fromtimestamp(CLOCK.now(), UTC).date()
    lines = [
        f"# {region}, {date}: Cloud Billing Catalog, by `python -m deploy prices`; USD an hour,"
        " without boot disk"
    ]
    usd: dict[str, dict[str, float]] = {}
    differences = []  # from the table's prices
    for name, of_name in parts.items():
        listed: Price = (table.machines.get(name) or table.accelerators[name]).price
        usd[name] = {}
        for kind in KINDS:
            before = getattr(listed, kind)
            price, about = price_of(of_name, skus, kind)
            if price is None:
                if before is not None:
                    differences.append(f"{name}: no price as {kind}: {about}")
                continue
            usd[name][kind] = price
            lines.append(f"# {kind}: {about}")
            change = (
                "not in the table" if before is None else f"{100 * (price / before - 1):+.1f} %"
            )
            if before is None or abs(price / before - 1) > 0.005:
                difference = f"{price:.3f} ({change}, table {before or 0:.3f})"
                differences.append(f"{name} as {kind} in {region}: {difference}")
        if usd[name]:
            lines.append(
                f"{name}:"
                f" {{{', '.join(f'{kind}: {price:.6f}' for kind, price in usd[name].items())}}}"
            )
    priced = sum(map(bool, usd.values()))
    say(*differences)
    if not priced:
        raise UserError(
            f"region={region}: the Cloud Billing Catalog has a price there for none of {len(usd)}"
            " machines and accelerators, as above: check the region's name; nothing was written"
        )
    write_whole(out, "\n".join(lines) + "\n")
    counted = (
        f"{priced} of {len(usd)} machines and accelerators have a price in {out}: use it with"
        f" --prices={args.out}"
    )
    say(counted)
    write_document(
        args, "prices", region=region, date=str(date), prices=usd, differences=differences
    )
    return DONE
