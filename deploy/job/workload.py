"""Defines the options of every job, what every kind of workload has to offer, and the workload of a training."""

import dataclasses
import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.base.options import seconds
from deploy.packaging.images import (
    INSTALL,
    PLAIN_IMAGE,
    STARTER,
    BuiltImage,
    Image,
    about_installing,
    requirements,
    write_start,
)
from deploy.packaging.packages import TRAINER, Package
from deploy.packaging.sources import MOST_MB
from deploy.platform.gcloud_and_sdk import BACKENDS
from deploy.tiers.gcp_config import GcpConfig, checked_address
from deploy.tiers.machine_table import load_machines
from deploy.tiers.spec_rules import machine_of
from deploy.tiers.tier import SECRETS, SpecChanges, Tier, check_labels
from trainer.base.errors import UserError
from trainer.base.limit_watch import LIMITS
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.run_files.tracking.sender import TAGS
from trainer.base.run_files.tracking.vertex_runs import TENSORBOARD
from trainer.base.settings.fields import setting
from trainer.base.settings.own_settings import functions_taking, is_dotted
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig, split_kind
from trainer.base.tracker import read_addresses

TASK = "trainer.task"
CHECK, CHECK_S = "trainer.check", 3600  # the module that checks a tier's GPUs, and the longest time that it may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions(SpecChanges):
    """Holds the options of a job of Vertex AI beside its tier and program, money in USD and times in seconds.

    The last fields are options of `submit` alone, which describes them; other verbs keep their defaults.
    """

    project: str = setting("", "Google Cloud project (default: gcloud's)", metavar="ID")
    region: str = setting("", "as us-central1 (default: gcloud's ai/region)", metavar="NAME")
    bucket: str = setting("", "where packages and job directories go", metavar="gs://NAME[/PREFIX]")
    package: str = setting(
        "",
        "a Python package of yours, or one .py file, to ship with the job",
        metavar="PATH",
    )
    max_package_mb: int = setting(
        MOST_MB,
        "largest size of --package",
        metavar="MB",
        minimum=1,
        maximum=100_000,
    )
    include: tuple[str, ...] = setting(
        (),
        "files of --package or of a script's folder that go along though git does not track them, as data/*.json",
        metavar="GLOB",
        repeated=True,
    )
    script: str = setting(
        "",
        "a training script of yours, which runs instead of the trainer with the arguments "
        "after `--`; its folder goes along",
        metavar="FILE",
    )
    module: str = setting(
        "",
        "the same for a module, as `python -m` takes it; its package goes along: --package, "
        "or the folder of that name here",
        metavar="NAME",
    )
    image: str = setting(
        "",
        f"the image that jobs run in: the URI of your own; {INSTALL}: a public Python image "
        f"({PLAIN_IMAGE}, or {INSTALL}:URI) in which TensorFlow and the packages are installed "
        "at each start (default: the tier's, else the one that `image` built in this folder, "
        f"else {INSTALL})",
        metavar="IMAGE",
    )
    prices: str = setting("", "YAML of your own prices, in USD an hour", metavar="FILE")
    max_cost: float | None = setting(
        None,
        "the most that a job may cost, each job of a comparison: it is stopped when that is spent",
        metavar="USD",
        once=True,
        unit="USD",
        above=0,
        maximum=999_999,
    )
    max_wait: float | None = setting(
        None,
        "the longest wait for machines, as 2h: then the job is cancelled, and the "
        "next tier or region tried; as FLEX_START the service ends the wait",
        metavar="TIME",
        read=seconds,
    )
    stop_if_idle: float = setting(
        0.0,
        "the job saves and ends itself when all its GPUs are below 10 % for so long, as 30m",
        metavar="TIME",
        read=seconds,
    )
    stop_if_over: float = setting(
        0.0,
        "the job saves and ends itself after so many times the upper end of its plan, in hours or USD, as 1.5",
        metavar="FACTOR",
        minimum=1,
        maximum=999,
    )
    labels: Mapping[str, str] = setting(
        {},
        "labels of the jobs, as team=vision,cost=42",
        metavar="KEY=VALUE,…",
    )
    kms_key: str = setting(
        "",
        "your own key, which encrypts the jobs' disks: projects/P/locations/REGION/keyRings/…/cryptoKeys/…",
        metavar="NAME",
    )
    backend: str = setting(
        BACKENDS[0],
        "what creates jobs: gcloud (default), or Google's Python SDK",
        metavar="gcloud|sdk",
        choices=BACKENDS,
    )
    plan: bool = setting(
        False,
        "first measure on this machine's CPU whether the run fits the memory, if nobody did yet",
    )
    force: bool = setting(
        False,
        "send a job that does not fit the memory by its plan, or a script that imports what its image has not",
    )
    name: str = ""
    tensorboard_instance: str = ""
    disable_retries: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for flags that contradict each other, and for malformed values."""
        super().__post_init__()
        check_labels(self.labels)


@dataclasses.dataclass(frozen=True)
class Order:
    """Holds what all jobs of a submission share: the options `asked`, the packages, and the parts of their names.

    `subject` and `submission` name the jobs that were given no name; `built_image`: the one that `image` built in this
    folder; `limits`: those at which a job ends itself, in the text of `trainer.base.limit_watch`.
    """

    asked: JobOptions
    subject: str
    submission: str
    packages: tuple[Package, ...] = ()
    built_image: BuiltImage | None = None
    limits: str = ""


# What `Workload.write` returns: the packages that are shipped, lines about the image, and warnings.
Written = tuple[tuple[Package, ...], tuple[str, ...], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Workload(ABC):
    """Represents what is to run on a tier."""

    tier: Tier
    job_dir: str = dataclasses.field(default="", kw_only=True)  # as the user gave it
    about: str = dataclasses.field(default="", kw_only=True)  # one line that states what runs
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)  # what it reads, by flag

    @abstractmethod
    def arguments(self) -> list[str]:
        """Returns the arguments of the program, without those in the tier's file."""

    def local_program(self, job_dir: Path) -> tuple[str, Mapping[str, str]]:
        """Returns the module to run on this machine, "" for that of the tier's file, and its environment variables."""
        return "", {}

    @abstractmethod
    def write(self, spec: dict[str, Any], gcp: GcpConfig, order: Order, image: Image) -> Written:
        """Changes `spec`, a copy of the tier's, so that its workers run this. Returns packages, lines and warnings.

        Raises UserError for what would fail in the image.
        """


@dataclasses.dataclass(frozen=True)
class Training(Workload):
    """Holds what is to be trained on a tier: the flags that were given, and the settings they resolve to there."""

    overrides: Overrides
    config: TrainConfig

    def arguments(self) -> list[str]:
        place = [f"--job_dir={self.job_dir}"] if self.job_dir else []
        flags = self.overrides.without("expect_devices", "job_dir").arguments()
        return [*flags, *place, f"--expect_devices={self.tier.accelerators}"]

    def check_folder(self, job_dir: Path) -> None:
        """Raises UserError if a job directory of this machine cannot be written or holds another run."""
        open_job_dir(dataclasses.replace(self.config, job_dir=str(job_dir)), lock=False)

    def write(self, spec: dict[str, Any], gcp: GcpConfig, order: Order, image: Image) -> Written:
        tier, track = self.tier, self.config.track
        accelerator = load_machines().accelerators.get(tier.accelerator_type)
        # https://github.com/tensorflow/tensorflow/issues/97387 and 112272: sm_100 and sm_120, also with 2.21.
        if image.plain and accelerator and not accelerator.tensorflow:
            raise UserError(
                f"{tier.name}: TensorFlow's wheels do not run on {tier.accelerator_type} (Blackwell): use "
                "--image=URI with an image of yours whose TensorFlow does, as NVIDIA's, or a tier of L4, A100, H100 or "
                "H200"
            )
        if image.plain or image.built:
            check_inputs(self.config, order.packages)
        check_trackers(track, image, order.packages)
        packages = order.packages if image.plain else ()
        of_trackers = [REQUIREMENTS[address.kind] for address in read_addresses(track) if address.kind in REQUIREMENTS]
        installed = [*requirements(tier.accelerators), *of_trackers] if image.plain else []
        needs_starter = image.plain or SECRETS in json.dumps(spec)
        overrides = self.overrides  # a recipe's file does not exist there, so its settings go as flags
        if overrides.names_recipe_file:
            values = {**overrides.of_recipe, **overrides.without("recipe").values}
            overrides = Overrides.read(values, overrides.folder)
        arguments = dataclasses.replace(self, overrides=overrides, job_dir="").arguments()
        for index, pool in enumerate(spec["workerPoolSpecs"]):
            # A pythonPackageSpec becomes a containerSpec.
            before = pool.pop("pythonPackageSpec", None) or pool.get("containerSpec", {})
            if image.uri:
                pool["containerSpec"] = {
                    "imageUri": image.uri,
                    **{key: before[key] for key in ("args", "env") if key in before},
                }
            task, module = pool["containerSpec"], before.get("pythonModule", TASK)
            if image.plain:
                where = f"{tier.name}: workerPoolSpecs[{index}].pythonModule"
                check_module(where, module, module, order.packages, runs=True)
            task["args"] = [*task.get("args", []), *arguments]
            if order.asked.check:
                module = CHECK
                task["args"].append("--on_gpus")
                task["command"] = ["python", "-m", CHECK]
            added = variables(track, tier, task["imageUri"], gcp, spec.get("tensorboard", ""))
            if order.limits:
                added.append({"name": LIMITS, "value": order.limits})
            if added:
                task["env"] = [*task.get("env", []), *added]
            if needs_starter:
                sources = [[package.uri(gcp.bucket), package.sha256] for package in packages]
                instructions = {"requirements": installed, "packages": sources, "module": module}
                write_start(task, instructions, tier.accelerators if image.plain else 0, gcp.bucket)
        about = (about_installing(tier, image.uri, "network" in spec),) if image.plain else ()
        warned = tuple(warnings(tier, self.config, json.dumps(spec)))
        return (*packages, STARTER) if needs_starter else packages, about, warned


SPOT_INTERVAL_S = 15 * 60  # the most work that a preemption should cost


def check_devices(tier: Tier, config: TrainConfig) -> None:
    """Raises UserError unless a chief and identical workers can train on the tier, and the batch divides over them."""
    pools = tier.spec["workerPoolSpecs"]
    if len(pools) > 2:
        raise UserError(
            f"{tier.name}: workerPoolSpecs[2]: a chief and its workers train, without parameter servers or evaluators: "
            "remove the pool, or run a script of yours"
        )
    if len(set(map(machine_of, pools))) > 1:
        raise UserError(
            f"{tier.name}: workerPoolSpecs[1] has other machines than workerPoolSpecs[0]: every worker gets the same "
            "share of a batch: give both the same machineSpec, or run a script of yours"
        )
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


# Values of inputs that are no paths, as the image has or can fetch what they name; other inputs may be empty.
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
    """Raises UserError unless the packages of the job contain the module. `runs`: as a program, not as an import."""
    top, path = module.split(".")[0], module.replace(".", "/")
    package = next((package for package in packages if package.name == (TRAINER if top == "trainer" else top)), None)
    files = {f"{path}.py", f"{path}/__main__.py" if runs else f"{path}/__init__.py"}
    if package is None and (top != "trainer" or packages):
        raise UserError(
            f"{field}={value}: the module {top} is not in the job: use --package=FOLDER or {top}.py, or an --image= "
            "with it"
        )
    if package and package.files and not files & package.files.keys():
        raise UserError(
            f"{field}={value}: the module {module} is not in the package {top}: check its name, and .gitignore"
        )


def warnings(tier: Tier, config: TrainConfig, spec: str) -> Iterator[str]:
    """Yields warnings about what is allowed but may be a mistake. `spec`: that of the job, as JSON."""
    for address in read_addresses(config.track):
        names = _TOKENS.get(address.kind, ())
        if names and not any(name in spec for name in names):
            yield (f"track={address.text}: the job gets no login: add --secret={names[0]}=projects/P/secrets/S/"
                   "versions/V")  # fmt: skip
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A setting of the user's own functions, of which we do not know whether it names a file.
        own = functions_taking(field) and field.name not in config.inputs and isinstance(value, str)
        if own and (Path(value).is_file() or ("/" in value and Path(value).exists())):
            yield f"{field.name}={value}: this path exists here, but {UNREACHABLE}"
    steps, minutes = config.checkpoint_every_steps, config.checkpoint_every_minutes  # 0: off
    # A step is taken to last a second at most.
    if tier.strategy == "SPOT" and not (0 < steps <= SPOT_INTERVAL_S or 0 < minutes <= SPOT_INTERVAL_S / 60):
        yield (
            f"SPOT with checkpoint_every_steps={steps} and checkpoint_every_minutes={minutes:g}: a preemption may lose "
            f"more than {SPOT_INTERVAL_S // 60} minutes: use --checkpoint_every_minutes={SPOT_INTERVAL_S // 60}"
        )


REQUIREMENTS = {"mlflow": "mlflow-skinny", "wandb": "wandb"}  # as the extras of setup.py
_TOKENS = {"mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"), "wandb": ("WANDB_API_KEY",)}
_ON_THIS_MACHINE = re.compile(r"sqlite:|https?://(localhost|127\.|0\.0\.0\.0|\[::1\])")


def check_trackers(track: Sequence[str], image: Image, packages: Sequence[Package]) -> None:
    """Raises UserError for a tracker that the job's machines cannot reach, or whose package its image lacks."""
    for address in read_addresses(track):
        if ":" in address.kind and image.plain:
            check_module("track", address.text, address.kind.partition(":")[0], packages)
        if _ON_THIS_MACHINE.match(address.server):
            raise UserError(
                f"track={address.text} is on this machine, which the job cannot reach: name a server, or send the run "
                f"when it has ended: `python -m deploy track gs://… --track={address.text}`"
            )
        if image.built and address.kind in REQUIREMENTS:
            raise UserError(
                f"track={address.text}: the job's image has no {REQUIREMENTS.get(address.kind)}: use "
                "--image=install, or an image of yours that has it"
            )


def variables(track: Sequence[str], tier: Tier, image: str, gcp: GcpConfig, tensorboard: str) -> list[dict[str, str]]:
    """Returns environment variables that a job's trackers read: tags, project and region, the TensorBoard instance."""
    if not track:
        return []
    tags = {"tier": tier.name, "image": image, "strategy": tier.strategy, "usd_per_hour": tier.price_per_hour,
            "project": gcp.project, "region": gcp.region}  # fmt: skip
    variables = {TAGS: json.dumps(tags), "CLOUDSDK_CORE_PROJECT": gcp.project, "CLOUDSDK_AI_REGION": gcp.region}
    return [{"name": name, "value": value} for name, value in {**variables, TENSORBOARD: tensorboard}.items() if value]


def tensorboard_name(instance: str, spec: Mapping[str, Any], gcp: GcpConfig) -> str:
    """Returns the full name of --tensorboard_instance, which may be an id. Raises UserError without a service account.

    https://docs.cloud.google.com/gemini-enterprise-agent-platform/machine-learning/experiments/tensorboard-training
    """
    if "serviceAccount" not in spec:
        raise UserError(
            f"tensorboard_instance={instance}: Vertex AI needs an account that writes to it: add "
            "--service_account=EMAIL, with roles/aiplatform.user and roles/storage.admin (docs/permissions.md)"
        )
    return instance if "/" in instance else f"projects/{gcp.project}/locations/{gcp.region}/tensorboards/{instance}"
