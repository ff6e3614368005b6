"""A recipe and flags, resolved to one TrainConfig. Imports no TensorFlow.

A flag wins over the recipe, the recipe over the default. `resolve` is the entry; `deploy` asks the same function
at the desk, so that nothing is sent which the trainer would refuse.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.config.fields import coerce, coerce_all, nearest, setting
from trainer.config.flags import parse_flags, read_yaml
from trainer.config.rules import check
from trainer.config.train_config import DATA_KINDS, DATA_SOURCES, TrainConfig
from trainer.errors import UserError

RECIPES = Path(__file__).parents[1] / "recipes"


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """One command line, understood: the settings, and whether only to print them."""

    config: TrainConfig
    print_config: bool = setting(False, "print the resolved settings and stop", group="run")


_PRINT_CONFIG = dataclasses.fields(CommandLine)[1]

_EPILOG = """\
Start with:
  python -m trainer.task --recipe=wgan_gp_digits --job_dir=runs/demo      data that come along; the same again goes on
  python -m trainer.task --recipe=cnn_mnist --data=FOLDER --job_dir=runs/cnn
  python -m trainer.task --recipe=cnn_mnist --print_config                what would run
  python -m deploy --help                                                 Vertex AI, and which tier is worth its money

In the job directory: model/ (.keras, .h5, SavedModel), samples/, stats.jsonl, run.json, result.json, checkpoints/,
logs/.

Exit codes: 0 done; 2 you must change something; 75 interrupted, state saved, run the same command again; 1 a fault of
ours or of the platform."""


def _description() -> str:
    return f"""\
Trains a Keras model on one device, on several GPUs or on several machines, with the same numbers everywhere.

A recipe is a file of settings; a flag wins over it. Recipes: a path, or
  {", ".join(recipe_names()[:5])},
  {", ".join(recipe_names()[5:])}
Data: {", ".join(DATA_SOURCES)}, or a path: {", ".join(DATA_KINDS)}."""


def resolve(arguments: Sequence[str]) -> CommandLine:
    """Flags over recipe over defaults; UserError where something does not fit, SystemExit(0) for --help."""
    flags = parse_flags([*dataclasses.fields(TrainConfig), _PRINT_CONFIG], arguments, _description(), _EPILOG)
    print_config = coerce(_PRINT_CONFIG, flags.pop("print_config", "false"))
    recipe = flags.get("recipe", "")
    from_recipe = _read_recipe(recipe) if recipe else {}
    from_flags = coerce_all(TrainConfig, flags, "flags")
    _one_length(from_recipe, f"recipe={recipe}")
    _one_length(from_flags, "flags")
    if from_flags.keys() & {"steps", "epochs"}:
        from_recipe = {key: value for key, value in from_recipe.items() if key not in ("steps", "epochs")}
    config = TrainConfig(**{**from_recipe, **from_flags})
    if config.steps is None and config.epochs is None:
        config = dataclasses.replace(config, epochs=1)
    check(config)
    return CommandLine(config, print_config)


def to_yaml(config: TrainConfig) -> str:
    """The settings as a recipe that gives the same run again."""
    settings = {
        key: value for key, value in dataclasses.asdict(config).items() if value is not None and key != "recipe"
    }
    return yaml.safe_dump(settings, sort_keys=False)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def _read_recipe(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml")) or "/" in name else RECIPES / f"{name}.yaml"
    try:
        content = read_yaml(path, f"recipe={name}")
        if "recipe" in content:
            raise UserError(f"recipe={name}: a recipe cannot name another (recipe: {content['recipe']})")
        return coerce_all(TrainConfig, content, f"recipe={name}")
    except FileNotFoundError:
        known = recipe_names()
        raise UserError(
            f"recipe={name}: no such recipe{nearest(name, known)} Known: {', '.join(known)}, or a .yaml file"
        ) from None


def _one_length(values: Mapping[str, Any], origin: str) -> None:
    if values.get("steps") is not None and values.get("epochs") is not None:
        raise UserError(
            f"{origin}: steps={values['steps']} and epochs={values['epochs']} both say how long to train: drop one"
        )
