"""Reads a command line that names a run by its job directory, and may replace its data. Imports no TensorFlow."""

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
# Settings that a command on a run may change. The default is the run's value, but for replicas all of this machine.
_OVERRIDABLE = ("data", "evaluation_batch_size", "replicas", "skip_bad_images", "data_memory_mib", "cache_dir")
_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
# Settings that version 0.2 wrote and that are ignored: only training needs them, or their values have a new form.
_IGNORED = frozenset({"keep_checkpoints"})
# Settings of the training job alone, at the values that a command on another machine uses.
_TRAINING_ONLY = {
    "recipe": "", "job_dir": "", "callbacks": "", "strategy": "auto", "replicas": 0, "expect_devices": 0,
    "jit_compile": "false", "initial_checkpoint": "", "initial_model": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RequestedRun:
    """Holds the run that a command line names, and the flags that say what to do with it."""

    name: str  # as the user wrote it
    folder: Path  # the local copy of its job directory
    info: Mapping[str, Any]  # run.json
    flags: Mapping[str, str]  # the texts of the flags that replace settings of the run
    options: argparse.Namespace  # the flags of the command itself, among them `checkpoint`

    @property
    def has_other_data(self) -> bool:
        """Returns whether the command line names other data, or sets settings of the function that reads the data."""
        return "data" in self.flags or not self.flags.keys() <= {*_OVERRIDABLE}

    @cached_property
    def trained(self) -> TrainConfig:
        """Returns the run's settings, without those of training alone. Raises UserError if they are damaged."""
        return _resolve(self._values({}), {})

    @cached_property
    def config(self) -> TrainConfig:
        """Returns the run's settings with the flags of the command line. Raises UserError for a wrong flag."""
        flags = dict(self.flags)
        replicas = coerce(_FIELDS["replicas"], flags.pop("replicas", "0"))
        if self.has_other_data:
            config = _resolve(self._values(flags), {"evaluation_fraction": "0", **flags})
        else:
            config = _resolve(vars(self.trained), flags)
        return dataclasses.replace(config, replicas=replicas)  # set last: the run's batch need not divide by them

    @cached_property
    def model_config(self) -> TrainConfig:
        """Returns `config`, but with the run's values of settings that flags give to the function of the data.

        If the model's function takes the same settings, such as a vocabulary, it gets those that it was trained with.
        """
        names = self.flags.keys() - {*_OVERRIDABLE}
        stored = self._values(self.flags) if names else {}
        return dataclasses.replace(self.config, **{name: stored[name] for name in names if name in stored})

    def naming(self) -> AbstractContextManager[None]:
        """Makes errors within the block name the run's address instead of its local copy."""
        return naming(self.folder, parse(self.name, "run"))

    def _values(self, flags: Mapping[str, str]) -> dict[str, Any]:
        """Returns the run's settings for its model and data, or for the data that `flags` name.

        Settings of its callbacks, and of data that `flags` replace, are left out. Raises UserError for other unknown
        settings and for damaged values.
        """
        stored = _known_settings(mapping(self.info, "config"))
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
            field: Field = setting("that of the run", **_FIELDS[name].metadata)  # --help shows this text as the default
            field.name, field.type = name, _FIELDS[name].type
            fields.append(field)
    add_setting_flags(parser, fields)
    return parser


def read_request(parser: Parser, arguments: Sequence[str] | None) -> RequestedRun:
    """Parses the command line and reads the run's settings. Raises UserError for a mistake, or a damaged run.json."""
    options, _ = parser.parse_known_args(arguments)
    checkpoint, flags = options.checkpoint, _flags_of(options, _OVERRIDABLE)
    if checkpoint and checkpoint not in (NEWEST, BEST) and not (checkpoint.isdecimal() and len(checkpoint) < 12):
        raise UserError(f"checkpoint={checkpoint}: use the number of a step, {NEWEST} or {BEST}")
    address = parse(options.run, "run")
    if address is None:
        folder = expanded(options.run)
    else:  # copies the files that are needed
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
    functions = Overrides({**_known_settings(mapping(info, "config")), **flags}).own
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
    return RequestedRun(options.run, folder, dict(info), _flags_of(options, (*_OVERRIDABLE, *fields)), options)


def _known_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns stored settings without ignored ones, callbacks and recipe, which may not exist on this machine."""
    return {name: value for name, value in config.items() if name not in _IGNORED} | {"callbacks": "", "recipe": ""}


def _flags_of(options: argparse.Namespace, names: Collection[str]) -> dict[str, str]:
    """Returns the texts of the flags that were given, of those in `names`."""
    return {name: text for name, text in vars(options).items() if name in names}


def _resolve(values: Mapping[str, Any], flags: Mapping[str, str]) -> TrainConfig:
    """Resolves a run's settings and `flags` for a command that does not train. Raises UserError for contradictions."""
    before = Overrides({**values, **_TRAINING_ONLY})
    return before.replace(**coerce_all(Overrides({**before.values, **flags}).own.settings, flags, "flags")).resolve()
