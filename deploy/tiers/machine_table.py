"""Reads the table of machines: the accelerators that each machine takes, their regions, and prices per hour.

machines.yaml holds the facts with sources and dates. A user's price file overrides its prices.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.yaml_file import read_yaml
from trainer.base.storage import expanded

TABLE = Path(__file__).with_name("machines.yaml")


@dataclasses.dataclass(frozen=True)
class Price:
    """Holds USD an hour, None if unknown. `inferred`: Compute Engine's price times a factor, not from Vertex AI."""

    list: float | None = None
    spot: float | None = None
    flex_start: float | None = None
    inferred: bool = False

    def under(self, strategy: str) -> float | None:
        """Returns USD an hour under a scheduling strategy of Vertex AI."""
        return {"SPOT": self.spot, "FLEX_START": self.flex_start}.get(strategy, self.list)

    def with_attached(self, other: Price, count: int) -> Price:
        """Returns the price of this machine and `count` accelerators with the price `other`."""

        def total(kind: str) -> float | None:
            machine, unit = getattr(self, kind), getattr(other, kind)
            return None if machine is None or unit is None else machine + count * unit

        return Price(total("list"), total("spot"), total("flex_start"), self.inferred or other.inferred)


@dataclasses.dataclass(frozen=True)
class Rates:
    """Holds what a data sheet promises: dense TFLOP/s by arithmetic ("float32", "tf32", "16_bit"), and bytes."""

    tflops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_gb_per_s: float
    link_gb_per_s: float  # to the other GPUs of the machine, each way


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Describes a kind of GPU. `price`: of one, without a host; `quota_metric_seen`: False if inferred."""

    name: str
    memory_gb: int | None
    quota_metric: str | None
    regions: tuple[str, ...]
    note: str
    price: Price = Price()
    quota_metric_seen: bool = True
    rates: Rates | None = None


@dataclasses.dataclass(frozen=True)
class Machine:
    """Describes a machine type. `counts`: accelerator -> allowed counts; `attached`: optional, at an extra price."""

    name: str
    vcpus: int | None
    memory_gb: float | None
    counts: Mapping[str, tuple[int, ...]]
    attached: bool
    price: Price = Price()
    inferred_counts: bool = False
    strategies: tuple[str, ...] = ()  # the only ones, if any are named


@dataclasses.dataclass(frozen=True)
class MachineOption:
    """Holds one row of the table: a machine with `count` accelerators, or with none."""

    machine: Machine
    accelerator: Accelerator | None
    count: int
    price: Price


@dataclasses.dataclass(frozen=True)
class Machines:
    """Holds the whole table. `region` and `date` are those of the prices; `regions` have training."""

    region: str
    date: str
    cpu_machines: tuple[str, ...]  # without accelerators; those not in `machines` have no price
    regions: tuple[str, ...]
    accelerators: Mapping[str, Accelerator]
    machines: Mapping[str, Machine]

    def options(self) -> Iterator[MachineOption]:
        """Yields every row of the table."""
        for machine in self.machines.values():
            if machine.attached:
                yield MachineOption(machine, None, 0, machine.price)
            for name, counts in machine.counts.items():
                accelerator = self.accelerators[name]
                for count in counts:
                    yield MachineOption(machine, accelerator, count, self.price(machine.name, name, count))

    def price(self, machine_type: str, accelerator: str | None, count: int) -> Price:
        """Returns USD an hour of one machine with its accelerators; Price() for an unknown machine."""
        machine = self.machines.get(machine_type)
        if machine is None:
            return Price()
        if not machine.attached or accelerator is None or not count:
            return machine.price
        return machine.price.with_attached(self.accelerators[accelerator].price, count)


@cache
def load_machines(price_file: str = "") -> Machines:
    """Returns the table, with the prices of a user's file; UserError if that file is invalid."""
    return _with_prices(_read_table(), price_file) if price_file else _read_table()


@cache
def _read_table() -> Machines:
    """Returns the table of this package."""
    table = read_yaml(TABLE, "machines.yaml")
    prices = table["prices"]
    factor = prices["vertex_factor"]
    accelerators = {name: _accelerator(name, facts, factor) for name, facts in table["accelerators"].items()}
    machines = {
        name: _machine(name, facts, kind == "host_machines", factor)
        for kind in ("host_machines", "accelerator_machines")
        for name, facts in table[kind].items()
    }
    return Machines(
        prices["region"],
        prices["date"],
        _cpu_machines(table["cpu_machines"]),
        tuple(table["regions"]),
        accelerators,
        machines,
    )


def accelerator_of(gpu: str) -> str:
    """Returns Vertex AI's name of the GPU that its driver calls `gpu` ("NVIDIA A100-SXM4-80GB"); `gpu` if unknown."""
    words = set(re.split(r"\W+", gpu.upper()))
    parts = {name: set(name.split("_")) - {"NVIDIA", "TESLA"} for name in load_machines().accelerators}
    return max((name for name in parts if parts[name] <= words), key=lambda name: len(parts[name]), default=gpu)


def _cpu_machines(sizes: Mapping[str, list[int]]) -> tuple[str, ...]:
    """Returns the names of machine types, such as e2-standard-4."""
    return tuple(f"{kind}-{size}" for kind, counts in sizes.items() for size in counts)


def _accelerator(name: str, facts: Mapping[str, Any], factor: float) -> Accelerator:
    rates = Rates(**facts["rates"]) if "rates" in facts else None
    return Accelerator(name, **{**facts, "regions": tuple(facts["regions"]), "price": _price(facts, factor),
                                 "rates": rates})  # fmt: skip


def _machine(name: str, facts: Mapping[str, Any], attached: bool, factor: float) -> Machine:
    counts = {accelerator: tuple(allowed) for accelerator, allowed in facts["counts"].items()}
    return Machine(name, **{**facts, "counts": counts, "attached": attached, "price": _price(facts, factor),
                             "strategies": tuple(facts.get("strategies", ()))})  # fmt: skip


def _price(facts: Mapping[str, Any], factor: float) -> Price:
    times_factor: dict[str, Any] = {kind: usd * factor for kind, usd in facts.get("price", {}).items()}
    return Price(**times_factor, inferred=True)


def _with_prices(table: Machines, file: str) -> Machines:
    """Reads a price file: `machine type or accelerator: USD an hour`, or `{list: …, spot: …, flex_start: …}`."""
    try:
        prices = read_yaml(expanded(file), f"prices={file}")
    except FileNotFoundError:
        raise UserError(f"prices={file}: not found: write lines such as 'g2-standard-48: 4.60' (USD an hour)") from None
    machines, accelerators = dict(table.machines), dict(table.accelerators)
    for name, value in prices.items():
        price = _parse_price(f"prices={file}: {name}", value)
        if name in accelerators:
            accelerators[name] = dataclasses.replace(accelerators[name], price=price)
        elif name in machines:
            machines[name] = dataclasses.replace(machines[name], price=price)
        elif name in table.cpu_machines:  # a machine that is not in the table
            machines[name] = Machine(name, None, None, {}, attached=True, price=price)
        else:
            hint = nearest(str(name), [*machines, *accelerators])
            raise UserError(f"prices={file}: {name}: unknown machine type or accelerator{hint}")
    return dataclasses.replace(table, machines=machines, accelerators=accelerators)


def _parse_price(origin: str, value: Any) -> Price:
    kinds = value if isinstance(value, dict) else {"list": value}
    for kind, usd in kinds.items():
        if kind not in ("list", "spot", "flex_start"):
            raise UserError(f"{origin}: {kind}: unknown price; use one of list, spot, flex_start")
        if isinstance(usd, bool) or not isinstance(usd, (int, float)) or not 0 < usd < 1e6:
            raise UserError(f"{origin}: {usd!r} is not a price: use a number, in USD an hour")
    return Price(**kinds)
