"""Makes a request from a command line or from a Python call: options of a command, and settings of
a run.

A request is made once, typed and immutable. A flag overrides the recipe, the recipe overrides the
default. `deploy` resolves the same Overrides before it submits a job, so that it submits nothing
that the trainer would refuse. The resolved config has every setting, also those of the user's
functions, and has passed `rules.check`. Imports no TensorFlow.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from trainer.base.errors import UserError
from trainer.base.settings.fields import (
    VERBOSE,
    Options,
    Usage,
    Values,
    coerce_all,
    default_of,
    fields_of,
    flag_name,
    nearest,
    options_class,
    parse_command,
    setting,
    write_flags,
)
from trainer.base.settings.model_settings import MODELS
from trainer.base.settings.own_settings import FUNCTIONS, REQUIRED, OwnSettings
from trainer.base.settings.rules import check, check_used
from trainer.base.settings.train_config import DATA_KINDS, DATA_SOURCES, USUAL, TrainConfig
from trainer.base.settings.yaml_file import read_yaml

RECIPES = Path(__file__).parents[2] / "recipes"
NAMING = ("recipe", *FUNCTIONS)  # settings that decide which others there are
LENGTHS = ("steps", "epochs")  # a flag of either replaces both of a recipe
# What users of Keras and of other trainers look for, and what does it here.
_ELSEWHERE = {
    "batch_size": "use --global_batch_size, the examples of a step over all replicas",
    "gpus": "use --replicas, the number of local devices",
    "lr": "use --learning_rate",
    "optimizer": "call model.compile(optimizer, …) in the function that --model names",
    "resume": "the same command with the same --job_dir resumes",
    "validation_split": "use --evaluation_fraction, the share of examples that is held out",
}
# Where a script has what is a flag for named functions.
OF_SCRIPT = (
    "what compile and fit take, such as batch_size, epochs and learning_rate, is written in the"
    " script"
)


@dataclass(frozen=True)
class Overrides:
    """Holds the settings that a command or a call gives: typed values, each within its own limits,
    in their order.

    recipe: those of the recipe that they name; functions: the settings of the functions that either
        names; folder: one that is searched first for the user's own functions.
    """

    values: Values
    recipe: Values
    functions: OwnSettings
    folder: str = ""

    @classmethod
    def read(cls, values: Values, folder: str = "") -> "Overrides":
        """Reads the recipe that the values name, and converts all values, texts of flags too, to
        their types.

        Raises UserError for an unknown setting, and for a value that does not fit its field.
        """
        recipe = _read_recipe(values.get("recipe", ""))
        named = {"model": TrainConfig.model, **recipe, **values}
        functions = OwnSettings({name: named[name] for name in FUNCTIONS if name in named}, folder)
        origin = f"recipe={values.get('recipe', '')}"
        of_recipe = coerce_all(functions.fields, functions.without_others(recipe), origin)
        typed = coerce_all(functions.fields, values)
        return cls(typed, of_recipe, functions, folder)

    @classmethod
    def parse(cls, words: Sequence[str], folder: str = "") -> "Overrides":
        """Returns the settings in arguments of `trainer.task`.

        Raises UserError for a mistake in them.
        """
        return parse_request(TaskOptions, words, TASK, folder)[1]

    def replace(self, **values: Any) -> "Overrides":
        """Returns the overrides with other values of these settings."""
        return Overrides.read({**self.values, **values}, self.folder)

    def without(self, *names: str) -> "Overrides":
        """Returns the overrides without these settings, none of which names a function or a
        recipe."""
        return dataclasses.replace(
            self, values={name: value for name, value in self.values.items() if name not in names}
        )

    @property
    def named(self) -> set[str]:
        """Returns the settings that the user names, in flags or in a recipe file, and that so must
        have an effect.

        A file that --print_config has written names all, so that those at their defaults do not
        count.
        """
        of_file = self.of_recipe if self.names_recipe_file else {}
        fields = self.functions.fields
        changed = [name for name in of_file if of_file[name] != default_of(fields[name])]
        return {*self.values, *changed}

    @property
    def names_recipe_file(self) -> bool:
        """Returns whether the recipe is a file of the user's, not one of the package."""
        return _is_file(self.values.get("recipe", ""))

    @property
    def of_recipe(self) -> dict[str, Any]:
        """Returns the settings of the recipe that no flag replaces; {} without a recipe."""
        lengths = LENGTHS if any(self.values.get(name) is not None for name in LENGTHS) else ()
        replaced = {*self.values, *lengths}
        return {name: value for name, value in self.recipe.items() if name not in replaced}

    @cached_property
    def config(self) -> TrainConfig:
        """Returns the resolved settings: these values override the recipe's, and those override
        defaults.

        Raises UserError if a setting is missing or has no effect, or if settings contradict each
        other.
        """
        values = {**self.of_recipe, **self.values}
        for name, field in self.functions.fields.items():
            if default_of(field) is REQUIRED and name not in values:
                raise UserError(
                    f"{name} is missing, one of the {field.metadata['group']}: use --{name}=VALUE"
                )
        config = self.functions.settings(**values)
        if config.steps is None and config.epochs is None:
            config = dataclasses.replace(config, epochs=1)
        check(config)
        if config.model not in MODELS and "data" not in values:
            raise UserError(
                f"data is missing: model={config.model} is a function of your own: use"
                " --data=package.module:function, a folder or a file, or --data=digits to try the"
                " model without any"
            )
        check_used(self.named, config)
        return config

    def arguments(self) -> list[str]:
        """Returns the overrides as arguments of a command."""
        return write_flags(self.values)


def parse_request(
    kind: type[Options], words: Sequence[str], usage: Usage, folder: str = ""
) -> tuple[Options, Overrides]:
    """Returns what a command line asks for: the options of its command, and the settings of a run.

    Raises UserError for a mistake in it, SystemExit(0) for --help.

    folder: one that is searched first for the user's own functions.
    """
    # The functions that the command names decide which other flags there are.
    overrides = Overrides.read(first_values(words, NAMING), folder)
    settings = overrides.functions.fields
    has_script = bool(first_values(words, ("script",)))
    if has_script:
        settings = {name: settings[name] for name in LAUNCH_SETTINGS}
    else:
        for name in map(flag_name, words):
            if name in _ELSEWHERE and name not in {*settings, *fields_of(kind)}:
                raise UserError(f"unknown flag --{name}: {_ELSEWHERE[name]}")
    options, values = parse_command(
        kind,
        words,
        usage,
        settings,
        lambda name: (
            usage.flags + (f"; {OF_SCRIPT}" if has_script else overrides.functions.hint(name))
        ),
        settings.keys() - fields_of(TrainConfig).keys() if overrides.values else (),
    )
    return options, dataclasses.replace(overrides, values=values)


@options_class
class TaskOptions:
    """Holds the flags of `trainer.task` that are not settings of a run."""

    print_config: bool = setting(False, "print the resolved settings and stop", group="run")
    verbose: bool = VERBOSE


# The settings of `python -m trainer.launch`: those that `fit` cannot say.
LAUNCH_SETTINGS = (
    "job_dir",
    "seed",
    "replicas",
    "expect_devices",
    "strategy",
    "precision",
    "virtual_replicas",
    "micro_batches",
    "max_minutes",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_checkpoints",
    "save_optimizer",
    "best_metric",
    "report_every_steps",
    "tensorboard",
    "profile_steps",
    "track",
    "tuning_metric",
    "jit_compile",
    "tf32",
    "deterministic",
    "sync_batch_norm",
    "allow_replica_dependence",
    "steps_per_loop",
    "worker_timeout_seconds",
    "cache_dir",
)


def first_values(words: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Returns the texts of these flags by name, before the command line is parsed: its other flags
    depend on them."""
    values = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        _, equals, value = word.partition("=")
        value = value if equals else following
        if flag_name(word) in names and value and not value.startswith("--"):
            values[flag_name(word)] = value
    return values


def to_recipe(config: TrainConfig) -> str:
    """Returns the settings as a recipe for the same run."""
    fields = fields_of(type(config))
    values = {name: getattr(config, name) for name in fields if name != "recipe"}
    # What is empty, and empty by default, is left out.
    written = {}
    for name, value in values.items():
        if value not in (None, "") or default_of(fields[name]) not in (None, ""):
            written[name] = [*value] if isinstance(value, tuple) else value
    return yaml.safe_dump(written, sort_keys=False)


def recipe_names() -> list[str]:
    """Returns the names of the recipes in the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _is_file(recipe: Any) -> bool:
    return str(recipe).endswith((".yaml", ".yml")) or "/" in str(recipe)


def _read_recipe(name: Any) -> dict[str, Any]:
    """Returns the content of the recipe with this name or path; {} for none."""
    if not name:
        return {}
    try:
        content = read_yaml(
            Path(name) if _is_file(name) else RECIPES / f"{name}.yaml", f"recipe={name}"
        )
    except FileNotFoundError:
        known = recipe_names()
        raise UserError(
            f"recipe={name}: no such recipe{nearest(str(name), known)} Known: {', '.join(known)},"
            " or a .yaml file"
        ) from None
    if "recipe" in content:
        raise UserError(
            f"recipe={name}: a recipe cannot name another (recipe: {content['recipe']})"
        )
    return content


_RECIPES = recipe_names()
_DESCRIPTION = f"""\
Trains a Keras model on one device, on several GPUs or on several machines, with the same numbers
everywhere.

A recipe is a file of settings; a flag overrides it. Recipes: a path, or
  {", ".join(_RECIPES[:5])},
  {", ".join(_RECIPES[5:])}
Data: {", ".join(DATA_SOURCES)}, or a path: {", ".join(DATA_KINDS)}."""

_EPILOG = """\
Start with:
  python -m trainer.task --recipe=wgan_gp_digits --job_dir=runs/demo
      train on data in the package; run it again to resume
  python -m trainer.task --recipe=cnn_mnist --data=FOLDER --job_dir=runs/cnn
  python -m trainer.task --recipe=cnn_mnist --print_config
      print the settings that would be used
  python -m trainer.task --help --model=cnn
      list the settings of a model, too
  python -m deploy --help
      Vertex AI, and which tier is worth its money

The job directory holds model/ (.keras, .h5, SavedModel), samples/, stats.jsonl, run.json,
result.json, checkpoints/ and logs/.

Exit codes: 0 done; 2 you must change something; 75 interrupted, state saved, run the same command
again; 1 a fault of this package or of the platform."""

TASK = Usage(
    "python -m trainer.task",
    "--recipe=NAME --job_dir=FOLDER [--setting=value …]",
    _DESCRIPTION,
    _EPILOG,
    USUAL,
)
