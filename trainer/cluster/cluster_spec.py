"""Reads TF_CONFIG, as Vertex AI sets it, into a Cluster, without importing TensorFlow.

https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/distributed-training
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import UserError

_ADDRESS = re.compile(r"[^\s/:@]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")


@dataclass(frozen=True)
class Cluster:
    """Lists the workers of a job, the chief first, and the index of this process among them."""

    addresses: tuple[str, ...] = ()  # host:port of each worker; empty for one machine
    index: int = 0

    @property
    def workers(self) -> int:
        """Returns the number of processes of the job: 1 without a cluster."""
        return max(1, len(self.addresses))

    @property
    def several(self) -> bool:
        """Returns whether there is more than one worker."""
        return self.workers > 1

    @property
    def is_chief(self) -> bool:
        """Returns whether this worker writes checkpoints and results; a single worker is the chief."""
        return self.index == 0

    def name(self, index: int) -> str:
        """Returns the name of a worker in messages, such as `worker 1 (host:2222)`; worker 0 is the chief."""
        return f"{'chief' if index == 0 else f'worker {index}'} ({self.addresses[index]})"


def read_cluster(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Returns the cluster that TF_CONFIG describes; one machine if there is none, or only a chief.

    Raises UserError if it is malformed.
    """
    try:
        content = _object(json.loads(environment.get("TF_CONFIG") or "{}"), "the variable")
    except (ValueError, RecursionError) as error:
        raise UserError(f"TF_CONFIG: not valid JSON ({error}): fix it, or unset TF_CONFIG for one machine") from None
    tasks: dict[str, tuple[str, ...]] = {"chief": (), "worker": ()}
    for role, addresses in _object(content.get("cluster", {}), "cluster").items():
        if addresses:
            tasks[_role(role)] = _addresses(role, addresses)
    addresses = tasks["chief"] + tasks["worker"]
    if not addresses:
        return Cluster()
    if len(tasks["chief"]) > 1:
        raise UserError(f"TF_CONFIG: {len(tasks['chief'])} chiefs: use only one (replicaCount 1 in pool 0)")
    if repeated := sorted(address for address in set(addresses) if addresses.count(address) > 1):
        raise UserError(
            f"TF_CONFIG: the address {repeated[0]} appears more than once: every task needs a separate address"
        )
    return Cluster(addresses if len(addresses) > 1 else (), _index(content, tasks))


def _object(value: Any, part: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"TF_CONFIG: {part} must be a JSON object, not {str(value)[:60]!r}")
    return value


def _role(role: str) -> str:
    if role not in ("chief", "worker"):
        raise UserError(
            f"TF_CONFIG: this trainer has no tasks of role {role[:60]!r}: supported are the chief (pool 0) and workers "
            "(pool 1)"
        )
    return role


def _addresses(role: str, value: Any) -> tuple[str, ...]:
    valid = isinstance(value, list) and all(
        isinstance(item, str) and _ADDRESS.fullmatch(item) and 0 < int(item.rpartition(":")[2]) < 65536
        for item in value
    )
    if not valid:
        raise UserError(f"TF_CONFIG: cluster.{role} must be a list of host:port addresses, not {str(value)[:60]!r}")
    return tuple(value)


def _index(content: Mapping[str, Any], tasks: Mapping[str, tuple[str, ...]]) -> int:
    """Returns the index of this process among all workers, from the `task` entry."""
    task = _object(content.get("task"), "task")
    role, index = _role(str(task.get("type"))), task.get("index", 0)
    if not tasks[role]:
        raise UserError(f"TF_CONFIG: task.type is {role}, but the cluster has no {role}")
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tasks[role]):
        raise UserError(
            f"TF_CONFIG: task.index is {str(index)[:20]}, but the cluster has {len(tasks[role])} of {role}: "
            f"use 0 to {len(tasks[role]) - 1}"
        )
    return index if role == "chief" else index + len(tasks["chief"])
