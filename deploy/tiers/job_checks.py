"""Checks on the user's machine what would waste money: jobs that could only fail, or do not use what is paid for.

spec_rules.py checks the machine spec of a tier by itself.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.tiers.gcp_config import checked_address
from deploy.tiers.machine_table import load_machines
from deploy.tiers.packages import TRAINER, Package
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.settings.own_settings import is_dotted, taken_by
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig, split_kind

SPOT_INTERVAL_S = 15 * 60  # the most work that a preemption should cost


def check_devices(tier: Tier, config: TrainConfig) -> None:
    """Raises UserError unless every accelerator that is paid for is used and the batch divides over them."""
    if tier.accelerators and config.replicas > tier.accelerators:
        raise UserError(
            f"replicas={config.replicas}: a worker of {tier.name} has {tier.accelerators} accelerators: drop the flag, "
            "or take a larger tier"
        )
    if tier.workers > 1 and config.strategy in ("one_device", "mirrored"):
        raise UserError(
            f"strategy={config.strategy}: the {tier.workers} workers of {tier.name} would each train alone: drop it"
        )
    if tier.workers == 1 and config.strategy == "multi_worker":
        raise UserError(f"strategy=multi_worker: {tier.name} has one worker: drop the flag, or take a tier of several")
    devices = tier.workers * (config.replicas or tier.accelerators or 1)
    try:
        config.rows_per_replica(devices)
    except UserError as error:
        raise UserError(f"{tier.name}: {error}") from None


# Values of inputs that name something which the image has or can fetch; the others may be empty.
_NAMED = {"data": DATA_SOURCES, "weights": ("imagenet", "none"), "fid_features": ("inception",),
          "fid_weights": ("imagenet",)}  # fmt: skip


def check_inputs(config: TrainConfig, packages: Sequence[Package]) -> None:
    """Raises UserError if a setting names something that the job cannot reach, such as this machine's disk."""
    for field in (*config.inputs, "model", "callbacks"):
        value = getattr(config, field)
        address = value[value.find("gs:/") :]
        if value in _NAMED.get(field, ("",)):
            continue
        if address.startswith("gs:/"):
            checked_address(field, address)
        elif is_dotted(value):
            check_module(field, value, value.split(":")[0], packages)
        elif field in config.inputs and not value.split(":")[-1].startswith("/gcs/"):
            kind, path = split_kind(value)
            remote = f"{kind}{':' if kind else ''}gs://BUCKET/{Path(path).name}"
            copy = f"gcloud storage cp -r {shlex.quote(path)} gs://BUCKET/"
            raise UserError(f"{field}={value}: {UNREACHABLE}: copy it with `{copy}` and use --{field}={remote}")


UNREACHABLE = "the job's machines cannot read this disk, only gs://BUCKET/… and /gcs/BUCKET/…"


def check_module(field: str, value: str, module: str, packages: Sequence[Package], *, runs: bool = False) -> None:
    """Raises UserError unless the packages of the job contain the module, which `runs` as a program."""
    top, path = module.split(".")[0], module.replace(".", "/")
    package = next((package for package in packages if package.name == (TRAINER if top == "trainer" else top)), None)
    if package is None and (top != "trainer" or packages):
        raise UserError(
            f"{field}={value}: the module {top} is not in the job: use --package=FOLDER or {top}.py, or an --image= "
            "with it"
        )
    files = {f"{path}.py", f"{path}/__main__.py" if runs else f"{path}/__init__.py"}
    if package and package.files and not files & package.files.keys():
        raise UserError(
            f"{field}={value}: the module {module} is not in the package {top}: check its name, and .gitignore"
        )


def warnings(tier: Tier, config: TrainConfig) -> Iterator[str]:
    """Yields warnings of what is allowed but may be a mistake."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        own = taken_by(field) and field.name not in config.inputs and isinstance(value, str)  # a setting of the user's
        if own and (Path(value).is_file() or ("/" in value and Path(value).exists())):
            yield f"{field.name}={value}: this path exists here, but {UNREACHABLE}"
    steps, minutes = config.checkpoint_every_steps, config.checkpoint_every_minutes  # 0: not by these
    if tier.strategy == "SPOT" and not (0 < steps <= SPOT_INTERVAL_S or 0 < minutes <= SPOT_INTERVAL_S / 60):
        yield (
            f"SPOT with checkpoint_every_steps={steps} and checkpoint_every_minutes={minutes:g}: a preemption may lose "
            f"more than {SPOT_INTERVAL_S // 60} minutes: use --checkpoint_every_minutes={SPOT_INTERVAL_S // 60}"
        )
    accelerator = load_machines().accelerators.get(tier.accelerator_type)
    if accelerator and "no bfloat16" in accelerator.note and config.precision == "mixed_bfloat16":
        yield f"precision=mixed_bfloat16: {accelerator.name} computes that slowly: use --precision=mixed_float16"


def warnings_of_script(tier: Tier) -> Iterator[str]:
    """Yields warnings of what is allowed in a job of a user's script but may be a mistake."""
    if tier.strategy == "SPOT":
        yield (
            "SPOT: the script is ended by SIGTERM and started again: only what it saved itself, as in "
            "AIP_CHECKPOINT_DIR, is left"
        )
