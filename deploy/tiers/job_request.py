"""Defines what every job is asked for, whatever runs in it, and the request by which the trainer runs."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.images import BuiltImage, Image, choose_image
from deploy.tiers.job_checks import check_inputs, check_module, check_wheels, warnings
from deploy.tiers.job_tracking import REQUIREMENTS, check_trackers, variables, warnings_of_trackers
from deploy.tiers.packages import Package, built
from deploy.tiers.plain_image import about_installing, requirements, starter, write_start
from deploy.tiers.spec_changes import SECRETS
from deploy.tiers.tier import Tier
from trainer.base.limit_watch import LIMITS
from trainer.base.run_files.job_directory import open_job_dir
from trainer.base.settings.resolution import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.tracker import read_addresses

TASK = "trainer.task"
CHECK, CHECK_S = "trainer.check", 3600  # the module that checks a tier's GPUs, and the longest time that it may take


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """Holds what is asked of a job beside the tier and what runs on it.

    `subject` and `submission` make the names of jobs where no `name` is given; `max_cost` is in USD; `max_wait_s`: the
    longest wait for machines.
    """

    subject: str
    submission: str
    name: str = ""
    packages: tuple[Package, ...] = ()
    image: str = ""  # --image=
    built_image: BuiltImage | None = None  # that this folder remembers
    max_cost: float | None = None
    max_wait_s: float | None = None
    disable_retries: bool = False
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the user's own
    kms_key: str = ""
    tensorboard: str = ""  # --tensorboard_instance=
    force: bool = False  # send what looks as if it would fail
    check: bool = False  # check the GPUs of the tier instead of training
    stop_if_idle_s: float = 0.0  # --stop_if_idle and --stop_if_over; 0: not asked for
    stop_if_over: float = 0.0
    plan: bool = False  # make a plan that is missing
    limits: str = ""  # at which the job ends itself, as `trainer.base.limit_watch` writes them

    @property
    def folder(self) -> str:
        """Returns the name of the job directory below the bucket's jobs/.

        It is without the tier: the next tier of a fallback resumes from the checkpoints of the last.
        """
        return self.name or f"{self.subject}-{self.submission}"


@dataclasses.dataclass(frozen=True)
class WrittenSpec:
    """Holds what writing a spec has chosen: the packages that go along, and lines about the image and of warning."""

    packages: tuple[Package, ...]
    about: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class JobRequest(ABC):
    """Represents what is to run on a tier."""

    tier: Tier

    @property
    def inputs(self) -> Mapping[str, str]:
        """Returns the addresses of what is read, by the names of their flags; nothing if they are not known."""
        return {}

    @property
    def training(self) -> "TrainingRequest | None":
        """Returns the request if the trainer runs, of which plans and checks know more; None for another program."""
        return None

    @property
    @abstractmethod
    def job_dir(self) -> str:
        """Returns the job directory that the user named; empty if none."""

    @property
    @abstractmethod
    def about(self) -> str:
        """Returns one line that states what runs."""

    @abstractmethod
    def arguments(self) -> list[str]:
        """Returns the arguments of the program, beside those of the tier's file."""

    def local_program(self, job_dir: Path) -> tuple[str, Mapping[str, str]]:
        """Returns the module that runs on this machine, empty for the one of the tier's file, and its variables."""
        return "", {}

    @abstractmethod
    def check_folder(self, job_dir: Path) -> None:
        """Raises UserError if a job directory of this machine cannot be written or holds another run."""

    @abstractmethod
    def in_job_dir(self, job_dir: str) -> "JobRequest":
        """Returns the same with another job directory."""

    @abstractmethod
    def choose_image(self, options: JobOptions) -> Image:
        """Returns the image of the job. Raises UserError if it cannot run there."""

    @abstractmethod
    def write(self, spec: dict[str, Any], gcp: GcpConfig, options: JobOptions, image: Image) -> WrittenSpec:
        """Makes the workers of `spec`, which has the tier's content, run it."""


@dataclasses.dataclass(frozen=True)
class TrainingRequest(JobRequest):
    """Holds what is to be trained on a tier: the flags that were given, and the settings they resolve to there."""

    overrides: Overrides
    config: TrainConfig

    @property
    def job_dir(self) -> str:
        return self.config.job_dir

    @property
    def inputs(self) -> Mapping[str, str]:
        return self.config.inputs

    @property
    def about(self) -> str:
        config = self.config
        count, unit = (config.steps, "step") if config.steps else (config.epochs or 1, "epoch")
        length = f"{count:,} {unit}{'s' if count > 1 else ''}"
        by_default = not config.recipe and config.model == TrainConfig.model
        trains = f"no recipe: trains {config.model} (the default)" if by_default else f"trains {config.model}"
        return f"{trains} on {config.data}, global batch {config.global_batch_size}, {length}"

    @property
    def training(self) -> "TrainingRequest":
        return self

    def arguments(self) -> list[str]:
        return [*self.overrides.without("expect_devices").arguments(), f"--expect_devices={self.tier.accelerators}"]

    def check_folder(self, job_dir: Path) -> None:
        open_job_dir(dataclasses.replace(self.config, job_dir=str(job_dir)), lock=False)

    def in_job_dir(self, job_dir: str) -> "TrainingRequest":
        config = dataclasses.replace(self.config, job_dir=job_dir)
        return TrainingRequest(self.tier, self.overrides.replace(job_dir=job_dir), config)

    def choose_image(self, options: JobOptions) -> Image:
        """Returns the image of the job. Raises UserError if it cannot reach a setting's file or module there."""
        image = choose_image(self.tier, options.image, options.built_image, options.packages)
        check_wheels(self.tier, image)
        if image.plain or image.built:
            check_inputs(self.config, options.packages)
        for index, pool in enumerate(self.tier.spec["workerPoolSpecs"] if image.plain else ()):
            if module := pool.get("pythonPackageSpec", {}).get("pythonModule"):
                where = f"{self.tier.name}: workerPoolSpecs[{index}].pythonModule"
                check_module(where, module, module, options.packages, runs=True)
        return image

    def write(self, spec: dict[str, Any], gcp: GcpConfig, options: JobOptions, image: Image) -> WrittenSpec:
        tier, track = self.tier, self.config.track
        packages = tuple(map(built, options.packages)) if image.plain else ()
        of_trackers = [REQUIREMENTS[address.kind] for address in read_addresses(track) if address.kind in REQUIREMENTS]
        installed = [*requirements(tier.accelerators), *of_trackers] if image.plain else []
        sources = [[package.uri(gcp.bucket), package.sha256] for package in packages]
        started = image.plain or SECRETS in json.dumps(spec)  # by the starter
        overrides = self.overrides  # the output is elsewhere there, and a recipe's file does not exist
        if overrides.names_recipe_file:
            overrides = Overrides({**overrides.recipe, **overrides.without("recipe").values}, overrides.first)
        arguments = dataclasses.replace(self, overrides=overrides.without("job_dir")).arguments()
        check_trackers(track, image, options.packages)
        for pool in spec["workerPoolSpecs"]:
            # A pythonPackageSpec becomes a containerSpec.
            before = pool.pop("pythonPackageSpec", None) or pool.get("containerSpec", {})
            if image.uri:
                kept = {key: before[key] for key in ("args", "env") if key in before}
                pool["containerSpec"] = {"imageUri": image.uri, **kept}
            task, module = pool["containerSpec"], before.get("pythonModule", TASK)
            task["args"] = [*task.get("args", []), *arguments]
            if options.check:
                module = CHECK
                task["args"].append("--on_gpus")
                task["command"] = ["python", "-m", CHECK]
            added = variables(track, tier, task["imageUri"], gcp, spec.get("tensorboard", ""))
            if options.limits:
                added.append({"name": LIMITS, "value": options.limits})
            if added:
                task["env"] = [*task.get("env", []), *added]
            if started:
                plan = {"requirements": installed, "packages": sources, "module": module}
                write_start(task, plan, tier.accelerators if image.plain else 0, gcp.bucket)
        about = (about_installing(tier, image.uri, "network" in spec),) if image.plain else ()
        warned = (*warnings(tier, self.config), *warnings_of_trackers(track, spec))
        return WrittenSpec((*packages, starter()) if started else packages, about, warned)
