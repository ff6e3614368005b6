"""Reads a command line that names a run by its job directory, and may replace its data. Imports no
TensorFlow."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.base.errors import UserError
from trainer.base.run_files.job_files import (
    CHECKPOINTS,
    MODEL,
    RUN_INFO,
    mapping,
    read_run_info,
    step_name,
)
from trainer.base.run_files.serving_file import SERVING
from trainer.base.settings.fields import (
    ALL_FLAGS,
    VERBOSE,
    Field,
    Usage,
    coerce_all,
    fields_of,
    flag_name,
    options_class,
    parse_command,
    setting,
)
from trainer.base.settings.own_settings import OwnSettings, functions_taking
from trainer.base.settings.request import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded, parse
from trainer.base.storage.staging import Staged, naming

NEWEST = "newest"
BEST = "best"
# Settings that a command on a run may change. The default is the run's value, but for replicas all
# of this machine.
_OVERRIDABLE = (
    "replicas",
    "data",
    "evaluation_batch_size",
    "skip_bad_images",
    "data_memory_mib",
    "cache_dir",
)
_FIELDS = fields_of(TrainConfig)
# Settings of the training job alone, whose defaults a command on another machine uses.
_TRAINING_ONLY = (
    "recipe",
    "job_dir",
    "callbacks",
    "strategy",
    "replicas",
    "expect_devices",
    "jit_compile",
    "initial_checkpoint",
    "initial_model",
)


@options_class
class RunOptions:
    """Holds the options that every command on a run has."""

    run: str = setting(meaning="a job directory; also at gs://", metavar="RUN", positional=True)
    checkpoint: str = setting(
        "",
        f"weights of this checkpoint, {NEWEST} or {BEST} (default: those of the saved model in"
        f" {MODEL}/)",
        metavar="STEP",
    )
    verbose: bool = VERBOSE


@dataclasses.dataclass(frozen=True)
class RequestedRun:
    """Holds the run that a command line names, and the flags that say what to do with it."""

    name: str  # as the user wrote it
    folder: Path  # the local copy of its job directory
    info: Mapping[str, Any]  # run.json
    flags: Mapping[str, Any]  # settings of the run that the command replaces
    options: Any  # those of the command, RunOptions

    @property
    def has_other_data(self) -> bool:
        """Returns whether the command names other data, or sets settings of its function."""
        return "data" in self.flags or not self.flags.keys() <= {*_OVERRIDABLE}

    @cached_property
    def trained(self) -> TrainConfig:
        """Returns the run's settings, without those of training alone.

        Raises UserError if they are damaged.
        """
        return self._overrides({}).config

    @cached_property
    def config(self) -> TrainConfig:
        """Returns the run's settings with the flags of the command line.

        Raises UserError for a wrong flag.
        """
        flags = {name: value for name, value in self.flags.items() if name != "replicas"}
        if self.has_other_data:
            flags["evaluation_fraction"] = 0.0
        # Replicas are set last, as the run's batch need not divide by them.
        replicas = self.flags.get("replicas", 0)
        return dataclasses.replace(self._overrides(flags).config, replicas=replicas)

    @cached_property
    def model_config(self) -> TrainConfig:
        """Returns `config` with the run's values of settings of the function of the data.

        If the model's function takes the same settings, such as a vocabulary, it gets those that it
        was trained with.
        """
        names = self.flags.keys() - {*_OVERRIDABLE}
        stored = self._overrides(self.flags).recipe if names else {}
        return dataclasses.replace(
            self.config, **{name: stored[name] for name in names if name in stored}
        )

    def naming(self) -> AbstractContextManager[None]:
        """Makes errors within the block name the run's address instead of its local copy."""
        return naming(self.folder, parse(self.name, "run"))

    def _overrides(self, flags: Mapping[str, Any]) -> Overrides:
        """Returns flags over the run's settings for its model and data, or for the data that the
        flags name.

        Settings of its callbacks, and of data that the flags replace, are left out. Raises
        UserError for other unknown settings and for damaged values.
        """
        config = mapping(self.info, "config")
        if str(config.get("model")).endswith(".py"):
            raise UserError(
                f"{self.name}: a script trained it, which only its own code can build: load"
                f" {self.name}/{MODEL}/model.keras, or serve the run"
            )
        stored = _known_settings(config)
        functions = OwnSettings({**stored, **flags})
        stored = functions.without_others(stored)
        if flags or config.get("callbacks"):
            stored = {name: value for name, value in stored.items() if name in functions.fields}
        typed = coerce_all(functions.fields, stored, f"{self.name}/{RUN_INFO}")
        return Overrides({**flags, "jit_compile": "false"}, typed, functions)


def read_request(kind: type[RunOptions], arguments: Sequence[str], usage: Usage) -> RequestedRun:
    """Parses a command line and reads the run's settings.

    Raises UserError for a mistake, or a damaged run.json.
    """
    of_run = {name: _as_of_run(name) for name in _OVERRIDABLE}

    # The run's data function may have settings, which are flags too: they are not known before
    # run.json is read.
    known = {"", "help", "version", *fields_of(kind), *of_run}
    words = [word for word in arguments if flag_name(word) in known]
    options, flags = parse_command(kind, words, usage, of_run)
    checkpoint = options.checkpoint
    is_step = checkpoint.isdecimal() and len(checkpoint) < 12
    if not is_step and checkpoint not in ("", NEWEST, BEST):
        raise UserError(f"checkpoint={checkpoint}: use the number of a step, {NEWEST} or {BEST}")

    # Of a run at gs://, only the files that are needed are copied to this machine.
    address = parse(options.run, "run")
    if address is None:
        folder = expanded(options.run)
    else:
        steps = f"{CHECKPOINTS}/{step_name(int(checkpoint))}/" if is_step else f"{CHECKPOINTS}/"
        templates = (".keras", ".weights.h5", f"/{SERVING}")

        def is_needed(path: str) -> bool:
            template = path.startswith(f"{MODEL}/") and path.endswith(templates)
            return path == RUN_INFO or template or bool(checkpoint and path.startswith(steps))

        folder = Staged(address, "run", flags.get("cache_dir", "")).fetch(is_needed)
    with naming(folder, address):
        info, problem = read_run_info(folder)
    if problem or not mapping(info, "config"):
        raise UserError(
            f"{options.run} is not the job directory of a run:"
            f" {problem or f'{RUN_INFO} in it has no settings'}"
        )

    # Now the flags that the data's function takes are known, and all are read again.
    functions = OwnSettings({**_known_settings(mapping(info, "config")), **flags})
    own = functions.fields.items()
    of_data = {name: field for name, field in own if "data" in functions_taking(field)}
    options, flags = parse_command(
        kind,
        arguments,
        usage,
        {**of_run, **of_data},
        lambda name: ALL_FLAGS + functions.hint(name),
    )
    return RequestedRun(options.run, folder, dict(info), flags, options)


def _as_of_run(name: str) -> Field:
    """Returns a setting of the run as a flag, whose default is the run's own value."""
    field = copy(_FIELDS[name])
    if name != "replicas":
        field.default = ""
        meaning = f"{field.metadata['meaning']} (default: that of the run)"
        field.metadata = MappingProxyType({**field.metadata, "meaning": meaning})
    return field


def _known_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns stored settings without those of training alone.

    Some of those may not exist on this machine.
    """
    return {name: value for name, value in config.items() if name not in _TRAINING_ONLY}
