"""Asks Google for the prices of a region: `python -m deploy prices --region=NAME --out=prices.yaml`.

Reads the Cloud Billing Catalog with this machine's login, writes a file for --prices= with the identifiers of the SKUs,
and prints what differs from the table of this package. A part without exactly one SKU leaves its machine without a
price, with the names that were found: nothing is guessed.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

from deploy.base.console import say
from deploy.cli.parsing import parser, write_document
from deploy.job.workload import JobOptions
from deploy.platform.errors import billing_errors
from deploy.platform.gcloud_and_sdk import SESSION, Session
from deploy.platform.rest import address, call, pages
from deploy.platform.vertex_api import Clock, retried, unreadable_as_lost
from deploy.tiers.gcp_config import needed_region
from deploy.tiers.machine_table import HOURS_A_MONTH, KINDS, Machine, Machines, Price, load_machines
from trainer.base.errors import DONE
from trainer.base.storage import local_path, write_whole

SERVICES = {"vertex": "C7E2-9256-1C43", "compute": "6F81-5844-456A"}
_FEE = {"management", "fee"}
_NEVER = {"commitment", "reserved", "sole", "tenancy", "custom", "extended", "upgrade", "prediction", "predictions"}
# strategy -> the SKUs that add up to the price of a part: (service, words in their description, words not in it).
_KINDS: Mapping[str, Sequence[tuple[str, set[str], set[str]]]] = {
    "list": [("vertex", {"training", "pipelines"}, _FEE)],
    "spot": [("compute", {"spot", "preemptible"}, {"dws"}), ("vertex", {"training", "pipelines", *_FEE}, set())],
    "flex_start": [
        ("compute", {"dws", "defined", "duration"}, {"spot"}), ("vertex", {"training", "pipelines", *_FEE}, set()),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Sku:
    """Holds a SKU: USD an hour of its unit (a GPU, a core, a GiB), or a month where `monthly`."""

    service: str
    identifier: str
    description: str
    usd: float
    monthly: bool


@dataclass(frozen=True)
class CatalogPrice:
    """Holds a price in USD an hour, to which `local_ssd` is added, and its SKUs; if `usd` is None, `why` says why."""

    usd: float | None
    local_ssd: float = 0.0
    skus: tuple[Sku, ...] = ()
    why: str = ""


def read_skus(region: str, clock: Clock) -> list[Sku]:
    """Returns the SKUs of a region with a price. Raises ApiError if the catalog cannot be read whole."""
    with unreadable_as_lost():
        return [sku for service in SERVICES for sku in _skus(service, region, clock)]


def _skus(service: str, region: str, clock: Clock) -> Iterator[Sku]:
    """Yields the SKUs of the region that have a single price in USD."""
    catalog = address("CLOUDBILLING", "https://cloudbilling.googleapis.com")
    request, url = {"currencyCode": "USD", "pageSize": "5000"}, f"{catalog}/v1/services/{SERVICES[service]}/skus"
    for sku in pages("skus", lambda token: retried(lambda: call("GET", url, params={**request, **token}), clock)):
        expression = sku["pricingInfo"][-1]["pricingExpression"] if sku.get("pricingInfo") else {}
        prices = [rate["unitPrice"] for rate in expression.get("tieredRates", ())]
        usd = [int(price.get("units") or 0) + int(price.get("nanos") or 0) / 1e9 for price in prices]
        usd, unit = list(filter(None, usd)), expression.get("usageUnit")
        if region in sku.get("serviceRegions", ()) and len(usd) == 1 and unit in ("h", "GiBy.h", "GiBy.mo"):
            yield Sku(service, sku["skuId"], sku["description"], usd[0], unit == "GiBy.mo")


@cache
def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]*\d[a-z0-9]*|[a-z]+", text.lower()))


def price_of(machine: Machine, table: Machines, skus: Sequence[Sku], kind: str) -> CatalogPrice:
    """Returns the price of a machine, with accelerators that are part of it, as `list`, `spot` or `flex_start`."""
    parts: list[tuple[str, float, set[str], set[str]]] = []
    if not machine.attached:
        ((accelerator, counts),) = machine.counts.items()
        parts.append((accelerator, counts[0], *_of_gpu(accelerator, table)))
    family = machine.name.split("-")[0]
    parts += [("cores", machine.vcpus or 0, {family, "core"}, {"gpu"}),
              ("memory", machine.memory_gb or 0, {family, "ram"}, {"gpu"})]  # fmt: skip
    price = _sum(parts, skus, kind)
    if price.usd is None or not machine.local_ssd_gib:
        return price
    ssd = [sku for sku in skus if sku.monthly and sku.service == "compute"
           and {"local", "ssd"} <= _words(sku.description)
           and not _words(sku.description) & {"spot", "dws", *_NEVER}]  # fmt: skip
    if len(ssd) != 1:
        return CatalogPrice(None, why=f"local SSD: {_named(ssd)}")
    return CatalogPrice(price.usd, ssd[0].usd * machine.local_ssd_gib / HOURS_A_MONTH, (*price.skus, *ssd))


def _of_gpu(accelerator: str, table: Machines) -> tuple[set[str], set[str]]:
    """Returns the words that SKUs of an accelerator have, and those that only its relatives' have, as H100 Mega's."""
    words: Callable[[str], set[str]] = lambda name: _words(name.replace("_", " ")) - {"nvidia", "tesla"}  # noqa: E731
    own = words(accelerator)
    return own, {word for gpu in table.accelerators if own < words(gpu) for word in words(gpu) - own}


def _sum(parts: Sequence[tuple[str, float, set[str], set[str]]], skus: Sequence[Sku], kind: str) -> CatalogPrice:
    """Returns the price of all parts, each (name, count, words that its SKUs have, words that they have not)."""
    total, used = 0.0, []
    for name, count, words, without in parts:
        for service, of_kind, not_of_kind in _KINDS[kind]:
            barred = without | not_of_kind | _NEVER - of_kind
            priced = [sku for sku in skus if sku.service == service and not sku.monthly
                      and words | of_kind <= _words(sku.description)
                      and not barred & _words(sku.description)]  # fmt: skip
            if len(priced) != 1:
                return CatalogPrice(None, why=f"{name} ({' '.join(sorted(of_kind))}): {_named(priced)}")
            total += count * priced[0].usd
            used.append(priced[0])
    return CatalogPrice(total, 0.0, tuple(used))


def _named(skus: Sequence[Sku]) -> str:
    return f"{len(skus)} SKUs: {'; '.join(sku.description for sku in skus[:4])}" if skus else "no SKU"


_DIFFERS = 0.005  # share of the table's price by which a price has to differ to be printed


def main(arguments: Sequence[str], session: Session = SESSION) -> int:
    """Writes the price file and prints how its prices differ from the table's."""
    cli = parser("prices", __doc__, "--region=NAME [--out=FILE]", JobOptions, "region")
    cli.add_argument("--out", default="prices.yaml", metavar="FILE", help="the price file (default: %(default)s)")
    args = cli.parse_args(arguments)
    region, out = needed_region(args.region), local_path(args.out, "out")
    with billing_errors("the Cloud Billing Catalog", "enable cloudbilling.googleapis.com in gcloud's project"):
        skus = read_skus(region, session.clock)
    table = load_machines()
    items = {name: {kind: price_of(machine, table, skus, kind) for kind in KINDS}
             for name, machine in table.machines.items() if machine.vcpus}  # fmt: skip
    attached = {name for machine in table.machines.values() if machine.attached for name in machine.counts}
    items |= {name: {kind: _sum([(name, 1, *_of_gpu(name, table))], skus, kind) for kind in KINDS}
              for name in sorted(attached)}  # fmt: skip
    date = datetime.fromtimestamp(session.clock.now(), UTC).date()
    lines = [f"# {region}, {date}: Cloud Billing Catalog, by `python -m deploy prices`; USD an hour, without boot disk"]
    usd = {name: {kind: _total(price) for kind, price in kinds.items() if price.usd is not None}
           for name, kinds in items.items()}  # fmt: skip
    for name, known in usd.items():
        lines += [f"# {kind}: {', '.join(sku.identifier for sku in items[name][kind].skus)}" for kind in known]
        if known:
            lines.append(f"{name}: {{{', '.join(f'{kind}: {price:.6f}' for kind, price in known.items())}}}")
    write_whole(out, "\n".join(lines) + "\n")
    differences = [*_differences(items, table, region)]
    for line in differences:
        say(line)
    priced = sum(map(bool, usd.values()))
    say(f"{priced} of {len(items)} machines and accelerators have a price in {out}: use it with --prices={args.out}")
    write_document(args, "prices", region=region, date=str(date), prices=usd, differences=differences)
    return DONE


def _total(price: CatalogPrice) -> float:
    return (price.usd or 0.0) + price.local_ssd


def _differences(items: dict[str, dict[str, CatalogPrice]], table: Machines, region: str) -> Iterator[str]:
    """Yields a line for each price that differs from the table's, and for each machine that lacks one."""
    for name, kinds in items.items():
        listed: Price = (table.machines.get(name) or table.accelerators[name]).price
        for kind, price in kinds.items():
            before = getattr(listed, kind)
            if price.usd is None:
                if before is not None:
                    yield f"{name}: no price as {kind}: {price.why}"
                continue
            parts = f" = {price.usd:.3f} + local SSD {price.local_ssd:.3f}" if price.local_ssd else ""
            change = "not in the table" if before is None else f"{100 * (_total(price) / before - 1):+.1f} %"
            if before is None or abs(_total(price) / before - 1) > _DIFFERS:
                yield f"{name} as {kind} in {region}: {_total(price):.3f}{parts} ({change}, table {before or 0:.3f})"
