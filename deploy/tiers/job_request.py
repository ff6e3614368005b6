"""Defines what every job is asked for, whatever runs in it: the trainer with its flags, or a script of the user's."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deploy.tiers.gcp_config import GcpConfig
from deploy.tiers.images import BuiltImage, Image
from deploy.tiers.packages import Package
from deploy.tiers.tier import Tier
from trainer.base.settings.resolution import Overrides
from trainer.base.settings.train_config import TrainConfig


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
    limits: str = ""  # at which the job ends itself, as `trainer.base.run_files.limits` writes them

    @property
    def folder(self) -> str:
        """Returns the name of the job directory below the bucket's jobs/.

        It is without the tier: the next tier of a fallback resumes from the checkpoints of the last.
        """
        return self.name or f"{self.subject}-{self.submission}"


@dataclasses.dataclass(frozen=True)
class Written:
    """Holds what writing a spec has chosen: the packages that go along, and lines about the image and of warning."""

    packages: tuple[Package, ...]
    about: tuple[str, ...]
    warnings: tuple[str, ...]


class Training(Protocol):
    """Represents a request by which the trainer runs: its tier, flags, and the settings they resolve to there."""

    @property
    def tier(self) -> Tier:
        """Returns the tier."""

    @property
    def overrides(self) -> Overrides:
        """Returns the flags that were given."""

    @property
    def config(self) -> TrainConfig:
        """Returns the settings."""


_Request = TypeVar("_Request", bound="JobRequest")


@dataclasses.dataclass(frozen=True)
class JobRequest(ABC):
    """Represents what is to run on a tier."""

    tier: Tier

    @property
    def inputs(self) -> Mapping[str, str]:
        """Returns the addresses of what is read, by the names of their flags; nothing if they are not known."""
        return {}

    @property
    def training(self) -> Training | None:
        """Returns the request if the trainer runs, of which plans and checks know more; None for a script."""
        return None

    @property
    def rows_per_replica(self) -> int:
        """Returns the rows of a batch on each device; 0 if they are not known."""
        return 0

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

    def on(self: _Request, tier: Tier) -> _Request:
        """Returns the same on another tier of as many devices."""
        return dataclasses.replace(self, tier=tier)

    @abstractmethod
    def in_job_dir(self, job_dir: str) -> "JobRequest":
        """Returns the same with another job directory."""

    @abstractmethod
    def choose_image(self, options: JobOptions) -> Image:
        """Returns the image of the job. Raises UserError if it cannot run there."""

    @abstractmethod
    def write(self, spec: dict[str, Any], gcp: GcpConfig, options: JobOptions, image: Image) -> Written:
        """Makes the workers of `spec`, which has the tier's content, run it."""
