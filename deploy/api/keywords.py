"""Reads the arguments of a command or of a Python call: the options of a verb, and the settings of the trainer."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TypeVar

from deploy.base.options import Value, options_of, read_texts, texts_of
from deploy.job.job import Program
from deploy.job.script import read_script
from trainer.base.errors import UserError
from trainer.base.settings.fields import as_text, refuse_unknown, underscored
from trainer.base.settings.own_settings import settings_of_models
from trainer.base.settings.resolution import Overrides, flags_of
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import expanded

Options = TypeVar("Options")
LISTED = "those of this verb, `python -m trainer.task --help` those of the training"


def command_line(verb: str, arguments: Sequence[str]) -> str:
    """Returns the shell command for a verb."""
    return shlex.join(["python", "-m", "deploy", verb, *arguments])


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and those after it, which are a script's own."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises UserError for an empty argument or value, as an unset shell variable leaves, or two values of max_cost.

    A setting whose default is empty may be given an empty value, which overrides that of a recipe.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    defaults |= {name: field.default for names in settings_of_models().values() for name, field in names.items()}
    may_be_empty = {name for name, default in defaults.items() if default == ""} - {"recipe", "job_dir"}
    words = [*map(underscored, split_words(arguments)[0])]
    # One word per line, so that both `--max_cost=5` and `--max_cost 5` are found.
    limits = dict.fromkeys(re.findall(r"^--max_cost[=\n](.*)", "\n".join(words), re.MULTILINE))
    # For other flags the last value counts, but with this one a slip costs money.
    if len(limits) > 1:
        raise UserError(f"max_cost is given twice, as {' and '.join(limits)}: give it once")
    flag_before = ""
    for argument in words:
        flag, equals, value = argument.partition("=")
        with_value = equals and flag.startswith("--")
        name, text = (flag[2:], value) if with_value else (flag_before, argument)
        if not text.strip() and name not in may_be_empty:
            raise UserError(
                f"empty argument {argument!r}: give a value, or leave it out (is a variable of the shell not set?)"
            )
        flag_before = flag[2:] if flag.startswith("--") and not equals else ""


def package_folder(package: str) -> str:
    """Returns the folder that is searched first for the functions of the user's `package`; "" without one."""
    return str(expanded(package).resolve().parent) if package else ""


def read_settings(texts: Mapping[str, str], first: str) -> Overrides:
    """Returns the trainer's settings among these flags. Raises UserError for flags of `trainer.task` alone."""
    for name, reason in {"print_config": "trains nothing", "verbose": "is a flag of one run on this machine"}.items():
        if texts.get(name, "false") != "false":
            raise UserError(f"--{name} {reason}: use it with `python -m trainer.task`")
    return Overrides.read(
        {name: text for name, text in texts.items() if name not in ("print_config", "verbose")}, first
    )


def read_call(
    verb: str, kind: type[Options], positional: Sequence[str], keywords: Mapping[str, Value],
    settings: Mapping[str, Value] | None = None,
) -> tuple[Options, Program, str]:  # fmt: skip
    """Returns the options of a Python call, the program that is to run, and the equivalent command.

    `keywords` holds options of `kind` and settings of the trainer; an empty value means the default. In `settings` None
    means "none", which replaces a recipe's value. Raises UserError for what the command refuses, and for its options
    that print or write files.
    """
    for word in map(str, positional):
        if word.startswith("-"):
            raise UserError(f"{word}: flags of a function are keywords, as steps=100")
    known, texts_by_name = options_of(kind), {name: texts_of(name, value) for name, value in keywords.items()}
    for name in ("dry_run", "out", "spec", "json"):
        if (name not in known and texts_by_name.pop(name, []) not in ([], ["false"])) or (settings or {}).get(name):
            raise UserError(
                f"{name} is not for this function: python -m deploy {verb} has it; submit(…, dry_run=True) makes no job"
            )
    words = [f"--{name.removesuffix('_')}={text}" for name, of_flag in texts_by_name.items() for text in of_flag]
    words += [f"--{name}={as_text(value)}" for name, value in (settings or {}).items()]
    check_arguments(words := [*map(str, positional), *words])
    texts: dict[str, Sequence[str]] = {name: texts_by_name.pop(name) for name in [*texts_by_name] if name in known}
    if positional:
        texts["tiers"] = [*map(str, positional)]
    setting_texts = {name: values[-1] for name, values in texts_by_name.items() if values}
    setting_texts |= {name: as_text(value) for name, value in (settings or {}).items()}
    options = read_texts(kind, texts)
    package = options.get("package", "")
    if options.get("script") or options.get("module"):
        refuse_unknown([f"--{name}" for name in setting_texts], ["job_dir"])
        program: Program = read_script(
            options.get("script", ""), options.get("module", ""), package, [], setting_texts.get("job_dir", "")
        )
    else:
        own = Overrides(setting_texts, package_folder(package)).own
        refuse_unknown(
            [f"--{name}" for name in setting_texts], [*known, *(field.name for field in flags_of(own.settings))],
            own.hint, LISTED,
        )  # fmt: skip
        program = read_settings(setting_texts, package_folder(package))
    return kind(**options), program, command_line(verb, words)
