"""Turns a workload on a tier into a checked job that can be sent, or says why it could only fail."""

import copy
import dataclasses
import getpass
import math
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from deploy.job.script import Script, ScriptRun
from deploy.job.workload import (
    TASK,
    UNREACHABLE,
    JobOptions,
    Order,
    Training,
    Workload,
    check_devices,
    tensorboard_name,
)
from deploy.packaging.images import Image, choose_image
from deploy.packaging.packages import Package
from deploy.platform.vertex_api import CustomJob
from deploy.tiers.gcp_config import GcpConfig, check_region, checked_address
from deploy.tiers.machine_table import load_machines
from deploy.tiers.spec_rules import check_format, check_same_region
from deploy.tiers.tier import LABEL, PRICE_LABEL, USER_LABEL, Tier
from trainer.base.errors import UserError
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import output_address

START_S = 600  # starting the machines and pulling the image take some minutes

# Google's settings of NCCL, without which GPUs reach those of other machines through the host alone:
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/configure-compute
NCCL_SETTINGS = "/usr/local/gib/scripts/set_nccl_env.sh"
_SOURCED = (
    f'if [ -f {NCCL_SETTINGS} ]; then . {NCCL_SETTINGS}; echo "NCCL: with the settings of {NCCL_SETTINGS}"; '
    f'else echo "NCCL: {NCCL_SETTINGS} is not in this image: RDMA stays off"; fi; exec "$@"'
)
_NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}  # NCCL then logs which network it takes

# What the user wants to run, before its settings are resolved for a tier.
Program = Overrides | Script


@dataclasses.dataclass(frozen=True)
class Job:
    """Holds a checked job: what runs on its tier, where and under which limits, and its CustomJobSpec.

    `output`: its job directory, gs://…; `about`: lines that describe its image.
    """

    name: str
    workload: Workload
    gcp: GcpConfig
    order: Order
    image: Image
    output: str
    spec: Mapping[str, Any]
    packages: tuple[Package, ...]
    about: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def tier(self) -> Tier:
        """Returns the machines, with the limits of the job."""
        return self.workload.tier

    def request(self, label: str) -> CustomJob:
        """Returns the request that creates the job; its unique `label` finds the job again if the response is lost."""
        usd = self.tier.price_per_hour
        price = {} if usd is None else {PRICE_LABEL: f"{usd:.4f}".replace(".", "-")}
        user = {}
        with suppress(OSError, KeyError):  # the account may have no name
            user = {USER_LABEL: re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63]}
        labels = {**user, **self.order.asked.labels, LABEL: label, **price}
        return CustomJob(self.name, self.spec, labels, self.order.asked.kms_key)


def workload_on(tier: Tier, program: Program) -> Training | ScriptRun:
    """Returns what runs on `tier`, its settings resolved. Raises UserError for what the trainer would refuse there."""
    if isinstance(program, Script):
        about = f"runs {shlex.join(['python', *program.command, *program.words])}"
        return ScriptRun(tier, program, job_dir=program.job_dir, about=about)
    overrides, expected = program, tier.accelerators
    if overrides.values.get("expect_devices", expected) != expected:
        count = overrides.values["expect_devices"]
        raise UserError(
            f"--expect_devices={count}: the workers of {tier.name} have {expected} accelerators: drop the flag"
        )
    pool = tier.spec["workerPoolSpecs"][0]
    arguments = (pool.get("pythonPackageSpec") or pool.get("containerSpec") or {}).get("args", [])
    of_file = Overrides.parse(arguments, overrides.folder)
    config = of_file.replace(**{**overrides.values, "expect_devices": expected}).resolve()
    check_devices(tier, config)
    count, unit = (config.steps, "step") if config.steps else (config.epochs or 1, "epoch")
    by_default = not config.recipe and config.model == TrainConfig.model
    trains = f"no recipe: trains {config.model} (the default)" if by_default else f"trains {config.model}"
    length = f"{count:,} {unit}{'s' if count > 1 else ''}"
    about = f"{trains} on {config.data}, global batch {config.global_batch_size}, {length}"
    return Training(tier, overrides, config, job_dir=config.job_dir, about=about, inputs=config.inputs)


def job_of(work: Workload, gcp: GcpConfig, order: Order) -> Job:
    """Returns the job that runs a workload, and builds its packages. Raises UserError if it is known to fail."""
    work = dataclasses.replace(work, tier=_limited(work.tier, order.asked))
    tier, image = work.tier, choose_image(work.tier, order.asked.image, order.built_image, order.packages)
    check_region(tier, gcp)
    table = load_machines()
    elsewhere = tier.price.inferred and gcp.region != table.region
    if elsewhere and order.asked.max_cost is not None:
        raise UserError(
            f"max_cost={order.asked.max_cost:g}: the prices of {gcp.region} are not known, those of {table.region} "
            f"may be lower: `python -m deploy prices --region={gcp.region}` asks Google and writes a file for "
            "--prices=; or leave out --max_cost and give --timeout"
        )
    if order.asked.kms_key:
        check_format("EncryptionSpec.kmsKeyName", order.asked.kms_key, "kms_key")
        check_same_region("kms_key", order.asked.kms_key, gcp.region)
    spec = copy.deepcopy(dict(tier.spec))
    # The folder is named without the tier: the next one of a fallback resumes from the checkpoints of the last.
    output = f"{gcp.bucket}/jobs/{order.asked.name or f'{order.subject}-{order.submission}'}"
    if work.job_dir:
        address = output_address(work.job_dir, "job_dir")
        if address is None:
            raise UserError(
                f"job_dir={work.job_dir}: {UNREACHABLE}: use --job_dir=gs://BUCKET/FOLDER, or drop the flag"
            )
        output = checked_address("job_dir", str(address))
    elif in_file := spec.get("baseOutputDirectory", {}).get("outputUriPrefix", ""):
        output = checked_address("baseOutputDirectory", in_file)
    spec["baseOutputDirectory"] = {"outputUriPrefix": output}
    if order.asked.tensorboard_instance:
        spec["tensorboard"] = tensorboard_name(order.asked.tensorboard_instance, spec, gcp)
    if "tensorboard" in spec:
        check_same_region("tensorboard", spec["tensorboard"], gcp.region)
    packages, image_lines, warnings = work.write(spec, gcp, order, image)
    machine = table.machines.get(tier.machine_type)
    for pool in spec["workerPoolSpecs"] if tier.workers > 1 and machine and machine.rdma else ():
        task = pool["containerSpec"]  # without a command it is taken to run the trainer
        task["command"] = ["bash", "-c", _SOURCED, "start", *(task.get("command") or ["python", "-m", TASK])]
        variables = _NCCL_LOG | {variable["name"]: variable.get("value", "") for variable in task.get("env", [])}
        task["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    name = order.asked.name or f"{order.subject}-{tier.name}-{order.submission}"
    # The notes of the machine table that concern this job, recognised by a word in each.
    accelerator = table.accelerators.get(tier.accelerator_type)
    applies = {"recommended": tier.strategy == "STANDARD" and not order.asked.reservation, "Arm": True,
            "/gcs": "/gcs/" in str(work.arguments()),
            "no bfloat16": isinstance(work, Training) and work.config.precision == "mixed_bfloat16"}  # fmt: skip
    notes = accelerator.note.split("; ") if accelerator else []
    applicable = (note for note in notes if any(word in note and applies[word] for word in applies))
    warnings = (*warnings, *(f"{tier.accelerator_type}: {note}" for note in applicable))
    if elsewhere:
        warnings = (
            f"no price for {gcp.region}: that of {table.region} is used: `python -m deploy prices "
            f"--region={gcp.region}` asks Google, and writes a file for --prices=",
            *warnings,
        )
    return Job(
        name, work, gcp, order, image, output, spec, packages, (*filter(None, [image.about]), *image_lines), warnings
    )


def _limited(tier: Tier, asked: JobOptions) -> Tier:
    """Returns the tier with the limits of `asked`: the timeout that max_cost pays for, the longest wait, no retries."""
    scheduling = dict(tier.spec.get("scheduling", {}))
    if asked.disable_retries:
        scheduling["disableRetries"] = True
    if asked.max_wait is not None and tier.strategy == "FLEX_START":
        scheduling["maxWaitDuration"] = f"{math.ceil(asked.max_wait)}s"
    if asked.max_cost is not None:
        hourly = tier.bound_per_hour  # by the list price where the spot price is not known
        if hourly is None:
            raise UserError(
                f"max_cost={asked.max_cost:g}: the {tier.price_name} of {tier.name} is not known: give it with "
                "--prices=FILE"
            )
        seconds = math.floor(asked.max_cost / hourly * 3600)
        if seconds < START_S:
            raise UserError(
                f"max_cost={asked.max_cost:g} pays for {seconds} s of {tier.name} ({hourly:.2f} USD an hour), "
                f"and a job takes minutes to start: give {hourly * START_S / 3600:.2f} or more, or use a cheaper tier"
            )
        scheduling["timeout"] = f"{min(seconds, int(tier.timeout_s))}s"
    return dataclasses.replace(tier, spec={**tier.spec, "scheduling": scheduling}) if scheduling else tier
