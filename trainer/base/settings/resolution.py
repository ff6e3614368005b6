"""Resolves a recipe and flags to one TrainConfig. Imports no TensorFlow.

A flag overrides the recipe, the recipe overrides the default. A command line is parsed once, into Overrides; `deploy`
resolves the same Overrides before it submits a job, so that it submits nothing that the trainer would refuse. The
result has every setting, also those of the user's functions, and has passed `rules.check`.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from trainer.base.errors import UserError
from trainer.base.settings.fields import (
    VERBOSE,
    Parser,
    add_setting_flags,
    as_text,
    coerce,
    coerce_all,
    flag_values,
    nearest,
    refuse_unknown,
    setting,
)
from trainer.base.settings.own_settings import FUNCTIONS, REQUIRED, OwnSettings
from trainer.base.settings.rules import check
from trainer.base.settings.train_config import DATA_KINDS, DATA_SOURCES, MODELS, USUAL, TrainConfig
from trainer.base.settings.yaml_file import read_yaml

RECIPES = Path(__file__).parents[2] / "recipes"
LENGTHS = ("steps", "epochs")  # a flag of either replaces both of a recipe


@dataclasses.dataclass(frozen=True)
class Overrides:
    """Holds the settings of a command line: typed values, each within its own limits, in their order.

    first: a folder that is searched first for the user's own functions; see `OwnSettings`.
    """

    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first: str = ""

    @classmethod
    def read(cls, texts: Mapping[str, str], first: str = "") -> "Overrides":
        """Converts the texts of flags to typed overrides. Raises UserError for a text that does not fit its field."""
        overrides = cls(texts, first)  # the texts are enough to find the functions and their settings
        return overrides.replace(**coerce_all(overrides.own.settings, texts, "flags"))

    @classmethod
    def parse(cls, arguments: Sequence[str], first: str = "") -> "Overrides":
        """Parses a command line to typed overrides. Raises UserError for a mistake in it."""
        return cls.read(parse_flags(arguments, first), first)

    def replace(self, **values: Any) -> "Overrides":
        """Returns the overrides with other values of these settings."""
        return Overrides({**self.values, **values}, self.first)

    def without(self, *names: str) -> "Overrides":
        """Returns the overrides without these settings."""
        return Overrides({name: value for name, value in self.values.items() if name not in names}, self.first)

    @property
    def names_recipe_file(self) -> bool:
        """Returns whether the recipe is a file of the user's, not one of the package."""
        recipe = self.values.get("recipe", "")
        return recipe.endswith((".yaml", ".yml")) or "/" in recipe

    @cached_property
    def own(self) -> OwnSettings:
        """Returns the settings of the functions that the flags or the recipe name."""
        named = {"model": TrainConfig.model, **self._recipe_content, **self.values}
        return OwnSettings({name: named[name] for name in FUNCTIONS if name in named}, self.first)

    @cached_property
    def _recipe_content(self) -> dict[str, Any]:
        name = self.values.get("recipe", "")
        if not name:
            return {}
        path = Path(name) if self.names_recipe_file else RECIPES / f"{name}.yaml"
        try:
            content = read_yaml(path, f"recipe={name}")
        except FileNotFoundError:
            known = recipe_names()
            raise UserError(
                f"recipe={name}: no such recipe{nearest(name, known)} Known: {', '.join(known)}, or a .yaml file"
            ) from None
        if "recipe" in content:
            raise UserError(f"recipe={name}: a recipe cannot name another (recipe: {content['recipe']})")
        return content

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Returns the settings of the recipe that no flag replaces; {} without a recipe."""
        origin = f"recipe={self.values.get('recipe', '')}"
        settings = coerce_all(self.own.settings, self.own.without_others(self._recipe_content), origin)
        _check_length(settings, origin)
        lengths = LENGTHS if any(self.values.get(name) is not None for name in LENGTHS) else ()
        replaced = {*self.values, *lengths}
        return {name: value for name, value in settings.items() if name not in replaced}

    def resolve(self) -> TrainConfig:
        """Returns the config: flags override the recipe, and the recipe overrides defaults.

        Raises UserError if a setting is missing, or if settings contradict each other.
        """
        _check_length(self.values, "flags")
        settings = self.own.settings  # with those of the functions that the flags or else the recipe name
        values = {**self.recipe, **coerce_all(settings, self.values, "flags")}
        for field in dataclasses.fields(settings):
            if field.default is REQUIRED and field.name not in values:
                raise UserError(
                    f"{field.name} is missing, one of the {field.metadata['group']}: use --{field.name}=VALUE"
                )
        config = settings(**values)
        if config.steps is None and config.epochs is None:
            config = dataclasses.replace(config, epochs=1)
        check(config)
        if config.model not in MODELS and "data" not in values:
            raise UserError(
                f"data is missing: model={config.model} is a function of your own: use --data=package.module:function, "
                "a folder or a file, or --data=digits to try the model without any"
            )
        return config

    def arguments(self) -> list[str]:
        """Returns the overrides as arguments of a command."""
        return [f"--{name}={as_text(value)}" for name, value in self.values.items()]


@dataclasses.dataclass(frozen=True)
class Command:
    """Holds one command line of the trainer: the resolved settings, and the flags that are not settings of a run."""

    config: TrainConfig
    print_config: bool = setting(False, "print the resolved settings and stop", group="run")
    verbose: bool = setting(False, VERBOSE, group="run")


_, *_COMMAND_FLAGS = dataclasses.fields(Command)


def flags_of(settings: type[TrainConfig]) -> tuple[dataclasses.Field[Any], ...]:
    """Returns every flag of a command line of the trainer with these settings."""
    return (*dataclasses.fields(settings), *_COMMAND_FLAGS)


def resolve(arguments: Sequence[str], **help_options: Any) -> Command:
    """Parses and resolves a command line. Raises UserError for a mistake, SystemExit(0) for --help.

    help_options: options of `Parser` for the --help of another command than trainer.task.
    """
    texts = parse_flags(arguments, **help_options)
    flags = {field.name: coerce(field, texts.pop(field.name, "false")) for field in _COMMAND_FLAGS}
    return Command(Overrides.read(texts).resolve(), **flags)


def own_settings(arguments: Sequence[str], first: str = "") -> OwnSettings:
    """Returns the settings of the functions that a command line names, by flags or in a recipe.

    They must be known before the other flags can be parsed. Raises UserError if a parameter cannot be a setting.
    """
    return Overrides(flag_values(arguments, ("recipe", *FUNCTIONS)), first).own


def parse_flags(arguments: Sequence[str], first: str = "", **help_options: Any) -> dict[str, str]:
    """Returns the text of each flag by name. Raises UserError for an unknown flag, SystemExit(0) for --help."""
    functions = own_settings(arguments, first)
    flags = flags_of(functions.settings)
    recipes = ",\n  ".join([", ".join(recipe_names()[:5]), ", ".join(recipe_names()[5:])])
    of_help = help_options or {
        "prog": "python -m trainer.task",
        "usage": "%(prog)s --recipe=NAME --job_dir=FOLDER [--setting=value …]",
        "description": _DESCRIPTION.format(
            recipes=recipes, sources=", ".join(DATA_SOURCES), kinds=", ".join(DATA_KINDS)
        ),
        "epilog": _EPILOG,
    }
    usual = [*USUAL, *(name for parent in of_help.get("parents", ()) for name in parent.names)]
    if flag_values(arguments, ("recipe", *FUNCTIONS)):  # --help then shows the settings of these functions too
        usual += {field.name for field in flags} - {field.name for field in flags_of(TrainConfig)}
    # The lines of description and epilog are kept as they are.
    parser = Parser(usual=usual, formatter_class=argparse.RawDescriptionHelpFormatter, **of_help)
    add_setting_flags(parser, flags)
    options, unknown = parser.parse_known_args(arguments)
    names = [field.name for field in flags]
    refuse_unknown(unknown, [*names, "help"], functions.hint)
    return {name: text for name, text in vars(options).items() if name in names}


def to_yaml(config: TrainConfig) -> str:
    """Returns the settings as a recipe for the same run."""
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name != "recipe" and (getattr(config, field.name) is not None or field.default is not None)
    }
    return yaml.safe_dump(settings, sort_keys=False)


def recipe_names() -> list[str]:
    """Returns the names of the recipes in the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _check_length(values: Mapping[str, Any], origin: str) -> None:
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise UserError(
            f"{origin}: steps={values['steps']} and epochs={values['epochs']} both set the length: drop one of them"
        )


_DESCRIPTION = """\
Trains a Keras model on one device, on several GPUs or on several machines, with the same numbers everywhere.

A recipe is a file of settings; a flag overrides it. Recipes: a path, or
  {recipes}
Data: {sources}, or a path: {kinds}."""

_EPILOG = """\
Start with:
  python -m trainer.task --recipe=wgan_gp_digits --job_dir=runs/demo      data in the package; run it again to resume
  python -m trainer.task --recipe=cnn_mnist --data=FOLDER --job_dir=runs/cnn
  python -m trainer.task --recipe=cnn_mnist --print_config                print the settings that would be used
  python -m trainer.task --help --model=cnn                               the settings of a model, too
  python -m deploy --help                                                 Vertex AI, and which tier is worth its money

The job directory holds model/ (.keras, .h5, SavedModel), samples/, stats.jsonl, run.json, result.json, checkpoints/
and logs/.

Exit codes: 0 done; 2 you must change something; 75 interrupted, state saved, run the same command again; 1 a fault of
this package or of the platform."""
