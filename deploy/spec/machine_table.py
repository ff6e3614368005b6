"""The table of machines, typed: which accelerators and how many a machine takes, where, and what an hour costs.

`python -m deploy machines` prints it. Facts, sources and dates are in machines.yaml; a user's price file goes over it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trainer.config.fields import nearest
from trainer.config.yaml_file import read_yaml
from trainer.errors import UserError
from trainer.storage import expanded

TABLE = Path(__file__).with_name("machines.yaml")


@dataclasses.dataclass(frozen=True)
class Price:
    """USD an hour, None where unknown. `inferred`: Compute Engine's price times a factor, not stated by Vertex AI."""

    list: float | None = None
    spot: float | None = None
    flex_start: float | None = None
    inferred: bool = False

    def under(self, strategy: str) -> float | None:
        """USD an hour under a scheduling strategy of Vertex AI."""
        return {"SPOT": self.spot, "FLEX_START": self.flex_start}.get(strategy, self.list)

    def with_attached(self, other: Price, count: int) -> Price:
        """The price of this machine and `count` of the accelerator that `other` is the price of."""

        def both(mine: float | None, its: float | None) -> float | None:
            return None if mine is None or its is None else mine + count * its

        inferred = self.inferred or other.inferred
        return Price(
            both(self.list, other.list), both(self.spot, other.spot), both(self.flex_start, other.flex_start), inferred
        )


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A kind of GPU. `price` is that of one beside a host machine; `quota_metric_seen`: else formed by analogy."""

    name: str
    memory_gb: int | None
    quota_metric: str | None
    regions: tuple[str, ...]
    note: str
    price: Price = Price()
    quota_metric_seen: bool = True


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine type. `counts`: accelerator -> allowed numbers of it; `attached`: they are optional and cost extra."""

    name: str
    vcpus: int | None
    memory_gb: float | None
    counts: Mapping[str, tuple[int, ...]]
    attached: bool
    price: Price = Price()
    inferred_counts: bool = False


@dataclasses.dataclass(frozen=True)
class MachineOption:
    """One line of the table: a machine with `count` of an accelerator, or with none."""

    machine: Machine
    accelerator: Accelerator | None
    count: int
    price: Price


@dataclasses.dataclass(frozen=True)
class Machines:
    """The whole table. `region` and `date` are those of the prices."""

    region: str
    date: str
    cpu_families: tuple[str, ...]
    accelerators: Mapping[str, Accelerator]
    machines: Mapping[str, Machine]

    def options(self) -> Iterator[MachineOption]:
        """Every line of the table."""
        for machine in self.machines.values():
            if machine.attached:
                yield MachineOption(machine, None, 0, machine.price)
            for name, counts in machine.counts.items():
                accelerator = self.accelerators[name]
                for count in counts:
                    yield MachineOption(machine, accelerator, count, self.price(machine.name, name, count))

    def price(self, machine_type: str, accelerator: str | None, count: int) -> Price:
        """USD an hour of one machine with its accelerators; Price() where the table does not know it."""
        machine = self.machines.get(machine_type)
        if machine is None:
            return Price()
        if not machine.attached or accelerator is None or not count:
            return machine.price
        return machine.price.with_attached(self.accelerators[accelerator].price, count)


@cache
def load_machines(price_file: str = "") -> Machines:
    """The table, with the prices of a user's file over it. UserError where that file does not fit."""
    table = read_yaml(TABLE, "machines.yaml")
    factor = table["prices"]["vertex_factor"]
    accelerators = {
        name: Accelerator(name, **{**facts, "regions": tuple(facts["regions"]), "price": _price(facts, factor)})
        for name, facts in table["accelerators"].items()
    }
    machines = {
        name: _machine(name, facts, kind == "host_machines", factor)
        for kind in ("host_machines", "accelerator_machines")
        for name, facts in table[kind].items()
    }
    about = table["prices"]
    known = Machines(about["region"], about["date"], tuple(table["cpu_families"]), accelerators, machines)
    return _with_prices(known, price_file) if price_file else known


def accelerator_of(gpu: str) -> str:
    """Vertex AI's name of a GPU that calls itself `gpu`, as "NVIDIA A100-SXM4-80GB"; `gpu` where the table has none."""
    words = set(re.split(r"\W+", gpu.upper()))
    marks = {name: set(name.split("_")) - {"NVIDIA", "TESLA"} for name in load_machines().accelerators}
    return max((name for name in marks if marks[name] <= words), key=lambda name: len(marks[name]), default=gpu)


def _machine(name: str, facts: Mapping[str, Any], attached: bool, factor: float) -> Machine:
    counts = {accelerator: tuple(allowed) for accelerator, allowed in facts["counts"].items()}
    return Machine(name, **{**facts, "counts": counts, "attached": attached, "price": _price(facts, factor)})


def _price(facts: Mapping[str, Any], factor: float) -> Price:
    times_factor: dict[str, Any] = {kind: usd * factor for kind, usd in facts.get("price", {}).items()}
    return Price(**times_factor, inferred=True)


def _with_prices(table: Machines, file: str) -> Machines:
    """A price file: `machine type or accelerator: USD an hour`, or `{list: …, spot: …, flex_start: …}`."""
    try:
        given = read_yaml(expanded(file), f"prices={file}")
    except FileNotFoundError:
        raise UserError(f"prices={file}: no such file: lines such as 'g2-standard-48: 4.60' (USD an hour)") from None
    machines, accelerators = dict(table.machines), dict(table.accelerators)
    for name, value in given.items():
        price = _given_price(f"prices={file}: {name}", value)
        if name in accelerators:
            accelerators[name] = dataclasses.replace(accelerators[name], price=price)
        elif name in machines:
            machines[name] = dataclasses.replace(machines[name], price=price)
        elif str(name).split("-")[0] in table.cpu_families:  # one that has no price of ours
            machines[name] = Machine(name, None, None, {}, attached=True, price=price)
        else:
            hint = nearest(str(name), [*machines, *accelerators])
            raise UserError(f"prices={file}: {name}: no such machine type or accelerator{hint}")
    return dataclasses.replace(table, machines=machines, accelerators=accelerators)


def _given_price(origin: str, value: Any) -> Price:
    kinds = value if isinstance(value, dict) else {"list": value}
    for kind, usd in kinds.items():
        if kind not in ("list", "spot", "flex_start"):
            raise UserError(f"{origin}: {kind}: no such price; it is one of list, spot, flex_start")
        if isinstance(usd, bool) or not isinstance(usd, (int, float)) or not 0 < usd < 1e6:
            raise UserError(f"{origin}: {usd!r} is no price: write a number, in USD an hour")
    return Price(**kinds)
