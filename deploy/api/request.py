"""Makes the request of a verb, from a command line or from a Python call: its options, and what is
to run."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Generic, TypeVar

from deploy.job.options import CodeOptions
from deploy.job.script import Script, read_script
from deploy.job.workload import Program
from trainer.base.errors import UserError
from trainer.base.settings.fields import Usage, default_of, fields_of, read_values, write_flags
from trainer.base.settings.request import NAMING, Overrides, first_values, parse_request
from trainer.base.storage import expanded

Options = TypeVar("Options")
OptionsOfVerb = TypeVar("OptionsOfVerb", covariant=True)
Value = PathLike[str] | float | None | Sequence[str] | Mapping[Any, Any]
# The flags that --help of submit and of compare shows; --help=all shows the rest.
USUAL = (
    "project",
    "region",
    "bucket",
    "package",
    "script",
    "max_cost",
    "spot",
    "timeout",
    "dry_run",
    "detach",
    "on",
    "out",
    "repeats",
)
# Options that say how a verb answers, and not what it does: the same command with and without them
# is one command.
ANSWERS = ("json", "dry_run", "detach", "again")
_CODE = ("script", "module", "package")


@dataclasses.dataclass(frozen=True)
class VerbRequest(Generic[OptionsOfVerb]):
    """Holds a verb's options, the training or script to run, and the verb: the shell command
    without arguments, as python -m deploy submit."""

    options: OptionsOfVerb
    program: Program
    verb: str

    @property
    def command(self) -> str:
        """Returns the shell command for the same."""
        fields = fields_of(type(self.options))
        options = {name: getattr(self.options, name) for name in fields if name not in ANSWERS}
        changed = {
            name: value for name, value in options.items() if value != default_of(fields[name])
        }
        flags = write_flags({**changed, **self.program.values}, fields)
        words = self.program.words if isinstance(self.program, Script) else ()
        return shlex.join([*self.verb.split(), *flags, *["--"] * bool(words), *words])


def verb_usage(
    verb: str, arguments: str, description: str | None, usual: Sequence[str] = ()
) -> Usage:
    """Returns what `python -m deploy VERB --help` says besides its options."""
    flags = (
        "--help=all lists those of this verb, `python -m trainer.task --help` those of the training"
    )
    return Usage(
        f"python -m deploy {verb}",
        arguments,
        description,
        "",
        usual,
        shows_settings=False,
        flags=flags,
    )


def parse_verb(kind: type[Options], arguments: Sequence[str], usage: Usage) -> VerbRequest[Options]:
    """Returns the request of a command line, in which the arguments of a script follow `--`.

    Raises UserError for a mistake in it, SystemExit(0) for --help.
    """
    flags, words = split_words(arguments)
    fields = fields_of(kind)
    values = first_values(flags, [name for name in _CODE if name in fields])
    if "script" not in fields and first_values(flags, _CODE[:2]):
        raise UserError(
            f"{usage.program} knows recipes: what a script needs is known once it runs: measure it"
            " by `compare l4x1 l4x4 --on=vertex --script=FILE --max_cost=5`, and bound its cost by"
            " `submit --script=FILE --max_cost=…`"
        )
    if values.keys() & {"script", "module"}:
        usage = dataclasses.replace(usage, flags="The arguments of your script follow --")
    options, overrides = parse_request(kind, flags, usage, _folder(values))
    return _verb_request(options, overrides, words, usage)


def call_verb(
    kind: type[Options],
    tiers: Sequence[str],
    keywords: Mapping[str, Value],
    settings: Mapping[str, Value] | None,
    usage: Usage,
) -> VerbRequest[Options]:
    """Returns the request of a Python call: that of the command with these flags.

    A value of None counts as not given. `keywords` holds options of `kind` and settings of the
    trainer, `settings` more of these.
    """
    flag = next((tier for tier in map(str, tiers) if tier.startswith("-")), "")
    if flag:
        raise UserError(f"{flag}: flags of a function are keywords, as steps=100")
    values: dict[str, Any] = {"tiers": [*tiers]} if tiers else {}
    for name, value in [*keywords.items(), *(settings or {}).items()]:
        if value is not None:
            if values.get(name, value) != value:
                raise UserError(
                    f"{name} is given twice, as {values[name]} and {value}: give it once"
                )
            values[name] = value
    # The recipe and the functions decide which other settings there are.
    naming = {name: values[name] for name in NAMING if name in values}
    overrides = Overrides.read(naming, _folder(values))
    options, typed = read_values(
        kind,
        values,
        usage,
        overrides.functions.fields,
        lambda name: usage.flags + overrides.functions.hint(name),
    )
    return _verb_request(options, dataclasses.replace(overrides, values=typed), (), usage)


def _folder(values: Mapping[str, Any]) -> str:
    """Returns the folder of the user's package, which is searched first; "" without one."""
    return str(expanded(str(values["package"])).resolve().parent) if values.get("package") else ""


def _verb_request(
    options: Options, overrides: Overrides, words: Sequence[str], usage: Usage
) -> VerbRequest[Options]:
    """Returns the request of a verb; with a script, `words` are its arguments.

    Raises UserError for contradictions.
    """
    program: Program = overrides
    # A script has neither the checks nor the settings of a recipe.
    if isinstance(options, CodeOptions) and (options.script or options.module):
        if getattr(options, "check", False):
            raise UserError(
                "--check trains a recipe on the tier's GPUs, not a script: drop --check, or run it"
                " without one"
            )
        if getattr(options, "plan", False):
            raise UserError("--plan is for recipes: the memory of a script is not known: drop it")
        if getattr(options, "scaling", "") == "weak":
            raise UserError(
                "--scaling=weak changes the batch of a recipe; that of a script is its own: leave"
                " it out"
            )
        program = read_script(options, words, overrides.values)
    elif words:
        raise UserError(
            "what follows -- is for a script of yours: name it by --script=FILE or --module=NAME"
        )
    return VerbRequest(options, program, usage.program)


def split_words(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before `--`, and those after it, which are a script's own."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])
