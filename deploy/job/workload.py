"""Describes what runs on a tier, a training or a script, and refuses what would fail there."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy.job.script import Script
from deploy.packaging.distributions import requirements
from deploy.packaging.image_choice import Image, about_installing
from deploy.packaging.packages import TRAINER, Package, write_copy
from deploy.platform.local import LocalProgram
from deploy.tiers.gcp_config import checked_address
from deploy.tiers.spec_rules import Spec, machine_of, task_of
from deploy.tiers.tier import ROOT, Tier
from trainer.base.errors import UserError
from trainer.base.settings.own_settings import functions_taking, is_dotted
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig, split_kind
from trainer.base.tracker import read_addresses

TASK = "trainer.task"
LAUNCH = "trainer.launch"
CHECK = "trainer.check"  # the module that checks a tier's GPUs
# the module that runs a script here; a job has it in its archive
WORKER = "deploy.in_job.script_worker"
# the variable in which a job's bootstrap finds JSON: a secret's version for each variable
SECRETS = "TRAINER_SECRETS"

# What the user wants to run, before its settings are resolved for a tier.
Program = Overrides | Script


class WorkerProgram(NamedTuple):
    """Holds what each worker of a job runs.

    `module`: that of the job, "" for that of the tier's file; `requirements`: what pip installs
        first; `about`: a line on the image; `script`: what `script_worker` needs to know.
    """

    arguments: Sequence[str]
    module: str = ""
    requirements: Sequence[str] = ()
    about: str = ""
    script: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class _OnTier:
    """Holds what every workload has. `trained`: the settings of a run of the trainer."""

    tier: Tier
    _: dataclasses.KW_ONLY
    job_dir: str = ""  # as the user gave it
    subject: str = ""  # begins the names of its jobs
    about: str = ""  # one line that states what runs
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)  # what it reads, by flag

    @property
    def trained(self) -> TrainConfig | None:
        """Returns the settings with which the trainer runs it; None for another program."""
        return None

    def local_program(self, job_dir: Path) -> LocalProgram:
        """Returns what runs on this machine: by default the module of the tier's file."""
        return LocalProgram()


@dataclasses.dataclass(frozen=True)
class Training(_OnTier):
    """Holds a training on a tier: the given flags, and the settings that follow there."""

    overrides: Overrides
    config: TrainConfig

    def arguments(self) -> list[str]:
        """Returns the arguments of the trainer, without those in the tier's file."""
        place = [f"--job_dir={self.job_dir}"] if self.job_dir else []
        flags = self.overrides.without("expect_devices", "job_dir").arguments()
        return [*flags, *place, f"--expect_devices={self.tier.accelerators}"]

    @property
    def trained(self) -> TrainConfig:
        """Returns the settings with which the trainer runs it."""
        return self.config

    def in_job(self, spec: Spec, image: Image, packages: Sequence[Package]) -> WorkerProgram:
        """Returns what the workers of a job with this spec run.

        Raises UserError for what would fail in the image.
        """
        tier = self.tier
        if image.plain or image.built:
            check_inputs(self.config, packages)
        for index, pool in enumerate(tier.spec["workerPoolSpecs"] if image.plain else ()):
            module = pool.get("pythonPackageSpec", {}).get("pythonModule", TASK)
            field = f"{tier.name}: workerPoolSpecs[{index}].pythonModule"
            check_module(field, module, packages, runs=True)
        # Its flags: a recipe's file does not exist there, so its settings go as flags.
        overrides = self.overrides
        if overrides.names_recipe_file:
            values = {**overrides.of_recipe, **overrides.without("recipe").values}
            overrides = Overrides.read(values, overrides.folder)
        arguments = dataclasses.replace(self, overrides=overrides, job_dir="").arguments()
        if not image.plain:
            return WorkerProgram(arguments)
        installed = [*requirements(tier.accelerators), *tracker_packages(self.config.track)]
        about = about_installing(tier, image.uri, "network" in spec)
        return WorkerProgram(arguments, "", installed, about)


@dataclasses.dataclass(frozen=True)
class ScriptRun(_OnTier):
    """Holds a script that is to run on a tier."""

    script: Script

    @property
    def trained(self) -> TrainConfig | None:
        """Returns the settings of `trainer.launch`; None if the script runs as it is."""
        return self.script.config if self.script.launched else None

    def arguments(self) -> list[str]:
        """Returns the arguments of the script, or of `trainer.launch` with it."""
        if not self.script.launched:
            return [*self.script.words]
        return [f"--expect_devices={self.tier.accelerators}", *self.script.launch_arguments()]

    def local_program(self, job_dir: Path) -> LocalProgram:
        """Copies what goes along to JOB_DIR/code, and returns what runs it there."""
        code = job_dir / "code"
        write_copy(Package(self.script.subject, "0", self.script.files), code)
        if self.script.launched:
            return LocalProgram(LAUNCH, {"PYTHONPATH": str(ROOT)}, code)
        instructions = {**self._instructions(str(job_dir)), "folder": str(code)}
        return LocalProgram(WORKER, {"TRAINER_SCRIPT": json.dumps(instructions)})

    def in_job(self, spec: Spec, image: Image, packages: Sequence[Package]) -> WorkerProgram:
        """Returns what the workers of a job run.

        Raises UserError for what would fail in the image.
        """
        script = self.script
        tier = self.tier
        needed = script.requirements(tier.accelerators, plain=image.plain)
        has_options = any(line.startswith("-") for line in needed)
        installed = ["-r", "requirements.txt"] if has_options else needed
        about = ""
        if image.plain and script.launched:
            # A version of TensorFlow or Keras that the user lists wins.
            listed = {re.split(r"[^\w.-]", line)[0].lower() for line in needed}
            base = []
            for line in requirements(tier.accelerators):
                by_user = re.split(r"\W", line)[0] in listed
                base.append(line.partition("==")[0] if by_user else line)
            installed = [*base, *tracker_packages(script.config.track), *installed]
            about = about_installing(tier, image.uri, "network" in spec, needed)
        elif image.plain:
            contents = f"with {' '.join(needed)}" if needed else "with the standard library alone"
            about = f"runs in {image.uri}, {contents}: --image=URI names another"
        if script.launched:
            return WorkerProgram(self.arguments(), LAUNCH, installed, about)
        instructions = self._instructions(spec["baseOutputDirectory"]["outputUriPrefix"])
        return WorkerProgram(script.words, "", installed, about, instructions)

    def _instructions(self, job_dir: str) -> dict[str, Any]:
        """Returns what `script_worker` needs to know, except the folder of the code."""
        about = {
            "config": {"script": self.script.name, "arguments": list(self.script.words)},
            "cluster": {"workers": self.tier.workers, "replicas": self.tier.devices},
            "accelerators": self.tier.accelerators,
        }
        return {"command": list(self.script.command), "job_dir": job_dir, "about": about}


@dataclasses.dataclass(frozen=True)
class Prediction(_OnTier):
    """Holds a prediction for a file of rows, which runs in the image of a registered model."""

    def arguments(self) -> list[str]:
        """Returns the arguments of trainer.predict."""
        return [self.inputs["model"], f"--rows_file={self.inputs['rows']}", f"--out={self.job_dir}"]

    def in_job(self, spec: Spec, image: Image, packages: Sequence[Package]) -> WorkerProgram:
        """Returns what the worker of a job runs."""
        # those of the tier's file train
        task_of(spec["workerPoolSpecs"][0]).pop("args", None)
        about = f"runs in {image.uri}, the image of the version"
        return WorkerProgram(self.arguments(), "trainer.predict", about=about)


Workload = Training | ScriptRun | Prediction


def workload_on(tier: Tier, program: Program) -> Training | ScriptRun:
    """Returns what runs on `tier`, its settings resolved.

    Raises UserError for what the trainer would refuse there.
    """
    if isinstance(program, Script):
        if program.launched:
            config = program.config
            rows = tier.workers * (config.replicas or tier.accelerators or 1) * config.micro_batches
            rows = config.virtual_replicas or rows
            # The batch of `fit` is not known here: one that divides over the devices is taken.
            check_devices(tier, dataclasses.replace(config, global_batch_size=rows))
        return ScriptRun(
            tier, program, job_dir=program.job_dir, subject=program.subject, about=program.about
        )
    expected = tier.accelerators
    count = program.values.get("expect_devices", expected)
    if count != expected:
        raise UserError(
            f"--expect_devices={count}: the workers of {tier.name} have {expected} accelerators:"
            " drop the flag"
        )
    # The settings: those of the tier's file, over which the user's win.
    arguments = task_of(tier.spec["workerPoolSpecs"][0]).get("args", [])
    of_file = Overrides.parse(arguments, program.folder)
    config = of_file.replace(**{**program.values, "expect_devices": expected}).config
    check_devices(tier, config)
    # What runs, in words.
    subject = str(program.values.get("recipe") or program.values.get("model") or "job")
    subject = re.sub("[_:]", "-", Path(subject).name.removesuffix(".yaml"))
    length = f"{config.steps:,} step" if config.steps else f"{config.epochs or 1:,} epoch"
    plural = "" if (config.steps or config.epochs or 1) == 1 else "s"
    batch = f"global batch {config.global_batch_size}"
    about = f"trains {config.model} on {config.data}, {batch}, {length}{plural}"
    description = {"job_dir": config.job_dir, "subject": subject, "about": about}
    return Training(tier, program, config, inputs=config.inputs, **description)


SPOT_INTERVAL_S = 15 * 60  # the most work that a preemption should cost


def check_devices(tier: Tier, config: TrainConfig) -> None:
    """Raises UserError unless the tier can train, and the batch divides over its workers."""
    pools = tier.spec["workerPoolSpecs"]
    if len(pools) > 2:
        raise UserError(
            f"{tier.name}: workerPoolSpecs[2]: a chief and its workers train, without parameter"
            " servers or evaluators: remove the pool, or run a script of yours"
        )
    if len(set(map(machine_of, pools))) > 1:
        raise UserError(
            f"{tier.name}: workerPoolSpecs[1] has other machines than workerPoolSpecs[0]: every"
            " worker gets the same share of a batch: give both the same machineSpec, or run a"
            " script of yours"
        )
    if tier.accelerators and config.replicas > tier.accelerators:
        raise UserError(
            f"replicas={config.replicas}: a worker of {tier.name} has {tier.accelerators}"
            " accelerators: drop the flag, or take a larger tier"
        )
    if tier.workers > 1 and config.strategy in ("one_device", "mirrored"):
        raise UserError(
            f"strategy={config.strategy}: the {tier.workers} workers of {tier.name} would each"
            " train alone: drop it"
        )
    if tier.workers == 1 and config.strategy == "multi_worker":
        raise UserError(
            f"strategy=multi_worker: {tier.name} has one worker: drop the flag, or take a tier of"
            " several"
        )
    devices = tier.workers * (config.replicas or tier.accelerators or 1)
    try:
        config.rows_per_replica(devices)
    except UserError as error:
        raise UserError(f"{tier.name}: {error}") from None


# Values of inputs that are no paths, as the image has or can fetch what they name; other inputs may
# be empty.
_NAMED = {"data": DATA_SOURCES, "weights": ("imagenet", "none"), "fid_features": ("inception",)}


def check_inputs(config: TrainConfig, packages: Sequence[Package]) -> None:
    """Raises UserError if a setting names what the job cannot reach, as this machine's disk."""
    for field in (*config.inputs, "model", "callbacks"):
        value = getattr(config, field)
        address = value[value.find("gs:/") :]
        if value in _NAMED.get(field, ("",)):
            continue
        if address.startswith("gs:/"):
            checked_address(field, address)
        elif is_dotted(value):
            check_module(field, value, packages)
        elif field in config.inputs and not value.split(":")[-1].startswith("/gcs/"):
            kind, path = split_kind(value)
            remote = f"{kind}{':' if kind else ''}gs://BUCKET/{Path(path).name}"
            copy = f"gcloud storage cp -r {shlex.quote(path)} gs://BUCKET/"
            raise UserError(
                f"{field}={value}: {UNREACHABLE}: copy it with `{copy}` and use --{field}={remote}"
            )


UNREACHABLE = "the job's machines cannot read this disk, only gs://BUCKET/… and /gcs/BUCKET/…"


def check_module(
    field: str, value: str, packages: Sequence[Package], *, runs: bool = False
) -> None:
    """Raises UserError unless the packages of the job contain the module in `value`, MODULE:NAME.

    `runs`: as a program, not as an import.
    """
    module = value.split(":")[0]
    top = module.split(".")[0]
    path = module.replace(".", "/")
    name = TRAINER if top == "trainer" else top
    package = next((package for package in packages if package.name == name), None)
    files = {f"{path}.py", f"{path}/__main__.py" if runs else f"{path}/__init__.py"}
    if package is None and (top != "trainer" or packages):
        raise UserError(
            f"{field}={value}: the module {top} is not in the job: use --package=FOLDER or"
            f" {top}.py, or an --image= with it"
        )
    if package and package.files and not files & package.files.keys():
        raise UserError(
            f"{field}={value}: the module {module} is not in the package {top}: check its name, and"
            " .gitignore"
        )


def warnings(work: Workload, spec: str) -> Iterator[str]:
    """Yields warnings about what is allowed but may be a mistake.

    `spec`: that of the job, as JSON.
    """
    on_spot = work.tier.strategy == "SPOT"
    config = work.trained
    if config is None:
        if on_spot and isinstance(work, ScriptRun):
            yield (
                "SPOT: the script is ended by SIGTERM and started again: only what it saved itself,"
                " as in AIP_CHECKPOINT_DIR, is left"
            )
        return
    for address in read_addresses(config.track):
        names = _TOKENS.get(address.kind, ())
        if names and not any(name in spec for name in names):
            yield (
                f"track={address.text}: the job gets no login: add"
                f" --secret={names[0]}=projects/P/secrets/S/versions/V"
            )
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        # A setting of the user's own functions, of which we do not know whether it names a file.
        is_text = field.name not in config.inputs and isinstance(value, str)
        if (
            is_text
            and functions_taking(field)
            and (Path(value).is_file() or ("/" in value and Path(value).exists()))
        ):
            yield f"{field.name}={value}: this path exists here, but {UNREACHABLE}"
    # Whether checkpoints (0: none) are frequent enough; a step is taken to last a second at most.
    steps = config.checkpoint_every_steps
    minutes = config.checkpoint_every_minutes
    if on_spot and not (0 < steps <= SPOT_INTERVAL_S or 0 < minutes <= SPOT_INTERVAL_S / 60):
        yield (
            f"SPOT with checkpoint_every_steps={steps} and checkpoint_every_minutes={minutes:g}: a"
            f" preemption may lose more than {SPOT_INTERVAL_S // 60} minutes: use"
            f" --checkpoint_every_minutes={SPOT_INTERVAL_S // 60}"
        )


def tracker_packages(track: Sequence[str]) -> list[str]:
    """Returns what pip installs for the trackers of a run."""
    kinds = [address.kind for address in read_addresses(track)]
    return [REQUIREMENTS[kind] for kind in kinds if kind in REQUIREMENTS]


REQUIREMENTS = {"mlflow": "mlflow-skinny", "wandb": "wandb"}  # as the extras of setup.py
_TOKENS = {
    "mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD"),
    "wandb": ("WANDB_API_KEY",),
}
_ON_THIS_MACHINE = re.compile(r"sqlite:|https?://(localhost|127\.|0\.0\.0\.0|\[::1\])")


def check_trackers(track: Sequence[str], image: Image, packages: Sequence[Package]) -> None:
    """Raises UserError for a tracker that the job cannot reach, or whose package it lacks."""
    for address in read_addresses(track):
        if ":" in address.kind and image.plain:
            check_module("track", address.text, packages)
        if _ON_THIS_MACHINE.match(address.server):
            raise UserError(
                f"track={address.text} is on this machine, which the job cannot reach: name a"
                " server, or send the run when it has ended: `python -m deploy track gs://…"
                f" --track={address.text}`"
            )
        if image.built and address.kind in REQUIREMENTS:
            raise UserError(
                f"track={address.text}: the job's image has no {REQUIREMENTS.get(address.kind)}:"
                " use --image=install, or an image of yours that has it"
            )
