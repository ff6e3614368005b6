"""Reads tiers (machine specs) from job_configs/ or the user's files, and checks that such machines
exist."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from deploy.tiers.machine_table import FREE, HOURS_A_MONTH, Price, load_machines
from deploy.tiers.spec_rules import FLEX_START, Spec, check_spec, machine_of
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.yaml_file import read_yaml

# Labels that `submit` sets; the value of the first is unique to each attempt to create a job.
LABEL = "submission"
PRICE_LABEL = "usd-per-hour"
USER_LABEL = "user"
# scheduling strategies, in words
STRATEGIES = {"STANDARD": "standard", "SPOT": "spot", "FLEX_START": "flex-start"}

ROOT = Path(__file__).parents[2]
# an installed copy of the package has the checkout's files here
COPIES = Path(__file__).parents[1] / "checkout"


def beside(name: str) -> Path:
    """Returns the path of a file of the checkout, or of its copy in an installed package."""
    return (ROOT if (ROOT / "setup.py").is_file() else COPIES) / name


JOB_CONFIGS = beside("job_configs")
# How long a FLEX_START job waits for machines, unless its file or --max_wait says it.
FLEX_WAIT_S = 4 * 3600.0
DEFAULT_TIMEOUT_S = 7 * 24 * 3600.0  # Vertex AI's timeout of a job that states none


@dataclass(frozen=True)
class TierFacts:
    """Holds a tier's `workers`, each with `accelerators` GPUs (0: it uses its CPU).

    The price is in USD an hour, for all machines; None if it is not known.
    """

    name: str
    machine_type: str
    accelerator_type: str = ""
    accelerators: int = 0
    workers: int = 1
    price_per_hour: float | None = None

    @property
    def kind(self) -> str:
        """Returns the type of the devices: the accelerator's, or the machine's if it has none."""
        return self.accelerator_type or self.machine_type

    @property
    def devices(self) -> int:
        """Returns the number of replicas: all accelerators, or one for each CPU worker."""
        return max(1, self.accelerators) * self.workers

    @property
    def machine(self) -> str:
        """Returns the machines as text, such as `2 x g2-standard-24 + 2 x NVIDIA_L4`."""
        gpus = f" + {self.accelerators} x {self.accelerator_type}" if self.accelerators else ""
        return (f"{self.workers} x " if self.workers > 1 else "") + self.machine_type + gpus


@dataclass(frozen=True, kw_only=True)
class Tier(TierFacts):
    """Holds machines with their price.

    `spec`: the CustomJobSpec of the tier's file, after the flags that change it.
    """

    spec: Spec
    price: Price  # of all machines, with their boot disks, under each scheduling strategy

    @property
    def facts(self) -> TierFacts:
        """Returns what a comparison needs of the tier."""
        return TierFacts(*(getattr(self, field.name) for field in fields(TierFacts)))

    @property
    def scheduling(self) -> Mapping[str, Any]:
        """Returns what the spec says of when the job may run."""
        return self.spec.get("scheduling") or {}

    @property
    def strategy(self) -> str:
        """Returns the scheduling strategy: STANDARD, SPOT or FLEX_START."""
        return str(self.scheduling.get("strategy", "STANDARD"))

    @property
    def resource(self) -> str:
        """Returns the persistent resource on whose machines the job runs; "" if it gets its own."""
        return str(self.spec.get("persistentResourceId", ""))

    @property
    def price_name(self) -> str:
        """Returns the words for the price under the tier's strategy, such as `spot price`."""
        return f"{STRATEGIES[self.strategy]} price"

    @property
    def timeout_s(self) -> float:
        """Returns the seconds after which Vertex AI ends the job."""
        timeout = self.scheduling.get("timeout")
        return float(timeout[:-1]) if timeout else DEFAULT_TIMEOUT_S

    @property
    def usd_by_strategy(self) -> dict[str, float | None]:
        """Returns USD an hour of all machines by the strategies on offer; None if not known.

        A price that the user gave for the tier counts for the tier's own strategy. The machines of
        a persistent resource are there already.
        """
        if self.resource:
            return {"STANDARD": self.price_per_hour}
        machine = load_machines().machines.get(self.machine_type)
        offered = [
            kind
            for kind in (machine.strategies if machine else ()) or STRATEGIES
            if kind != "FLEX_START" or FLEX_START.fullmatch(self.accelerator_type)
        ]
        usd = {kind: self.price.under(kind) for kind in offered}
        return usd if self.price_per_hour is None else {**usd, self.strategy: self.price_per_hour}

    @property
    def most_usd(self) -> float | None:
        """Returns a job's cost in USD until its timeout; None without a known price."""
        return None if self.price_per_hour is None else self.price_per_hour * self.timeout_s / 3600

    @property
    def bound_per_hour(self) -> float | None:
        """Returns an upper bound of USD an hour: the tier's price, else the highest other price.

        Returns None if no price is known.
        """
        prices = [usd for kind in STRATEGIES if (usd := self.price.known_under(kind)) is not None]
        return self.price_per_hour or max(prices, default=None)

    @property
    def bound_usd(self) -> float | None:
        """Returns an upper bound of a job's cost in USD until its timeout; None without a price."""
        return None if self.bound_per_hour is None else self.bound_per_hour * self.timeout_s / 3600


# What flags make of a spec: from a spec, and its name for messages, to those after them
# (`deploy.job.spec`).
Changes = Callable[[Spec, str], tuple[Spec, str]]


def _unchanged(spec: Spec, name: str) -> tuple[Spec, str]:
    """Returns the spec of a tier that no flag changes."""
    return spec, name


def load_tier(name: str, price_file: str = "", changes: Changes = _unchanged) -> Tier:
    """Reads a tier from a YAML file, or by its name in job_configs/.

    Raises UserError if Vertex AI could not run it.
    """
    path = find_tier(name)
    return _tier(path.stem, read_yaml(path, path.name), path.name, price_file, changes)


def read_tiers(
    names: Sequence[str],
    price_file: str,
    usd_by_tier: Mapping[str, float],
    changes: Changes = _unchanged,
) -> list[Tier]:
    """Reads the tiers of these files or names in job_configs/, with the prices of `price_file`.

    `usd_by_tier`: prices of an hour of all machines, by tier. A tier in it has this price for its
        own strategy, and no price for others. Raises UserError if a tier is given twice, or a price
        is for a tier that is not given.
    """
    tiers = dict[str, Tier]()
    for tier in (load_tier(name, price_file, changes) for name in names):
        if tier.name in tiers:
            raise UserError(f"{tier.name} is given twice: tiers are named after their files")
        tiers[tier.name] = tier
    check_tiers(usd_by_tier, list(tiers), "price_per_hour")
    for name, usd in usd_by_tier.items():
        tiers[name] = replace(tiers[name], price=Price(), price_per_hour=usd)
    return list(tiers.values())


def machine_tier(
    machine_type: str, accelerator: str, price_file: str = "", changes: Changes = _unchanged
) -> Tier:
    """Returns a tier of one machine that needs no file. `accelerator`: NAME:COUNT, empty for none.

    Raises UserError if Vertex AI could not run it.
    """
    kind, _, count = accelerator.partition(":")
    if accelerator and not re.fullmatch(r"\w+:[1-9]\d?", accelerator):
        raise UserError(f"accelerator={accelerator}: write NAME:COUNT, as NVIDIA_L4:1")
    machine: dict[str, Any] = {"machineType": machine_type}
    if accelerator:
        machine |= {"acceleratorType": kind, "acceleratorCount": int(count)}
    pool = {
        "machineSpec": machine,
        "replicaCount": 1,
        "pythonPackageSpec": {"pythonModule": "trainer.task"},
    }
    spec = {"workerPoolSpecs": [pool], "scheduling": {"timeout": "86400s"}}
    title = f"{machine_type}-x{count}" if accelerator else machine_type
    return _tier(title, spec, f"--machine_type={machine_type}", price_file, changes)


def _tier(
    name: str, spec: Mapping[str, Any], origin: str, price_file: str, changes: Changes
) -> Tier:
    """Returns the tier of a spec after `changes`, with its price.

    Raises UserError, naming `origin`, for a bad spec.
    """
    spec, origin = changes(spec, origin)
    check_spec(spec, origin)
    table = load_machines(price_file)
    pools = spec["workerPoolSpecs"]
    price = FREE
    counts = [int(pool.get("replicaCount", 1)) for pool in pools]
    for pool, count in zip(pools, counts, strict=True):
        machine = machine_of(pool)
        disk = {
            "bootDiskType": table.machines[machine[0]].disk,
            "bootDiskSizeGb": 100,
            **pool.get("diskSpec", {}),
        }
        a_month = table.disk_gib_month[disk["bootDiskType"]]
        usd = float(disk["bootDiskSizeGb"]) * a_month / HOURS_A_MONTH
        price = price.plus(table.price(*machine).plus(Price(usd, usd, usd)), count)
    known = price.known_under(spec.get("scheduling", {}).get("strategy", "STANDARD"))
    return Tier(name, *machine_of(pools[0]), sum(counts[:2]), known, spec=spec, price=price)


def find_tier(name: str) -> Path:
    """Returns the file of a tier, by its path or its name in job_configs/, or raises UserError."""
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    for path in (Path(file), Path("job_configs") / file, JOB_CONFIGS / file):
        if os.path.isfile(path):
            return path
    # l4x4 is easily read as 14x4
    hint = nearest(re.sub("^1", "l", Path(name).stem.lower()), tier_names())
    raise UserError(
        f"tier {name}: no such tier{hint} `python -m deploy machines` lists them; or name a .yaml"
        " file"
    )


def tier_names() -> list[str]:
    """Returns the names of all tiers in the user's job_configs/ and in the package's."""
    files = (*Path("job_configs").glob("*.yaml"), *JOB_CONFIGS.glob("*.yaml"))
    return sorted({path.stem for path in files})


def check_tiers(names: Iterable[str], known: Sequence[str], flag: str = "") -> None:
    """Raises UserError for the first of `names` not in `known`. `flag`: which gave it, if any."""
    for name in names:
        if name not in known:
            named = f"{flag}={name}" if flag else name
            raise UserError(
                f"{named}: no such tier{nearest(name, known)} Here are: {', '.join(known)}"
            )
