"""Reads a command line that names a run: its job directory, its settings, perhaps other data. Imports no TensorFlow."""

import argparse
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.run_files.job_files import CHECKPOINTS, MODEL, RUN_INFO, mapping, read_run_info, step_name
from trainer.base.run_files.serving_file import SERVING
from trainer.base.settings.fields import (
    VERBOSE,
    Field,
    Parser,
    add_setting_flags,
    coerce,
    coerce_all,
    refuse_unknown,
    setting,
)
from trainer.base.settings.own_settings import functions_taking
from trainer.base.settings.resolution import Overrides
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded, parse
from trainer.base.storage.staging import Staged, naming

NEWEST, BEST = "newest", "best"
# Settings that a command on a run may change; by default those of the run count, but for replicas: all of this machine.
_OVERRIDABLE = ("data", "evaluation_batch_size", "replicas", "skip_bad_images", "data_memory_mib", "cache_dir")
_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
# Settings of 0.2 that are read no longer: nothing but a training needs them, or their values have another form now.
_DROPPED = frozenset({"keep_checkpoints"})
# Settings of training that another machine or command does not share.
_OF_TRAINING = {
    "recipe": "", "job_dir": "", "callbacks": "", "strategy": "auto", "replicas": 0, "expect_devices": 0,
    "jit_compile": "false", "initial_checkpoint": "", "initial_model": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RequestedRun:
    """Holds the run that a command line names, and what is to be done with it."""

    name: str  # as the user wrote it
    folder: Path  # the local copy of its job directory
    info: Mapping[str, Any]  # run.json
    flags: Mapping[str, str]  # the texts of the flags that replace settings of the run
    options: argparse.Namespace  # the flags of the command itself, among them `checkpoint`

    @property
    def has_other_data(self) -> bool:
        """Returns whether the command line names data, or gives settings of the function that reads them."""
        return "data" in self.flags or not self.flags.keys() <= {*_OVERRIDABLE}

    @cached_property
    def trained(self) -> TrainConfig:
        """Returns the settings of the run, but for those of training alone. Raises UserError if they are damaged."""
        return _resolved(self._values({}), {})

    @cached_property
    def config(self) -> TrainConfig:
        """Returns the settings with the data and the devices of the command line. Raises UserError for a mistake."""
        flags = dict(self.flags)
        replicas = coerce(_FIELDS["replicas"], flags.pop("replicas", "0"))
        if self.has_other_data:
            config = _resolved(self._values(flags), {"evaluation_fraction": "0", **flags})
        else:
            config = _resolved(vars(self.trained), flags)
        return dataclasses.replace(config, replicas=replicas)  # a batch of training need not divide over them

    @cached_property
    def model_config(self) -> TrainConfig:
        """Returns `config` with the run's own values of settings that its two functions may share.

        A vocabulary, or statistics that the model takes from a file, are then those of the run.
        """
        names = self.flags.keys() - {*_OVERRIDABLE}
        stored = self._values(self.flags) if names else {}
        return dataclasses.replace(self.config, **{name: stored[name] for name in names if name in stored})

    def naming(self) -> AbstractContextManager[None]:
        """Names the run's address in place of its local copy in errors within the block."""
        return naming(self.folder, parse(self.name, "run"))

    def _values(self, flags: Mapping[str, str]) -> dict[str, Any]:
        """Returns the run's settings that its functions, or those of `flags`, have. Raises UserError for damaged ones.

        Those of its callbacks and of other data are left out; nothing else may be unknown.
        """
        stored = _as_stored(mapping(self.info, "config"))
        functions = Overrides({**stored, **flags}).own
        settings, stored = functions.settings, functions.without_others(stored)
        known = {field.name for field in dataclasses.fields(settings)}
        if flags or mapping(self.info, "config").get("callbacks"):
            stored = {name: value for name, value in stored.items() if name in known}
        return coerce_all(settings, stored, f"{self.name}/{RUN_INFO}")


def make_parser(prog: str, description: str) -> Parser:
    """Returns a parser with the flags that every command on a run has."""
    parser = Parser(prog=prog, description=description)
    parser.add_argument("run", metavar="RUN", help="a job directory; also at gs://")
    parser.add_argument(
        "--checkpoint", default="", metavar="STEP",
        help=f"weights of this checkpoint, {NEWEST} or {BEST} (default: those of the template model in {MODEL}/)",
    )  # fmt: skip
    parser.add_boolean("verbose", VERBOSE)
    fields = [_FIELDS["replicas"]]
    for name in _OVERRIDABLE:
        if name != "replicas":
            field: Field = setting("that of the run", **_FIELDS[name].metadata)  # which --help shows as the default
            field.name, field.type = name, _FIELDS[name].type
            fields.append(field)
    add_setting_flags(parser, fields)
    return parser


def read_request(parser: Parser, arguments: Sequence[str] | None) -> RequestedRun:
    """Parses the command line and reads the run's settings. Raises UserError for a mistake, or a damaged run.json."""
    options, _ = parser.parse_known_args(arguments)
    checkpoint, flags = options.checkpoint, _settings(options, _OVERRIDABLE)
    if checkpoint and checkpoint not in (NEWEST, BEST) and not (checkpoint.isdecimal() and len(checkpoint) < 12):
        raise UserError(f"checkpoint={checkpoint}: use the number of a step, {NEWEST} or {BEST}")
    address = parse(options.run, "run")
    if address is None:
        folder = expanded(options.run)
    else:  # a local copy of what is needed
        steps = f"{CHECKPOINTS}/{step_name(int(checkpoint))}/" if checkpoint.isdecimal() else f"{CHECKPOINTS}/"

        def is_needed(below: str) -> bool:
            template = below.startswith(f"{MODEL}/") and below.endswith((".keras", ".weights.h5", f"/{SERVING}"))
            return below == RUN_INFO or template or bool(checkpoint and below.startswith(steps))

        folder = Staged(address, "run", flags.get("cache_dir", "")).fetch(is_needed)
    info, problem = read_run_info(folder)
    if problem or not mapping(info, "config"):
        raise UserError(
            f"{options.run} is not the job directory of a run: {problem or f'{RUN_INFO} in it has no settings'}"
        )
    functions = Overrides({**_as_stored(mapping(info, "config")), **flags}).own
    fields = {
        field.name: field for field in dataclasses.fields(functions.settings) if "data" in functions_taking(field)
    }
    known = parser.names
    if twice := fields.keys() & {*known}:
        name = min(twice)
        raise UserError(f"--{name} is a flag of `{parser.prog}` and a setting of your own: rename the setting")
    add_setting_flags(parser, [*fields.values()])
    options, unknown = parser.parse_known_args(arguments)
    refuse_unknown(unknown, [*known, *fields], functions.hint)
    return RequestedRun(options.run, folder, dict(info), _settings(options, (*_OVERRIDABLE, *fields)), options)


def _as_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that are still read, without the names of callbacks and recipe, which may not exist here."""
    return {name: value for name, value in config.items() if name not in _DROPPED} | {"callbacks": "", "recipe": ""}


def _settings(options: argparse.Namespace, names: Collection[str]) -> dict[str, str]:
    return {name: text for name, text in vars(options).items() if name in names}


def _resolved(values: Mapping[str, Any], flags: Mapping[str, str]) -> TrainConfig:
    """Returns the settings of a run as another command uses them. Raises UserError if they contradict each other."""
    before = Overrides({**values, **_OF_TRAINING})
    return before.replace(**coerce_all(Overrides({**before.values, **flags}).own.settings, flags, "flags")).resolve()
