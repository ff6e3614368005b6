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
    answer_help,
    coerce,
    coerce_all,
    fields_of,
    flag_name,
    read_flags,
    read_options,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        return _resolve(self._values({}))

    @cached_property
    def config(self) -> TrainConfig:
        """Returns the run's settings with the flags of the command line.

        Raises UserError for a wrong flag.
        """
        flags = dict(self.flags)
        replicas = coerce(_FIELDS["replicas"], flags.pop("replicas", 0))
        stored = self._values(flags)
        if self.has_other_data:
            stored["evaluation_fraction"] = 0.0
        config = _resolve({**stored, **flags})
        # Replicas are set last, as the run's batch need not divide by them.
        return dataclasses.replace(config, replicas=replicas)

    @cached_property
    def model_config(self) -> TrainConfig:
        """Returns `config` with the run's values of settings of the function of the data.

        If the model's function takes the same settings, such as a vocabulary, it gets those that it
        was trained with.
        """
        names = self.flags.keys() - {*_OVERRIDABLE}
        stored = self._values(self.flags) if names else {}
        return dataclasses.replace(
            self.config, **{name: stored[name] for name in names if name in stored}
        )

    def naming(self) -> AbstractContextManager[None]:
        """Makes errors within the block name the run's address instead of its local copy."""
        return naming(self.folder, parse(self.name, "run"))

    def _values(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the run's settings for its model and data, or for the data that `flags` name.

        Settings of its callbacks, and of data that `flags` replace, are left out. Raises UserError
        for other unknown settings and for damaged values.
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
        return coerce_all(functions.fields, stored, f"{self.name}/{RUN_INFO}")


def read_request(kind: type[RunOptions], arguments: Sequence[str], usage: Usage) -> RequestedRun:
    """Parses a command line and reads the run's settings.

    Raises UserError for a mistake, or a damaged run.json.
    """
    fields = fields_of(kind)
    known = {**fields, **{name: _as_of_run(name) for name in _OVERRIDABLE}}
    answer_help(arguments, usage, known.values())

    # The run's data function may have settings, which are flags too: they are not known before
    # run.json is read.
    words = [word for word in arguments if not flag_name(word) or flag_name(word) in known]
    texts = read_flags(words, known)
    options = read_options(kind, texts, usage)
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

        folder = Staged(address, "run", texts.get("cache_dir", "")).fetch(is_needed)
    with naming(folder, address):
        info, problem = read_run_info(folder)
    if problem or not mapping(info, "config"):
        raise UserError(
            f"{options.run} is not the job directory of a run:"
            f" {problem or f'{RUN_INFO} in it has no settings'}"
        )

    # Now the flags that the data's function takes are known, and all are read again.
    functions = OwnSettings({**_known_settings(mapping(info, "config")), **texts})
    own = functions.fields.items()
    of_data = {name: field for name, field in own if "data" in functions_taking(field)}
    if twice := of_data.keys() & known.keys():
        name = min(twice)
        raise UserError(
            f"--{name} is a flag of `{usage.program}` and a setting of your own: rename the setting"
        )
    texts = read_flags(
        arguments, {**known, **of_data}, lambda name: ALL_FLAGS + functions.hint(name)
    )
    settings = {name: text for name, text in texts.items() if name not in fields}
    return RequestedRun(options.run, folder, dict(info), settings, options)


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


def _resolve(values: Mapping[str, Any]) -> TrainConfig:
    """Resolves a run's settings for a command that does not train.

    Raises UserError for contradictions.
    """
    return Overrides.read({**values, "jit_compile": "false"}).resolve()
