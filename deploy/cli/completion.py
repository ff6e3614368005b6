"""Completes verbs, tiers and recipes in a shell, by argcomplete, if that is installed."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from deploy.tiers.tier import tier_names
from trainer.base.settings.resolution import recipe_names


def complete(verbs: Sequence[str]) -> None:
    """Prints the completions that are possible at the cursor, and ends the process."""
    cli = argparse.ArgumentParser(add_help=False)
    cli.add_argument("verb", choices=verbs)
    tiers: Any = cli.add_argument("tiers", nargs="*")
    tiers.completer = lambda **_: tier_names()
    recipe: Any = cli.add_argument("--recipe")
    recipe.completer = lambda **_: recipe_names()
    importlib.import_module("argcomplete").autocomplete(cli)
