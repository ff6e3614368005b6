"""Checks a CustomJobSpec by itself: what Vertex AI, or this trainer, would refuse of it, and what would waste money.

gcloud sends nearly anything, and the API's error comes late and is terse. schema.yaml has what concerns one field; here
is what fields have to do with each other, and with the table of machines.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.tiers.machine_table import Machine, load_machines
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.yaml_file import read_yaml

Spec = Mapping[str, Any]

_TABLES = read_yaml(Path(__file__).with_name("schema.yaml"), "schema.yaml")
MESSAGES: Mapping[str, Mapping[str, str]] = _TABLES["messages"]
ENUMS: Mapping[str, tuple[str, ...]] = {name: tuple(values) for name, values in _TABLES["enums"].items()}
_SCALARS: Mapping[str, tuple[type | tuple[type, ...], str, str]] = {  # types, the form of their text, what to do
    "string": (str, r"(?s:.*)", "must be text: put it in quotes"),
    "bool": (bool, r".*", "must be true or false, without quotes"),
    "int32": ((int, str), r"[0-9]{1,9}", "must be a whole number of up to 9 digits"),
    "int64": ((int, str), r"[0-9]{1,18}", "must be a whole number of up to 18 digits"),
    "Duration": (str, r"[0-9]{1,11}(\.[0-9]{1,9})?s", 'must be text in seconds, as "3600s", of up to 11 digits'),
}
LEAST_TIMEOUT_S = 60
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/schedule-jobs-dws
FLEX_START = re.compile(r"NVIDIA_(L4|TESLA_A100|A100_80GB|H100_80GB|H100_MEGA_80GB|H200_141GB|B200)")


def check_spec(spec: Spec, name: str) -> None:
    """Raises UserError, which begins with `name`, for the first thing that is wrong with a CustomJobSpec."""
    check_shape(spec, name)
    problem = next(_problems(spec), None)
    if problem:
        raise UserError(f"{name}: {problem}")


def check_shape(spec: Spec, name: str) -> None:
    """Raises UserError, which begins with `name`, for an unknown field and for a value of the wrong type."""
    _check_value(spec, "CustomJobSpec", name)


def check_format(field: str, text: Any, where: str) -> None:
    """Raises UserError, naming the place `where`, unless the text has the form that schema.yaml says of a field."""
    pattern, advice = _TABLES["formats"][field]
    if not re.fullmatch(pattern, str(text)):
        raise UserError(f"{where}={text}: {advice}")


def _check_value(value: Any, kind: str, where: str) -> None:
    """Raises UserError with the location `where` for the first part of `value` that does not fit the type `kind`."""
    if kind.endswith("[]"):
        if not isinstance(value, list):
            raise UserError(f"{where}: must be a list, not {_shown(value)}: begin each item with '- '")
        for index, item in enumerate(value):
            _check_value(item, kind[:-2], f"{where}[{index}]")
    elif kind in MESSAGES:
        fields = MESSAGES[kind]
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: must be 'key: value' lines ({', '.join(fields)}), not {_shown(value)}")
        for key, inner in value.items():
            if key not in fields:
                hint = nearest(str(key), fields)
                raise UserError(f"{where}: unknown key {str(key)!r}{hint} Known: {', '.join(fields)}")
            place = f"{where}.{key}" if kind != "CustomJobSpec" else f"{where}: {key}"
            _check_value(inner, fields[key], place)
            if f"{kind}.{key}" in _TABLES["formats"]:
                check_format(f"{kind}.{key}", inner, place)
        for key, advice in _TABLES["required"].get(kind, {}).items():
            if not value.get(key):
                raise UserError(f"{where}: {key} is missing: {advice}")
    elif kind in ENUMS:
        if not isinstance(value, str) or value not in ENUMS[kind]:
            # A100 is in the names of two accelerators, spelt unlike each other.
            model = set(str(value).upper().replace("-", "_").split("_")) - {"NVIDIA", "TESLA", "80GB"}
            alike = [name for name in ENUMS[kind] if model & set(name.split("_"))]
            hint = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else nearest(str(value), ENUMS[kind])
            raise UserError(f"{where}={value}: unknown name{hint} Known: {', '.join(ENUMS[kind])}")
    else:
        types, pattern, advice = _SCALARS[kind]
        if not isinstance(value, types) or not re.fullmatch(pattern, str(value)):
            raise UserError(f"{where}={_shown(value)}: {advice}")


def _shown(value: Any) -> str:
    """Returns the value as written in the file."""
    return json.dumps(value, default=str, skipkeys=True)


def _problems(spec: Spec) -> Iterator[str]:
    """Yields what is wrong with a spec of the right shape; a line assumes that those before it do not hold."""
    pools = spec.get("workerPoolSpecs", [])
    if not pools:
        yield "workerPoolSpecs is empty: pool 0 holds the chief"
    for place, pool in enumerate(pools):
        yield from _of_pool(place, pool, f"workerPoolSpecs[{place}]")
        yield from _of_machine(pool["machineSpec"], f"workerPoolSpecs[{place}].machineSpec")
    if len({"containerSpec" in pool for pool in pools[:2]}) > 1:
        yield "workerPoolSpecs: one pool names an image and the other does not: give both one, or none"
    yield from _of_scheduling(spec.get("scheduling", {}), [machine_of(pool) for pool in pools])
    if "tensorboard" in spec and "serviceAccount" not in spec:
        yield (
            "tensorboard without serviceAccount: the job could not write to it: add serviceAccount: NAME@PROJECT.iam."
            "gserviceaccount.com to the tier"
        )


def machine_of(pool: Spec) -> tuple[str, str, int]:
    """Returns the type of a pool's machines, their accelerator, and how many of them one has."""
    machine = pool.get("machineSpec", {})
    count = int(machine.get("acceleratorCount", 0))
    return machine.get("machineType", ""), machine.get("acceleratorType", ""), count


def _of_pool(place: int, pool: Spec, where: str) -> Iterator[str]:
    task, replicas = pool.get("containerSpec") or pool.get("pythonPackageSpec", {}), int(pool.get("replicaCount", 1))
    if ("containerSpec" in pool) == ("pythonPackageSpec" in pool):
        yield f"{where}: give one of containerSpec (your own image) and pythonPackageSpec"
    if place == 0 and replicas != 1:
        yield f"{where}.replicaCount={replicas}: pool 0 is the chief alone, so 1: move others to workerPoolSpecs[1]"
    for key in [key for key in ("executorImageUri", "packageUris") if key in task]:
        yield (
            f"{where}.pythonPackageSpec: {key} is for Google's prebuilt images of TensorFlow, which have ended: leave "
            "it out, and each start installs what the job needs, or name your image, as containerSpec: {imageUri: …}"
        )


def _of_machine(machine: Spec, where: str) -> Iterator[str]:
    table, (kind, accelerator, count) = load_machines(), machine_of({"machineSpec": machine})
    host = table.machines.get(kind)
    if host is None:
        alike = " or ".join([name for name in table.machines if name.startswith(kind)][:3])
        hint = f"; did you mean {alike}?" if alike else nearest(kind, table.machines)
        yield (
            f"{where}.machineType={kind}: no such machine{hint} `python -m deploy machines --all` lists those with "
            "prices"
        )
    if accelerator and accelerator not in table.accelerators:
        yield (
            f"{where}.acceleratorType={accelerator}: not supported by this trainer: use one of "
            f"{', '.join(table.accelerators)}"
        )
    if bool(accelerator) != bool(count):
        yield f"{where}: acceleratorType={accelerator or None} and acceleratorCount={count}: give both, or neither"
    if host and (accelerator or not host.attached) and count not in host.counts.get(accelerator, ()):
        yield f"{where}: {_other_machines(host, accelerator, count)}"


def _other_machines(host: Machine, accelerator: str, count: int) -> str:
    """Returns what the machine takes instead of so many accelerators, and which machines have these."""
    has = " or ".join(f"{name} x {'/'.join(map(str, counts))}" for name, counts in host.counts.items())
    text = f"{accelerator} x {count}" if accelerator else "none"
    machines = load_machines().machines.items()
    others = [name for name, machine in machines if count in machine.counts.get(accelerator, ())]
    advice = f"; {text} comes with {' or '.join(others[:3])}" if others else ""
    return f"{host.name} takes {has or 'no accelerators'}, not {text}{advice}"


def _of_scheduling(scheduling: Spec, machines: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    strategy, timeout = scheduling.get("strategy", "STANDARD"), scheduling.get("timeout", "86400s")
    flexible = strategy == "FLEX_START"
    if flexible and "maxWaitDuration" not in scheduling:
        yield (
            "scheduling.strategy=FLEX_START without maxWaitDuration waits up to a day: limit the wait for machines, as "
            'maxWaitDuration: "14400s"'
        )
    if float(timeout[:-1]) < LEAST_TIMEOUT_S:
        yield f'scheduling.timeout={timeout} ends the job at once, since starting takes minutes: write "86400s"'
    for kind, accelerator, _ in machines:
        host = load_machines().machines.get(kind)
        if host and host.strategies and strategy not in host.strategies:
            yield (
                f"scheduling.strategy={strategy}: {kind} may be had only as {' or '.join(host.strategies)}: set the "
                "strategy, or take a larger machine"
            )
        if flexible and not FLEX_START.fullmatch(accelerator):
            yield (
                f"scheduling.strategy=FLEX_START: not for {accelerator or 'machines without GPUs'}, only for L4, A100, "
                "H100, H200 and B200: drop the strategy, or use SPOT"
            )


def check_same_region(name: str, resource: str, region: str) -> None:
    """Raises UserError if a resource, as projects/PROJECT/locations/REGION/…, is in another region than the job."""
    if resource.split("/")[3] != region:
        raise UserError(
            f"{name}={resource} is in {resource.split('/')[3]}, and the job would run in {region}: use one of that "
            "region"
        )
