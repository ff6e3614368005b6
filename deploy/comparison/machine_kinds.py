"""Groups the tiers of a comparison by equal machines, for each of which there is one persistent resource."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.spec.guard_job import IDLE_S, MACHINE, guard_price
from deploy.spec.tier import DISK, Tier
from deploy.vertex.api import PersistentResource
from deploy.vertex.costs import format_duration, price_label
from trainer.errors import UserError

GUARD_SLACK_S = 5400.0  # for which a guard outlives the deadline: until the resource is created and deleted


@dataclasses.dataclass(frozen=True)
class Kind:
    """Describes equal machines. `tier`: the one with the most workers; `names`: of all tiers that have them."""

    key: str
    tier: Tier
    names: tuple[str, ...]

    @property
    def about(self) -> str:
        """Returns the machines of all its tiers in words."""
        return f"{', '.join(self.names)} ({self.tier.machine})"

    @property
    def pools(self) -> list[dict[str, Any]]:
        """Returns the machines as resourcePools of the API."""
        pool = self.tier.spec["workerPoolSpecs"][0]
        disk = {**DISK, **pool.get("diskSpec", {})}
        return [{"machineSpec": pool["machineSpec"], "replicaCount": self.tier.workers, "diskSpec": disk}]

    def request(self, id: str, labels: Mapping[str, str], kms_key: str) -> PersistentResource:
        """Returns the request for these machines, with their price as a label."""
        spec, labels = self.tier.spec, {**labels, **price_label(self.tier.price_per_hour)}
        return PersistentResource(id, self.pools, labels, spec.get("network", ""), kms_key, "serviceAccount" in spec)


def kinds_by_tier(tiers: Sequence[Tier]) -> dict[str, Kind]:
    """Returns the kind of machines of each tier. Raises UserError for a tier that cannot run in such machines."""
    groups: dict[str, list[Tier]] = {}
    for tier in tiers:
        groups.setdefault(_key(tier), []).append(tier)
    kinds = {}
    for key, equal in groups.items():
        kind = Kind(key, max(equal, key=lambda tier: tier.workers), tuple(tier.name for tier in equal))
        kinds.update(dict.fromkeys(kind.names, kind))
    return kinds


def _key(tier: Tier) -> str:
    """Returns a name of the tier's machines, which is the same for equal ones."""
    spec, pool = tier.spec, tier.spec["workerPoolSpecs"][0]
    if tier.strategy != "STANDARD":
        raise UserError(
            f"{tier.name}: scheduling.strategy={tier.strategy}: a persistent resource has standard machines only: drop "
            "the strategy, or --persistent_resource"
        )
    for key in ("persistentResourceId", "pscInterfaceConfig"):
        if key in spec:
            raise UserError(f"{tier.name}: {key} contradicts --persistent_resource: drop one of them")
    if any(pool.index > 1 for pool in tier.pools):
        raise UserError(f"{tier.name}: a Reduction Server has other machines: drop it, or --persistent_resource")
    about = [pool["machineSpec"], {**DISK, **pool.get("diskSpec", {})}, spec.get("network"), "serviceAccount" in spec]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:6]


def describe_kinds(kinds: Sequence[Kind], time_s: float, region: str, price_file: str) -> Iterator[str]:
    """Yields what the persistent resources cost, used or not, who ends them, and what is possible if nobody does."""
    guard, most, unknown = guard_price(price_file), 0.0, 0
    guard_usd, longest = guard * (time_s + GUARD_SLACK_S) / 3600, format_duration(time_s)
    for kind in kinds:
        price = kind.tier.price_per_hour
        most, unknown = most + guard_usd + (price or 0.0) * time_s / 3600, unknown + (price is None)
        cost = "a price that is not known (--prices=FILE)"
        if price is not None:
            estimate = " (estimate)" if kind.tier.price_inferred else ""
            cost = f"{price:.2f} USD an hour{estimate}, used or idle, {price * time_s / 3600:.2f} USD at most"
        yield (
            f"one persistent resource in {region} for {kind.about}: {cost}, for {longest} at most and the minutes of "
            "its deletion; one run at a time"
        )
        hourly = "" if price is None else f" {price:.2f} USD an hour"
        yield (
            f"its guard, a job on {MACHINE}: {guard:.2f} USD an hour, {guard_usd:.2f} USD at most: deletes it after "
            f"{format_duration(IDLE_S)} without a job, and at its end; if this machine and the guard are both lost, it "
            f"goes on costing{hourly} until `python -m deploy cancel`, which `python -m deploy jobs` tells"
        )
    if kinds:
        more = f", and {unknown} without a known price" if unknown else ""
        yield f"all together: {most:.2f} USD at most{more}; jobs in them cost nothing more"
