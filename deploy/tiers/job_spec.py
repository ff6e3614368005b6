"""Builds the full CustomJobSpec of what is to run on a tier, or reports why that job could only fail."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import yaml

from deploy.tiers.availability import check_region, other_prices
from deploy.tiers.gcp_config import GcpConfig, checked_address
from deploy.tiers.images import Image
from deploy.tiers.job_checks import UNREACHABLE, check_devices
from deploy.tiers.job_request import JobOptions, JobRequest, TrainingRequest
from deploy.tiers.job_tracking import tensorboard_name
from deploy.tiers.packages import Package
from deploy.tiers.script import Script, ScriptRequest
from deploy.tiers.spec_rules import check_format, check_same_region
from deploy.tiers.tier import Tier
from trainer.base.errors import UserError
from trainer.base.settings.resolution import Overrides
from trainer.base.storage import output_address

START_S = 600  # starting the machines and pulling the image take some minutes


# What is asked of a job, before it is known what that means on a tier.
Program = Overrides | Script


@dataclasses.dataclass(frozen=True)
class RenderedJob:
    """Holds a job that is ready to be submitted: its display name, job directory (`output`), spec and warnings."""

    name: str
    tier: Tier
    gcp: GcpConfig
    request: JobRequest
    output: str
    spec: Mapping[str, Any]
    packages: tuple[Package, ...]
    image: Image
    about: tuple[str, ...]  # its image
    warnings: tuple[str, ...]
    options: JobOptions


def request_on(tier: Tier, program: Program) -> JobRequest:
    """Returns what the program means on `tier`. Raises UserError for what the trainer would refuse there."""
    if isinstance(program, Script):
        return ScriptRequest(tier, program)
    overrides, expected = program, tier.accelerators
    if overrides.values.get("expect_devices", expected) != expected:
        count = overrides.values["expect_devices"]
        raise UserError(
            f"--expect_devices={count}: the workers of {tier.name} have {expected} accelerators: drop the flag"
        )
    pool = tier.spec["workerPoolSpecs"][0]
    arguments = (pool.get("pythonPackageSpec") or pool.get("containerSpec") or {}).get("args", [])
    in_file = Overrides.parse(arguments, overrides.first) if arguments else Overrides(first=overrides.first)
    config = in_file.replace(**{**overrides.values, "expect_devices": expected}).resolve()
    check_devices(tier, config)
    return TrainingRequest(tier, overrides, config)


def render(request: JobRequest, gcp: GcpConfig, options: JobOptions) -> RenderedJob:
    """Returns the job of a request; builds its packages. Raises UserError if it is known to fail."""
    request = dataclasses.replace(request, tier=_limited(request.tier, options))
    tier, image = request.tier, request.choose_image(options)
    check_region(tier, gcp)
    if options.kms_key:
        check_format("EncryptionSpec.kmsKeyName", options.kms_key, "kms_key")
        check_same_region("kms_key", options.kms_key, gcp.region)
    spec = copy.deepcopy(dict(tier.spec))
    output = _output(spec, request, gcp, options.folder)
    spec["baseOutputDirectory"] = {"outputUriPrefix": output}
    if options.tensorboard:
        spec["tensorboard"] = tensorboard_name(options.tensorboard, spec, gcp)
    if "tensorboard" in spec:
        check_same_region("tensorboard", spec["tensorboard"], gcp.region)
    written = request.write(spec, gcp, options, image)
    name = options.name or f"{options.subject}-{tier.name}-{options.submission}"
    about = (*filter(None, [image.about]), *written.about)
    warned = (*other_prices(tier, gcp.region), *written.warnings)
    return RenderedJob(name, tier, gcp, request, output, spec, written.packages, image, about, warned, options)


def to_yaml(spec: Mapping[str, Any]) -> str:
    """Returns the spec as `gcloud ai custom-jobs create --config` reads it."""
    return yaml.dump(dict(spec), Dumper=_Dumper, sort_keys=False, width=1_000_000)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, so that a program in a spec can be read."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _limited(tier: Tier, options: JobOptions) -> Tier:
    """Returns the tier with the timeout that `max_cost` pays for, the longest wait, and without retries if disabled."""
    scheduling = dict(tier.spec.get("scheduling", {}))
    if options.disable_retries:
        scheduling["disableRetries"] = True
    if options.max_wait_s is not None and tier.strategy == "FLEX_START":
        scheduling["maxWaitDuration"] = f"{math.ceil(options.max_wait_s)}s"
    if options.max_cost is not None:
        hourly = tier.price_per_hour
        if hourly is None:
            raise UserError(
                f"max_cost={options.max_cost:g}: the {tier.price_name} of {tier.name} is not known: give it with "
                "--prices=FILE"
            )
        seconds = math.floor(options.max_cost / hourly * 3600)
        if seconds < START_S:
            raise UserError(
                f"max_cost={options.max_cost:g} pays for {seconds} s of {tier.name} ({hourly:.2f} USD an hour), and a "
                f"job takes minutes to start: give {hourly * START_S / 3600:.2f} or more, or use a cheaper tier"
            )
        scheduling["timeout"] = f"{min(seconds, int(tier.timeout_s))}s"
    return dataclasses.replace(tier, spec={**tier.spec, "scheduling": scheduling}) if scheduling else tier


def _output(spec: Mapping[str, Any], request: JobRequest, gcp: GcpConfig, folder: str) -> str:
    if request.job_dir:
        address = output_address(request.job_dir, "job_dir")
        if address is None:
            raise UserError(
                f"job_dir={request.job_dir}: {UNREACHABLE}: use --job_dir=gs://BUCKET/FOLDER, or drop the flag"
            )
        return checked_address("job_dir", str(address))
    in_file = spec.get("baseOutputDirectory", {}).get("outputUriPrefix", "")
    return checked_address("baseOutputDirectory", in_file) if in_file else f"{gcp.bucket}/jobs/{folder}"
