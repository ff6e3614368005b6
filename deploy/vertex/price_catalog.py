"""Reads prices of a region from the Cloud Billing Catalog: https://cloud.google.com/billing/docs/reference/rest

A machine's SKUs are found by the words of their descriptions, whose spellings vary. Not exactly one for a part: no
price. On demand the SKU of Vertex AI contains its fee; spot and flex-start are Compute Engine's SKU and, apart, that.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.tiers.machine_table import HOURS_A_MONTH, Machine, Machines
from deploy.vertex.api import unreadable_as_lost
from deploy.vertex.rest import address, call, pages
from deploy.vertex.retry import Clock, retried

SERVICES = {"vertex": "C7E2-9256-1C43", "compute": "6F81-5844-456A"}
_FEE = {"management", "fee"}
_NEVER = {"commitment", "reserved", "sole", "tenancy", "custom", "extended", "upgrade", "prediction", "predictions"}
# strategy -> (service, words of its SKUs, words that none has) for each SKU that every part of a machine has.
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

    @property
    def words(self) -> set[str]:
        """Returns the words of the description."""
        return _words(self.description)


@dataclass(frozen=True)
class CatalogPrice:
    """Holds a price in USD an hour: of GPUs, cores and memory, and of local SSD; its SKUs. None, and `why`, if none."""

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


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]*\d[a-z0-9]*|[a-z]+", text.lower()))


def price_of(machine: Machine, table: Machines, skus: Sequence[Sku], kind: str) -> CatalogPrice:
    """Returns the price of a machine with its own accelerators, by `list`, `spot` or `flex_start`."""
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
    ssd = [sku for sku in skus if sku.monthly and sku.service == "compute" and {"local", "ssd"} <= sku.words
           and not sku.words & {"spot", "dws", *_NEVER}]  # fmt: skip
    if len(ssd) != 1:
        return CatalogPrice(None, why=f"local SSD: {_named(ssd)}")
    return CatalogPrice(price.usd, ssd[0].usd * machine.local_ssd_gib / HOURS_A_MONTH, (*price.skus, *ssd))


def price_of_gpu(accelerator: str, table: Machines, skus: Sequence[Sku], kind: str) -> CatalogPrice:
    """Returns the price of one accelerator that is attached to a machine."""
    return _sum([(accelerator, 1, *_of_gpu(accelerator, table))], skus, kind)


def _of_gpu(accelerator: str, table: Machines) -> tuple[set[str], set[str]]:
    """Returns the words of an accelerator, and those of its relatives, as H100 Mega, that its SKUs have not."""
    named: Callable[[str], set[str]] = lambda name: _words(name.replace("_", " ")) - {"nvidia", "tesla"}  # noqa: E731
    own = named(accelerator)
    return own, {word for gpu in table.accelerators if own < named(gpu) for word in named(gpu) - own}


def _sum(parts: Sequence[tuple[str, float, set[str], set[str]]], skus: Sequence[Sku], kind: str) -> CatalogPrice:
    total, used = 0.0, []
    for name, count, words, without in parts:
        for service, of_kind, not_of_kind in _KINDS[kind]:
            barred = without | not_of_kind | _NEVER - of_kind
            priced = [sku for sku in skus if sku.service == service and not sku.monthly
                    and words | of_kind <= sku.words and not barred & sku.words]  # fmt: skip
            if len(priced) != 1:
                return CatalogPrice(None, why=f"{name} ({' '.join(sorted(of_kind))}): {_named(priced)}")
            total += count * priced[0].usd
            used.append(priced[0])
    return CatalogPrice(total, 0.0, tuple(used))


def _named(skus: Sequence[Sku]) -> str:
    return f"{len(skus)} SKUs: {'; '.join(sku.description for sku in skus[:4])}" if skus else "no SKU"
