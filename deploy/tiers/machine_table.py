"""Reads the table of machines: the accelerators that each machine takes, their regions, and prices
per hour.

machines.yaml holds the facts, with sources and dates. A price is that of Compute Engine, with the
local SSD that comes with a machine, plus Vertex AI's fee. For spot and flex-start machines, too,
the fee is a share of the on-demand list price of machine and accelerators. tier.py adds a tier's
boot disk. A user's price file overrides prices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.settings.accelerators import TFLOPS
from trainer.base.settings.fields import nearest
from trainer.base.settings.yaml_file import read_yaml
from trainer.base.storage import expanded

TABLE = Path(__file__).with_name("machines.yaml")
HOURS_A_MONTH = 730  # as Compute Engine counts them
KINDS = ("list", "spot", "flex_start")


@dataclass(frozen=True)
class Price:
    """Holds USD an hour for each kind of price; None if it is not known.

    `inferred`: computed from Compute Engine's prices and Vertex AI's fee, not given by the user.
        `lower_bound`: without the fee, since the list price of which it is a share is not known.
    """

    list: float | None = None
    spot: float | None = None
    flex_start: float | None = None
    inferred: bool = False
    lower_bound: bool = False

    def under(self, strategy: str) -> float | None:
        """Returns USD an hour under a scheduling strategy of Vertex AI; None if it is not known."""
        return {"SPOT": self.spot, "FLEX_START": self.flex_start}.get(strategy, self.list)

    def known_under(self, strategy: str) -> float | None:
        """Returns `under`, but None for a lower bound, on which nothing may be based."""
        return None if self.lower_bound else self.under(strategy)

    def plus(self, other: Price, count: float = 1) -> Price:
        """Returns the sum of this price and `count` times another; None where one of them is."""
        usd = {kind: (getattr(self, kind), getattr(other, kind)) for kind in KINDS}
        sums = {
            kind: None if None in pair else pair[0] + count * pair[1] for kind, pair in usd.items()
        }
        inferred = self.inferred or other.inferred
        bound = self.lower_bound or other.lower_bound
        return Price(**sums, inferred=inferred, lower_bound=bound)


FREE = Price(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Rates:
    """Holds a GPU's rates by its data sheet.

    tflops: TFLOP/s by arithmetic, of trainer.base.settings.accelerators.
    """

    tflops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_gb_per_s: float
    link_gb_per_s: float  # to the other GPUs of the machine, in each direction


@dataclass(frozen=True)
class Accelerator:
    """Describes a kind of GPU. `price`: that of one GPU without its host.

    `regions`: those that both of Google's pages list; `one_page`: those that only one lists, by the
        page's name; `quota_metric_seen`: False if the name of `quota_metric` is only inferred from
        others; `tensorflow`: whether TensorFlow's wheels run on it.
    """

    name: str
    memory_gb: int | None
    quota_metric: str | None
    regions: tuple[str, ...]
    note: str
    one_page: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict, hash=False)
    tensorflow: bool = True
    price: Price = Price()
    quota_metric_seen: bool = True
    rates: Rates | None = None


@dataclass(frozen=True)
class Machine:
    """Describes a machine type.

    `counts`: how many of each accelerator it may have, by the accelerator's name.
    `attached`: accelerators are optional, at an extra price. `local_ssd_gib`: the local SSD that
        comes with it. `rdma`: its GPUs can reach those of other machines without the host, if NCCL
        is configured for it.
    """

    name: str
    vcpus: int | None
    memory_gb: float | None
    counts: Mapping[str, tuple[int, ...]]
    attached: bool
    price: Price = Price()
    # if not empty, the only scheduling strategies under which it is offered
    strategies: tuple[str, ...] = ()
    local_ssd_gib: int = 0
    rdma: bool = False
    disk: str = "pd-ssd"  # the type of boot disk of a tier that names none


@dataclass(frozen=True)
class Machines:
    """Holds the whole table.

    `region`, `date`: where and when the prices hold; `regions`: those that have training.
    """

    region: str
    date: str
    regions: tuple[str, ...]
    disk_gib_month: Mapping[str, float]  # USD a month for a GiB of a boot disk, by the disk's type
    accelerators: Mapping[str, Accelerator]
    machines: Mapping[str, Machine]

    def options(self) -> Iterator[tuple[Machine, str, int]]:
        """Yields every machine with each accelerator and number of them that it may have."""
        for machine in self.machines.values():
            if machine.attached:
                yield machine, "", 0
            for name, counts in machine.counts.items():
                yield from ((machine, name, count) for count in counts)

    def price(self, machine_type: str, accelerator: str, count: int) -> Price:
        """Returns the price of a machine with `count` accelerators; Price() if unknown."""
        machine = self.machines.get(machine_type)
        if machine is None:
            return Price()
        if not machine.attached or not count:
            return machine.price
        return machine.price.plus(self.accelerators[accelerator].price, count)


@cache
def _read_table() -> Machines:
    table = read_yaml(TABLE, "machines.yaml")
    prices = table["prices"]
    accelerators = dict[str, Accelerator]()
    machines = dict[str, Machine]()
    read: dict[str, Any]
    for name, facts in table["accelerators"].items():
        rates = Rates(TFLOPS[name], **facts["rates"]) if "rates" in facts else None
        read = {"price": _price(facts, prices), "rates": rates, "regions": tuple(facts["regions"])}
        accelerators[name] = Accelerator(name, **{**facts, **read})
    for name, facts in (table["host_machines"] | table["accelerator_machines"]).items():
        read = {
            "price": _price(facts, prices),
            "attached": name in table["host_machines"],
            "counts": {kind: tuple(allowed) for kind, allowed in facts["counts"].items()},
            "strategies": tuple(facts.get("strategies", ())),
        }
        machines[name] = Machine(name, **{**facts, **read})
    for family, facts in table["cpu_machines"].items():
        for vcpus in facts["sizes"]:
            name = f"{family}-{vcpus}"
            usd = {kind: vcpus * facts[kind] for kind in ("list", "spot")}
            machines[name] = Machine(
                name,
                vcpus,
                vcpus * facts["gb"],
                {},
                attached=True,
                price=_price({"price": usd}, prices),
                disk=facts.get("disk", "pd-ssd"),
            )
    return Machines(
        prices["region"],
        prices["date"],
        tuple(table["regions"]),
        prices["disk_gib_month"],
        accelerators,
        machines,
    )


def _price(facts: Mapping[str, Any], prices: Mapping[str, Any]) -> Price:
    """Returns Compute Engine's prices plus the fee, which the local SSD does not bear."""
    usd_by_kind = facts.get("price", {})
    local_ssd = facts.get("local_ssd_gib", 0) * prices["local_ssd_gib_month"] / HOURS_A_MONTH
    fee = prices["fee"] * (usd_by_kind["list"] - local_ssd) if "list" in usd_by_kind else 0.0
    with_fee: dict[str, Any] = {kind: usd + fee for kind, usd in usd_by_kind.items()}
    return Price(
        **with_fee, inferred=True, lower_bound=bool(usd_by_kind) and "list" not in usd_by_kind
    )


def load_machines(file: str = "") -> Machines:
    """Returns the table, with the prices of a user's file. Raises UserError for a bad file.

    A line of the file is `NAME: USD` or `NAME: {list: USD, spot: USD, flex_start: USD}`, each in
    USD an hour, with the name of a machine type or an accelerator.
    """
    table = _read_table()
    if not file:
        return table
    try:
        prices = read_yaml(expanded(file), f"prices={file}")
    except FileNotFoundError:
        raise UserError(
            f"prices={file}: not found: write lines such as 'g2-standard-48: 4.60' (USD an hour)"
        ) from None
    machines = dict(table.machines)
    accelerators = dict(table.accelerators)
    for name, value in prices.items():
        kinds = value if isinstance(value, dict) else {"list": value}
        for kind, usd in kinds.items():
            if kind not in KINDS:
                raise UserError(
                    f"prices={file}: {name}: {kind}: unknown price; use one of {', '.join(KINDS)}"
                )
            if isinstance(usd, bool) or not isinstance(usd, (int, float)) or not 0 < usd < 1e6:
                raise UserError(
                    f"prices={file}: {name}: {usd!r} is not a price: use a number above 0, in USD"
                    " an hour"
                )
        price = Price(**kinds)
        if name in accelerators:
            accelerators[name] = replace(accelerators[name], price=price)
        elif name in machines:
            machines[name] = replace(machines[name], price=price)
        else:
            hint = (
                nearest(str(name), [*machines, *accelerators])
                + " `python -m deploy machines --all` lists them"
            )
            raise UserError(f"prices={file}: {name}: unknown machine type or accelerator{hint}")
    return replace(table, machines=machines, accelerators=accelerators)
