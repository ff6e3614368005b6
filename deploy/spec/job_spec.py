"""A tier and the trainer's flags become the full CustomJobSpec, or one line that says why that job could only fail."""

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from deploy.spec.checks import UNSEEN, check_devices, check_inputs, check_region, check_tensorboard, warnings
from deploy.spec.gcp_config import GcpConfig, checked_address
from deploy.spec.packages import Package
from deploy.spec.tier import Tier
from trainer.config.flags import read_yaml
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.errors import UserError
from trainer.storage import output_address

START_S = 600  # machines and image take some minutes before training begins


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """What is asked of a job besides tier, place and the trainer's settings.

    `name` is the display name, `folder` that of the job directory below the bucket's jobs/, `max_cost` in USD.
    """

    name: str
    folder: str
    packages: tuple[Package, ...] = ()
    image: str = ""
    max_cost: float | None = None
    disable_retries: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """What is ready to be sent. `name` is the display name, `output` the job directory, `warnings` lines to print."""

    name: str
    tier: Tier
    gcp: GcpConfig
    config: TrainConfig
    output: str
    spec: Mapping[str, Any]
    packages: tuple[Package, ...]
    warnings: tuple[str, ...]


def render(tier: Tier, flags: Sequence[str], gcp: GcpConfig, wanted: JobOptions) -> Job:
    """The job that the trainer's `flags` describe, on `tier`; UserError for one that is known to fail."""
    tier = _limited(tier, wanted)
    own_image = bool(wanted.image) or "containerSpec" in tier.spec["workerPoolSpecs"][0]
    packages = () if own_image else wanted.packages
    config = settings_on(tier, flags)
    check_region(tier, gcp)
    if not own_image:
        check_inputs(config, [package.name for package in packages])
    spec = copy.deepcopy(dict(tier.spec))
    arguments = [*_for_the_machines(flags), f"--expect_devices={tier.accelerators}"]
    images = set()
    for pool in tier.pools:
        if pool.index < 2:  # a Reduction Server takes no arguments of ours
            task = _task(spec["workerPoolSpecs"][pool.index], wanted.image)
            images.add(task.get("executorImageUri") or task.get("imageUri", ""))
            task["args"] = [*task.get("args", []), *arguments]
            if packages:
                task["packageUris"] = [package.uri(gcp.bucket) for package in packages]
    output = _output(spec, config, gcp, wanted.folder)
    spec["baseOutputDirectory"] = {"outputUriPrefix": output}
    check_tensorboard(spec, gcp)
    return Job(wanted.name, tier, gcp, config, output, spec, packages, tuple(warnings(tier, config, images)))


def training(config: TrainConfig) -> str:
    """What is trained, in a line."""
    count, unit = (config.steps, "step") if config.steps else (config.epochs or 1, "epoch")
    length = f"{count:,} {unit}{'s' if count > 1 else ''}"
    by_default = not config.recipe and config.model == TrainConfig.model
    trains = f"no recipe: trains {config.model} (the default)" if by_default else f"trains {config.model}"
    return f"{trains} on {config.data}, global batch {config.global_batch_size}, {length}"


def to_yaml(spec: Mapping[str, Any]) -> str:
    """What `gcloud ai custom-jobs create --config` reads."""
    return yaml.safe_dump(dict(spec), sort_keys=False, width=1_000_000)


def _limited(tier: Tier, wanted: JobOptions) -> Tier:
    """The tier with the timeout that `max_cost` pays for, and without retries where that is wanted."""
    scheduling = dict(tier.spec.get("scheduling", {}))
    if wanted.disable_retries:
        scheduling["disableRetries"] = True
    if wanted.max_cost is not None:
        scheduling["timeout"] = f"{_seconds_for(wanted.max_cost, tier)}s"
    return dataclasses.replace(tier, spec={**tier.spec, "scheduling": scheduling}) if scheduling else tier


def _seconds_for(max_cost: float, tier: Tier) -> int:
    hourly = tier.price_per_hour
    if hourly is None:
        raise UserError(f"max_cost={max_cost:g}: the price of {tier.name} is not known: say it with --prices=FILE")
    seconds = math.floor(max_cost / hourly * 3600)
    if seconds < START_S:
        raise UserError(
            f"max_cost={max_cost:g} pays for {seconds} s of {tier.name} ({hourly:.2f} USD an hour), and a job takes "
            f"minutes to start: give {hourly * START_S / 3600:.2f} or more, or take a cheaper tier"
        )
    return min(seconds, int(tier.timeout_s))


def settings_on(tier: Tier, flags: Sequence[str]) -> TrainConfig:
    """What the trainer on `tier` will make of its arguments; it refuses here what it would refuse there."""
    expect = f"--expect_devices={tier.accelerators}"
    for flag in flags:
        if flag.startswith("--expect_devices=") and flag != expect:
            raise UserError(f"{flag}: the workers of {tier.name} have {tier.accelerators} accelerators: drop the flag")
    pool = tier.spec["workerPoolSpecs"][0]
    in_file = (pool.get("pythonPackageSpec") or pool.get("containerSpec") or {}).get("args", [])
    request = resolve([*in_file, *flags, expect])
    if request.print_config:
        raise UserError("--print_config trains nothing: say it to `python -m trainer.task`")
    check_devices(tier, request.config)
    return request.config


def _for_the_machines(flags: Sequence[str]) -> list[str]:
    """The flags as the machines need them: the output has a place of its own, and a recipe's file is not there."""
    values = dict(flag[2:].split("=", 1) for flag in flags if "=" in flag)
    recipe = values.get("recipe", "")
    if not (recipe.endswith((".yaml", ".yml")) or "/" in recipe):
        return [flag for flag in flags if not flag.startswith("--job_dir=")]
    given = {flag[2:].split("=", 1)[0] for flag in flags}
    if given & {"steps", "epochs"}:
        given |= {"steps", "epochs"}
    settings = read_yaml(Path(recipe), f"recipe={recipe}")
    left = {key: value for key, value in settings.items() if key not in given and value is not None}
    from_recipe = [f"--{key}={_text(value)}" for key, value in left.items()]
    return [*from_recipe, *(flag for flag in flags if not flag.startswith(("--job_dir=", "--recipe=")))]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _task(pool: dict[str, Any], image: str) -> dict[str, Any]:
    """The pool's pythonPackageSpec or containerSpec; with an image it becomes the latter."""
    if image:
        before = pool.pop("pythonPackageSpec", None) or pool.get("containerSpec", {})
        pool["containerSpec"] = {"imageUri": image, **{key: before[key] for key in ("args", "env") if key in before}}
    task: dict[str, Any] = pool.get("containerSpec") or pool["pythonPackageSpec"]
    return task


def _output(spec: Mapping[str, Any], config: TrainConfig, gcp: GcpConfig, folder: str) -> str:
    """The job directory: --job_dir, the tier's baseOutputDirectory, or a new folder in the bucket."""
    if config.job_dir:
        address = output_address(config.job_dir, "job_dir")
        if address is None:
            raise UserError(f"job_dir={config.job_dir}: {UNSEEN}: say --job_dir=gs://BUCKET/FOLDER, or drop the flag")
        return checked_address("job_dir", str(address))
    in_file = spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "")
    return checked_address("baseOutputDirectory", in_file) if in_file else f"{gcp.bucket}/jobs/{folder}"
