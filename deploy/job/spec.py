"""Makes the CustomJobSpec of a job from that of its tier's file, step by step: here each flag
changes it.

`machine_spec` comes first: a tier is checked and priced after it. Then `job_spec` adds what the
money pays for, the place and the program.
"""

import copy
import json
import math
from collections.abc import Sequence
from typing import Any

from deploy.job.cost import paid_seconds
from deploy.job.options import JobOptions
from deploy.job.workload import CHECK, SECRETS, TASK, WorkerProgram, Workload, check_trackers
from deploy.packaging.image_choice import BOOTSTRAP, Image, set_variables, write_start
from deploy.packaging.packages import CodeArchive, Package
from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.machine_table import load_machines
from deploy.tiers.spec_rules import Spec, check_same_region, check_value, machine_of, task_of
from deploy.tiers.tier import FLEX_WAIT_S
from trainer.base.errors import UserError
from trainer.base.limit_watch import LIMITS
from trainer.base.run_files.tracking.sender import TAGS
from trainer.base.run_files.tracking.vertex_runs import TENSORBOARD

CHECK_S = 3600  # the longest time that --check may take
# The options that messages about a tier's spec name, if they were given.
_NAMED = (
    "service_account",
    "network",
    "spot",
    "flex_start",
    "timeout",
    "disk_gb",
    "reservation",
    "web_access",
    "env",
    "secret",
)


def machine_spec(options: JobOptions, spec: Spec, name: str) -> tuple[Spec, str]:
    """Returns a tier's spec after the flags that change its machines, and its new name.

    Raises UserError if `spec` is malformed.
    """
    check_value(spec, "CustomJobSpec", name)
    changed = copy.deepcopy(dict(spec))
    # As whom it runs, in which network, and whether the user may look inside.
    if options.service_account:
        changed["serviceAccount"] = options.service_account
    if options.network:
        changed["network"] = options.network
    if options.web_access:
        changed["enableWebAccess"] = True
    # Under which strategy it waits for machines, and for how long; how long it runs, and how often
    # it starts again.
    scheduling = dict(changed.get("scheduling", {}))
    if options.spot:
        scheduling.pop("maxWaitDuration", None)
        scheduling["strategy"] = "SPOT"
    if options.flex_start:
        waits = {"maxWaitDuration": f"{FLEX_WAIT_S:.0f}s"}
        scheduling = {**waits, **scheduling, "strategy": "FLEX_START"}
    if options.max_wait and scheduling.get("strategy") == "FLEX_START":
        scheduling["maxWaitDuration"] = f"{math.ceil(options.max_wait)}s"
    if options.timeout:
        scheduling["timeout"] = f"{math.ceil(options.timeout)}s"
    if options.disable_retries or options.check:
        scheduling["disableRetries"] = True
    if options.check:  # which takes some minutes, on one machine
        seconds = float(scheduling.get("timeout", f"{CHECK_S}s")[:-1])
        scheduling["timeout"] = f"{int(min(seconds, CHECK_S))}s"
        changed["workerPoolSpecs"] = changed.get("workerPoolSpecs", [])[:1]
    if scheduling:
        changed["scheduling"] = scheduling
    # Each worker's disk, reserved machine and variables.
    variables = dict(options.env)
    if options.secret:
        variables[SECRETS] = json.dumps(options.secret)
    for pool in changed.get("workerPoolSpecs", []):
        if options.disk_gb:
            pool["diskSpec"] = {**pool.get("diskSpec", {}), "bootDiskSizeGb": options.disk_gb}
        if options.reservation:
            pool["machineSpec"]["reservationAffinity"] = {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [options.reservation],
            }
        if variables:
            set_variables(task_of(pool), variables, replace=True)
    flags = [f" --{option}" for option in _NAMED if getattr(options, option)]
    return changed, f"{name} with{''.join(flags)}" if flags else name


# Google's settings of NCCL, without which GPUs reach those of other machines through the host
# alone:
# https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/training/configure-compute
NCCL_SETTINGS = "/usr/local/gib/scripts/set_nccl_env.sh"
_SOURCED = (
    f'if [ -f {NCCL_SETTINGS} ]; then . {NCCL_SETTINGS}; echo "NCCL: with the settings of'
    f' {NCCL_SETTINGS}"; else echo "NCCL: {NCCL_SETTINGS} is not in this image: RDMA stays off";'
    ' fi; exec "$@"'
)
# NCCL then logs which network it takes
_NCCL_LOG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}


def job_spec(
    work: Workload,
    options: JobOptions,
    gcp: GcpConfig,
    image: Image,
    packages: Sequence[Package],
    output: str,
    limits: str,
) -> tuple[dict[str, Any], tuple[Package, ...], WorkerProgram]:
    """Returns the spec of a job that runs `work`, what is shipped, and what its workers run.

    `packages`: the user's and the trainer's, which may be in the image already; `limits`: those at
        which the job ends itself. Raises UserError for what would fail there.
    """
    tier = work.tier
    spec = copy.deepcopy(dict(tier.spec))
    # How long it may run: for as long as --max_cost pays, and no longer than the tier's timeout.
    if options.max_cost is not None:
        seconds = min(paid_seconds(options.max_cost, tier, gcp.region), int(tier.timeout_s))
        spec["scheduling"] = {**tier.scheduling, "timeout": f"{seconds}s"}
    # Where it writes, and which TensorBoard shows that.
    spec["baseOutputDirectory"] = {"outputUriPrefix": output}
    # https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/experiments/tensorboard-training
    if board := options.tensorboard_instance:
        in_place = f"projects/{gcp.project}/locations/{gcp.region}/tensorboards/{board}"
        spec["tensorboard"] = board if "/" in board else in_place
    if "tensorboard" in spec:
        if "serviceAccount" not in spec:
            raise UserError(
                f"{tier.name}: tensorboard without serviceAccount: Vertex AI needs an account that"
                " writes to it: add --service_account=EMAIL, with roles/aiplatform.user and"
                " roles/storage.admin (docs/permissions.md)"
            )
        check_same_region("tensorboard", spec["tensorboard"], gcp.region)
    # What the trainer needs: a TensorFlow for the GPUs, and what its trackers read.
    # https://github.com/tensorflow/tensorflow/issues/97387 and 112272: sm_100 and sm_120, also with
    # 2.21.
    table = load_machines()
    variables = {LIMITS: limits}
    if config := work.trained:
        accelerator = table.accelerators.get(tier.accelerator_type)
        if image.plain and accelerator and not accelerator.tensorflow:
            raise UserError(
                f"{tier.name}: TensorFlow's wheels do not run on {tier.accelerator_type}"
                " (Blackwell): use --image=URI with an image of yours whose TensorFlow does, as"
                " NVIDIA's, or a tier of L4, A100, H100 or H200"
            )
        check_trackers(config.track, image, packages)
        if config.track:
            tags = {
                "tier": tier.name,
                "image": image.uri or spec["workerPoolSpecs"][0]["containerSpec"]["imageUri"],
                "strategy": tier.strategy,
                "usd_per_hour": tier.price_per_hour,
                "project": gcp.project,
                "region": gcp.region,
            }
            variables |= {
                TAGS: json.dumps(tags),
                "CLOUDSDK_CORE_PROJECT": gcp.project,
                "CLOUDSDK_AI_REGION": gcp.region,
                TENSORBOARD: spec.get("tensorboard", ""),
            }
    variables = {name: value for name, value in variables.items() if value}
    program = work.in_job(spec, image, packages)
    # What a start downloads and installs first: in an image of one's own the user's code, and
    # secrets alone.
    shipped = [package for package in packages if image.plain or isinstance(package, CodeArchive)]
    preparation: dict[str, Any] = {}
    if shipped or program.requirements or SECRETS in json.dumps(spec):
        preparation = {"requirements": program.requirements, "packages": []}
        for package in shipped:
            source = [package.uri(gcp.bucket), package.sha256]
            if isinstance(package, CodeArchive):
                preparation["code"] = source
            else:
                preparation["packages"].append(source)
        if image.ready:
            preparation["requirements"] = ["--no-deps"] if preparation["packages"] else []
        if program.script:
            preparation["script"] = program.script
        shipped.append(BOOTSTRAP)
    machine = table.machines.get(tier.machine_type)
    rdma = tier.workers > 1 and machine and machine.rdma
    for place, pool in enumerate(spec["workerPoolSpecs"]):
        # a program of its own, such as a reduction server
        if place > 1 and "containerSpec" in pool:
            continue
        # The image: a pythonPackageSpec becomes a containerSpec.
        in_file = pool.pop("pythonPackageSpec", None) or pool["containerSpec"]
        task = in_file
        if image.uri:
            task = {key: in_file[key] for key in ("args", "env") if key in in_file}
            task = {"imageUri": image.uri, **task}
        pool["containerSpec"] = task
        # The program, with its arguments and variables.
        arguments = [*program.arguments, *["--on_gpus"] * options.check]
        module = CHECK if options.check else program.module
        task["args"] = [*task.get("args", []), *arguments]
        if module:
            task["command"] = ["python", "-m", module]
        if variables:
            set_variables(task, variables, replace=True)
        # What is installed before it starts. Another image than a plain one finds the driver of
        # GPUs by itself.
        if preparation:
            plan = {**preparation, "module": module or in_file.get("pythonModule", TASK)}
            gpus = machine_of(pool)[2] if image.plain else 0
            write_start(task, plan, gpus, gcp.bucket)
        # The network between the GPUs of several machines. Without a command it is taken to run the
        # trainer.
        if rdma:
            command = task.get("command") or ["python", "-m", TASK]
            task["command"] = ["bash", "-c", _SOURCED, "start", *command]
            set_variables(task, _NCCL_LOG, replace=False)
    return spec, tuple(shipped), program
