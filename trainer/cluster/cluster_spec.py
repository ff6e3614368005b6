"""Reads TF_CONFIG and CLUSTER_SPEC, as Vertex AI sets them, into a Cluster, without importing TensorFlow.

https://cloud.google.com/vertex-ai/docs/training/distributed-training describes both variables.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import UserError

_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
_SUPPORTED = "supported are the chief (workerpool0) and workers (workerpool1)"
_ADDRESS = re.compile(r"[^\s/:@]+:[0-9]{1,5}|\[[0-9a-fA-F:.]+\]:[0-9]{1,5}")


@dataclass(frozen=True)
class Cluster:
    """Lists the workers of a job, the chief first, and the index of this process among them."""

    addresses: tuple[str, ...] = ()  # host:port of each worker; empty for one machine
    index: int = 0
    note: str = ""  # a line for the log about how the variables were read

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
    """Returns the cluster that the environment describes; one machine if there is none, or only a chief.

    TF_CONFIG has precedence over CLUSTER_SPEC, as TensorFlow reads it too. Raises UserError if one is malformed.
    """
    found = {name: _read(name, environment[name]) for name in ("TF_CONFIG", "CLUSTER_SPEC") if environment.get(name)}
    clusters = [cluster for cluster in found.values() if cluster is not None]
    if not clusters:
        return Cluster()
    first = clusters[0]
    if len(clusters) == 2 and clusters[1] != first:
        note = "TF_CONFIG and CLUSTER_SPEC name different clusters: TF_CONFIG is used, as TensorFlow does"
        return Cluster(first.addresses, first.index, note)
    return first


def _read(name: str, text: str) -> Cluster | None:
    """Returns the cluster in the variable `name`; None if it has no tasks."""
    content = _object(name, _parse(name, text), "the variable")
    tasks: dict[str, tuple[str, ...]] = {}
    for role, addresses in _object(name, content.get("cluster", {}), "cluster").items():
        if addresses:
            plain = _role(name, role)
            tasks[plain] = (*tasks.get(plain, ()), *_addresses(name, role, addresses))
    if not tasks:
        return None
    for role in ("ps", "evaluator", "tpu"):
        if role in tasks:
            raise UserError(f"{name}: the cluster has {role} tasks, which this trainer does not use: {_SUPPORTED}")
    addresses = (*tasks.get("chief", ()), *tasks.get("worker", ()))
    _check(name, tasks, addresses)
    return Cluster(addresses if len(addresses) > 1 else (), _index(name, content, tasks))


def _parse(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: not valid JSON ({error}): fix it, or unset {name} for one machine") from None


def _object(name: str, value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{name}: {what} must be a JSON object, not {str(value)[:60]!r}")
    return value


def _role(name: str, role: str) -> str:
    """Returns the usual name of a role: `master` is an older one of the chief, and CLUSTER_SPEC uses pools."""
    plain = _POOLS.get(role, "chief" if role == "master" else role)
    if plain not in ("chief", "worker", "ps", "evaluator", "tpu"):
        raise UserError(f"{name}: unknown role {role[:60]!r} in the cluster: {_SUPPORTED}")
    return plain


def _addresses(name: str, role: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and _is_address(one) for one in value):
        raise UserError(f"{name}: cluster.{role} must be a list of host:port addresses, not {str(value)[:60]!r}")
    return tuple(value)


def _is_address(text: str) -> bool:
    return bool(_ADDRESS.fullmatch(text)) and 0 < int(text.rpartition(":")[2]) < 65536


def _check(name: str, tasks: Mapping[str, tuple[str, ...]], addresses: tuple[str, ...]) -> None:
    if len(tasks.get("chief", ())) > 1:
        raise UserError(f"{name}: {len(tasks['chief'])} chiefs: use only one (replicaCount 1 in pool 0)")
    twice = sorted({address for address in addresses if addresses.count(address) > 1})
    if twice:
        raise UserError(f"{name}: the address {twice[0]} appears more than once: every task needs a separate address")


def _index(name: str, content: Mapping[str, Any], tasks: Mapping[str, tuple[str, ...]]) -> int:
    """Returns the index of this process among all workers, from the `task` entry."""
    task = _object(name, content.get("task"), "task")
    role, index = _role(name, str(task.get("type"))), task.get("index", 0)
    if role in ("ps", "evaluator", "tpu"):
        raise UserError(f"{name}: this task is a {role}: {_SUPPORTED}")
    if role not in tasks:
        raise UserError(f"{name}: task.type is {role}, but the cluster has {', '.join(tasks)}")
    if isinstance(index, str) and index.isdecimal():
        index = int(index[:9])
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(tasks[role]):
        raise UserError(
            f"{name}: task.index is {str(index)[:20]}, but the cluster has {len(tasks[role])} of {role}: "
            f"use 0 to {len(tasks[role]) - 1}"
        )
    return index if role == "chief" else index + len(tasks.get("chief", ()))
