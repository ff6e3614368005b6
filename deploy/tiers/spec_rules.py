"""Checks of a CustomJobSpec beyond its shape: what Vertex AI, or this trainer, would refuse or fail on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deploy.tiers.machine_table import load_machines
from trainer.base.errors import UserError
from trainer.base.settings.fields import nearest

Spec = Mapping[str, Any]

LONGEST_S = 315_576_000_000  # of a Duration: https://protobuf.dev/reference/protobuf/google.protobuf/#duration
LEAST_TIMEOUT_S = 60
FLEX_START_LONGEST_S = 604_800
# https://docs.cloud.google.com/vertex-ai/docs/training/schedule-jobs-dws
_FLEX_START = re.compile(r"NVIDIA_(L4|TESLA_A100|A100_80GB|H100_80GB|H100_MEGA_80GB|H200_141GB|B200)")
_IMAGE = re.compile(
    r"([a-z0-9]+([.-][a-z0-9]+)*(:\d+)?/)?[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][\w.-]{0,127})?(@sha256:[a-f0-9]{64})?"
)  # https://pkg.go.dev/github.com/distribution/reference


class PoolMachines(Protocol):
    """Represents a worker pool's machines."""

    @property
    def machine_type(self) -> str:
        """Returns the machine type."""

    @property
    def accelerator_type(self) -> str | None:
        """Returns the accelerator, or None."""

    @property
    def accelerators(self) -> int:
        """Returns the number of accelerators of each machine."""


def check_image(where: str, image: str) -> str:
    """Returns `image`. Raises UserError, naming the place `where`, unless it can be an image's address."""
    if image.startswith(("http://", "https://", "docker://")):
        raise UserError(f"{where}={image}: leave out {image.partition('//')[0]}//: an image's address has no scheme")
    if not _IMAGE.fullmatch(image):
        raise UserError(
            f"{where}={image}: not an image: write REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME:TAG, in small letters"
        )
    return image


def check_scheduling(scheduling: Spec, name: str) -> None:
    """Raises UserError for a strategy or a time that Vertex AI does not take."""
    strategy = scheduling.get("strategy")
    newer = {"ON_DEMAND": "STANDARD", "LOW_COST": "SPOT"}
    if strategy in newer:
        raise UserError(f"{name}: scheduling.strategy={strategy} is deprecated: write {newer[strategy]}")
    if strategy == "FLEX_START" and "maxWaitDuration" not in scheduling:
        raise UserError(
            f"{name}: scheduling.strategy=FLEX_START without maxWaitDuration waits up to a day: limit the wait "
            'for machines, as maxWaitDuration: "14400s"'
        )
    if "maxWaitDuration" in scheduling and strategy != "FLEX_START":
        raise UserError(f"{name}: scheduling.maxWaitDuration needs strategy: FLEX_START: drop it, or set the strategy")
    for key in ("timeout", "maxWaitDuration"):
        if float(scheduling.get(key, "1s")[:-1]) > LONGEST_S:
            raise UserError(
                f"{name}: scheduling.{key}={scheduling[key]} exceeds the longest time of the API, {LONGEST_S}s: "
                f'write {key}: "86400s"'
            )
    if float(scheduling.get("timeout", "86400s")[:-1]) < LEAST_TIMEOUT_S:
        raise UserError(
            f"{name}: scheduling.timeout={scheduling['timeout']} ends the job at once, since starting takes minutes: "
            'write "86400s"'
        )


def check_strategy(spec: Spec, pools: Sequence[PoolMachines], name: str) -> None:
    """Raises UserError for machines that the scheduling strategy does not have."""
    scheduling = spec.get("scheduling", {})
    strategy = scheduling.get("strategy", "STANDARD")
    kinds = {(pool.machine_type, pool.accelerator_type, pool.accelerators) for pool in pools}
    if strategy == "FLEX_START" and len(kinds) > 1:
        raise UserError(
            f"{name}: scheduling.strategy=FLEX_START needs the same machines in every pool: make them equal"
        )
    for pool in pools:
        machine = load_machines().machines.get(pool.machine_type)
        if machine and machine.strategies and strategy not in machine.strategies:
            raise UserError(
                f"{name}: scheduling.strategy={strategy}: {pool.machine_type} may be had only as "
                f"{' or '.join(machine.strategies)}: set the strategy, or take a larger machine"
            )
        if strategy == "FLEX_START" and not _FLEX_START.fullmatch(pool.accelerator_type or ""):
            raise UserError(
                f"{name}: scheduling.strategy=FLEX_START: not for {pool.accelerator_type or 'machines without GPUs'}, "
                "only for L4, A100, H100, H200 and B200: drop the strategy, or use SPOT"
            )
    if strategy == "FLEX_START" and float(scheduling.get("timeout", "0s")[:-1]) > FLEX_START_LONGEST_S:
        raise UserError(
            f"{name}: scheduling.timeout={scheduling['timeout']}: a job of FLEX_START runs for 7 days at most: "
            f'write "{FLEX_START_LONGEST_S}s" or less'
        )


def check_disk(disk: Spec, where: str) -> None:
    """Raises UserError for a disk that no machine has."""
    size, kind = int(disk.get("bootDiskSizeGb", 100)), disk.get("bootDiskType", "pd-ssd")
    kinds = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
    if not 100 <= size <= 64000:
        raise UserError(f"{where}.diskSpec.bootDiskSizeGb={size}: a boot disk has 100 to 64000 GB")
    if kind not in kinds:
        raise UserError(f"{where}.diskSpec.bootDiskType={kind}: no such disk{nearest(kind, kinds)} {', '.join(kinds)}")


def check_task(place: int, pool: Spec, where: str) -> None:
    """Raises UserError for a pool whose image, module, variables or reservation cannot work."""
    kind = "containerSpec" if "containerSpec" in pool else "pythonPackageSpec"
    task = pool[kind]
    if place == 2 and "reductionserver" not in task.get("imageUri", ""):
        raise UserError(
            f"{where}: this trainer has no parameter servers: pool 2 is for a Reduction Server's image only"
        )
    image = "imageUri" if kind == "containerSpec" else "executorImageUri"
    required = [image] if image in task or kind == "containerSpec" else []
    for key in (*required, *(["pythonModule"] if kind == "pythonPackageSpec" else [])):
        if not task.get(key):
            example = "pythonModule: trainer.task" if key == "pythonModule" else f"{key}: and its address"
            raise UserError(f"{where}.{kind}: {key} is missing: write {example}")
    if image in task:
        _check_task_image(f"{where}.{kind}.{image}", task[image], pool)
    elif task.get("packageUris"):
        raise UserError(f"{where}.{kind}: packageUris without {image}: name the image that installs them")
    _check_environment(task.get("env", []), where)
    scheduled = pool.get("machineSpec", {}).get("reservationAffinity", {})
    if scheduled.get("reservationAffinityType") == "SPECIFIC_RESERVATION":
        _check_reservation(scheduled, f"{where}.machineSpec.reservationAffinity")


def _check_task_image(where: str, image: str, pool: Spec) -> None:
    check_image(where, image)
    if pool.get("machineSpec", {}).get("acceleratorType") and re.search(r"vertex-ai/training/[\w.-]*-cpu\.", image):
        raise UserError(
            f"{where}={image}: this image is for CPUs: its TensorFlow would leave the GPUs idle: use the one with gpu "
            "in its name"
        )


def _check_environment(variables: Sequence[Spec], where: str) -> None:
    names: list[str] = []
    for variable in variables:
        name = variable.get("name", "")
        if not name or name in ("TF_CONFIG", "CLUSTER_SPEC") or name.startswith(("AIP_", "CLOUD_ML_")):
            raise UserError(f"{where}: env name={name!r}: Vertex AI sets this itself: use another name, or drop it")
        if name in names:
            raise UserError(f"{where}: env name={name!r} is there twice: keep one of them")
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"{where}: env name={name!r}: a variable has letters, digits and _ only: rename it")
        names.append(name)


def _check_reservation(affinity: Spec, where: str) -> None:
    key = "compute.googleapis.com/reservation-name"
    names = affinity.get("values", [])
    if affinity.get("key") != key or not names:
        raise UserError(f"{where}: SPECIFIC_RESERVATION needs key: {key}, and values: the reservation's full name")
    for name in names:
        if not re.fullmatch(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+", name):
            raise UserError(f"{where}.values={name}: write projects/PROJECT/zones/ZONE/reservations/NAME")


def check_access(spec: Spec, name: str) -> None:
    """Raises UserError for a service account, a network or a reservation that cannot be used."""
    account, network = spec.get("serviceAccount", ""), spec.get("network", "")
    if "serviceAccount" in spec and not re.fullmatch(r"[a-z0-9][\w.-]*@[\w.-]+\.gserviceaccount\.com", account):
        raise UserError(
            f"{name}: serviceAccount={account}: write NAME@PROJECT.iam.gserviceaccount.com: `gcloud iam "
            "service-accounts list` shows them"
        )
    if "network" in spec and not re.fullmatch(r"projects/\d+/global/networks/[a-z][a-z0-9-]*", network):
        raise UserError(
            f"{name}: network={network}: write projects/NUMBER/global/networks/NAME with the project's number, which "
            "`gcloud projects describe PROJECT` shows; without the key a job has a network of its own"
        )
    if "network" in spec and "pscInterfaceConfig" in spec:
        raise UserError(f"{name}: network and pscInterfaceConfig contradict each other: keep one of them")
    strategy = spec.get("scheduling", {}).get("strategy", "STANDARD")
    for place, pool in enumerate(spec.get("workerPoolSpecs", [])):
        affinity = pool.get("machineSpec", {}).get("reservationAffinity", {}).get("reservationAffinityType")
        if affinity == "SPECIFIC_RESERVATION" and strategy != "STANDARD":
            raise UserError(
                f"{name}: workerPoolSpecs[{place}]: SPECIFIC_RESERVATION and strategy: {strategy} contradict each "
                "other: drop one of them"
            )
