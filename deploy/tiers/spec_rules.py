"""Checks a CustomJobSpec before it is sent: what Vertex AI or this trainer would refuse, and what
would waste money.

gcloud sends nearly anything, and the API's errors come late and are terse. schema.yaml has the
rules for single fields; this module has those between fields, and between fields and the table of
machines.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.tiers.machine_table import load_machines
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest
from trainer.base.settings.yaml_file import read_yaml

Spec = Mapping[str, Any]

_TABLES = read_yaml(Path(__file__).with_name("schema.yaml"), "schema.yaml")
MESSAGES: Mapping[str, Mapping[str, str]] = _TABLES["messages"]
ENUMS: Mapping[str, tuple[str, ...]] = {
    name: tuple(values) for name, values in _TABLES["enums"].items()
}
# Python types, a pattern, what to write
_SCALARS: Mapping[str, tuple[type | tuple[type, ...], str, str]] = {
    "string": (str, r"(?s:.*)", "must be text: put it in quotes"),
    "bool": (bool, r".*", "must be true or false, without quotes"),
    "int32": ((int, str), r"[0-9]{1,9}", "must be a whole number of up to 9 digits"),
    "int64": ((int, str), r"[0-9]{1,18}", "must be a whole number of up to 18 digits"),
    "Duration": (
        str,
        r"[0-9]{1,11}(\.[0-9]{1,9})?s",
        'must be text in seconds, as "3600s", of up to 11 digits',
    ),
}
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/schedule-jobs-dws
FLEX_START = re.compile(
    r"NVIDIA_(L4|TESLA_A100|A100_80GB|H100_80GB|H100_MEGA_80GB|H200_141GB|B200)"
)


def check_spec(spec: Spec, name: str) -> None:
    """Raises UserError, beginning with `name`, for the first error in a CustomJobSpec."""
    check_value(spec, "CustomJobSpec", name)
    pools = spec["workerPoolSpecs"]
    table = load_machines()
    for place, pool in enumerate(pools):
        # What each worker runs, and how many there are.
        where = f"{name}: workerPoolSpecs[{place}]"
        count = int(pool.get("replicaCount", 1))
        task = task_of(pool)
        ended = next((key for key in ("executorImageUri", "packageUris") if key in task), "")
        if ("containerSpec" in pool) == ("pythonPackageSpec" in pool):
            raise UserError(
                f"{where}: give one of containerSpec (your own image) and pythonPackageSpec"
            )
        if place == 0 and count != 1:
            raise UserError(
                f"{where}.replicaCount={count}: pool 0 is the chief alone, so 1: move others to"
                " workerPoolSpecs[1]"
            )
        if ended:
            raise UserError(
                f"{where}.pythonPackageSpec: {ended} is for Google's prebuilt images of TensorFlow,"
                " which have ended: leave it out, and each start installs what the job needs, or"
                " name your image, as containerSpec: {imageUri: …}"
            )
        # Its machine, and the accelerators that this machine takes.
        where = f"{where}.machineSpec"
        kind, accelerator, gpus = machine_of(pool)
        host = table.machines.get(kind)
        if host is None:
            raise UserError(
                f"{where}.machineType={kind}: no such machine{nearest(kind, table.machines)}"
                " `python -m deploy machines --all` lists those with prices"
            )
        has = " or ".join(
            f"{name} x {'/'.join(map(str, counts))}" for name, counts in host.counts.items()
        )
        requested = f"{accelerator} x {gpus}" if accelerator else "none"
        others = [
            name
            for name, machine in table.machines.items()
            if gpus in machine.counts.get(accelerator, ())
        ]
        advice = f"; {requested} comes with {' or '.join(others[:3])}" if others else ""
        if accelerator and accelerator not in table.accelerators:
            raise UserError(
                f"{where}.acceleratorType={accelerator}: not supported by this trainer: use one of "
                f"{', '.join(table.accelerators)}"
            )
        if bool(accelerator) != bool(gpus):
            raise UserError(
                f"{where}: acceleratorType={accelerator or None} and acceleratorCount={gpus}: give"
                " both, or neither"
            )
        if (accelerator or not host.attached) and gpus not in host.counts.get(accelerator, ()):
            raise UserError(
                f"{where}: {kind} takes {has or 'no accelerators'}, not {requested}{advice}"
            )
    # When it may run, for how long, and as whom.
    scheduling = spec.get("scheduling", {})
    strategy = scheduling.get("strategy", "STANDARD")
    timeout = scheduling.get("timeout", "86400s")
    if len({"containerSpec" in pool for pool in pools[:2]}) > 1:
        raise UserError(
            f"{name}: workerPoolSpecs: one pool names an image and the other does not: give both"
            " one, or none"
        )
    if strategy == "FLEX_START" and "maxWaitDuration" not in scheduling:
        raise UserError(
            f"{name}: scheduling.strategy=FLEX_START without maxWaitDuration waits up to a day:"
            ' limit the wait for machines, as maxWaitDuration: "14400s"'
        )
    affinities = [pool.get("machineSpec", {}).get("reservationAffinity", {}) for pool in pools]
    kinds = {affinity.get("reservationAffinityType", "NO_RESERVATION") for affinity in affinities}
    reserved = "a reservation" if kinds - {"NO_RESERVATION"} else ""
    kept = "persistentResourceId" if spec.get("persistentResourceId") else reserved
    if reserved and kept != reserved:
        raise UserError(
            f"{name}: {kept} with {reserved}: a persistent resource has its machines: drop one"
        )
    if kept and strategy in ("SPOT", "FLEX_START"):
        raise UserError(
            f"{name}: scheduling.strategy={strategy} with {kept}: the one asks for new machines, "
            "the other for those that you have: drop one of them"
        )
    if float(timeout[:-1]) < 60:
        raise UserError(
            f"{name}: scheduling.timeout={timeout} ends the job at once, since starting takes"
            ' minutes: write "86400s"'
        )
    for kind, accelerator, _ in map(machine_of, pools):
        only = table.machines[kind].strategies
        if only and strategy not in only:
            raise UserError(
                f"{name}: scheduling.strategy={strategy}: {kind} may be had only as"
                f" {' or '.join(only)}: set the strategy, or take a larger machine"
            )
        if strategy == "FLEX_START" and not FLEX_START.fullmatch(accelerator):
            raise UserError(
                f"{name}: scheduling.strategy=FLEX_START: not for"
                f" {accelerator or 'machines without GPUs'}, only for L4, A100, H100, H200 and"
                " B200: drop the strategy, or use SPOT"
            )


def check_format(field: str, text: Any, where: str) -> None:
    """Raises UserError, naming `where`, unless the text has the format of `field` in schema.yaml.

    `field`: the key of a format, such as "ContainerSpec.imageUri".
    """
    pattern, advice = _TABLES["formats"][field]
    if not re.fullmatch(pattern, str(text)):
        raise UserError(f"{where}={text}: {advice}")


def check_value(value: Any, kind: str, where: str) -> None:
    """Raises UserError, naming the place, for the first part of `value` that is no `kind`.

    `kind`: a type of schema.yaml; `where`: the place of `value`.
    """
    if kind.endswith("[]"):
        if not isinstance(value, list):
            raise UserError(
                f"{where}: must be a list, not {_shown(value)}: begin each item with '- '"
            )
        for index, item in enumerate(value):
            check_value(item, kind[:-2], f"{where}[{index}]")
    elif kind in MESSAGES:
        fields = MESSAGES[kind]
        if not isinstance(value, Mapping):
            raise UserError(
                f"{where}: must be 'key: value' lines ({', '.join(fields)}), not {_shown(value)}"
            )
        for key, inner in value.items():
            if key not in fields:
                hint = nearest(str(key), fields)
                raise UserError(
                    f"{where}: unknown key {str(key)!r}{hint} Known: {', '.join(fields)}"
                )
            place = f"{where}.{key}" if kind != "CustomJobSpec" else f"{where}: {key}"
            check_value(inner, fields[key], place)
            if f"{kind}.{key}" in _TABLES["formats"]:
                check_format(f"{kind}.{key}", inner, place)
        for key, advice in _TABLES["required"].get(kind, {}).items():
            if not value.get(key):
                raise UserError(f"{where}: {key} is missing: {advice}")
    elif kind in ENUMS:
        if not isinstance(value, str) or value not in ENUMS[kind]:
            # Names are compared by their words: A100 is in the names of two accelerators that are
            # spelt differently.
            model = set(str(value).upper().replace("-", "_").split("_")) - {
                "NVIDIA",
                "TESLA",
                "80GB",
            }
            alike = [name for name in ENUMS[kind] if model & set(name.split("_"))]
            hint = (
                f"; did you mean {' or '.join(map(repr, alike))}?"
                if alike
                else nearest(str(value), ENUMS[kind])
            )
            raise UserError(f"{where}={value}: unknown name{hint} Known: {', '.join(ENUMS[kind])}")
    else:
        types, pattern, advice = _SCALARS[kind]
        if not isinstance(value, types) or not re.fullmatch(pattern, str(value)):
            raise UserError(f"{where}={_shown(value)}: {advice}")


def _shown(value: Any) -> str:
    """Returns a value as JSON, much as it is written in the file."""
    return json.dumps(value, default=str, skipkeys=True)


def machine_of(pool: Spec) -> tuple[str, str, int]:
    """Returns a pool's machine type, accelerator type, and accelerators per machine."""
    machine = pool.get("machineSpec", {})
    count = int(machine.get("acceleratorCount", 0))
    return machine.get("machineType", ""), machine.get("acceleratorType", ""), count


def task_of(pool: Spec) -> Any:
    """Returns what each worker of a pool runs; {} if the spec does not say it."""
    return pool.get("containerSpec") or pool.get("pythonPackageSpec") or {}


def check_same_region(name: str, resource: str, region: str) -> None:
    """Raises UserError if a resource, projects/P/locations/R/…, is in another region.

    `name`: what the message calls the resource.
    """
    if resource.split("/")[3] != region:
        raise UserError(
            f"{name}={resource} is in {resource.split('/')[3]}, and the job would run in {region}:"
            " use one of that region"
        )
