"""Names the examples, and reads the commands by which their docstrings run them."""

from tests.docs.commands import commands
from tests.docs.sources import ROOT

FILES = {
    path.stem: path
    for path in sorted((ROOT / "examples").glob("[!_]*.py"))
    if path.stem != "optuna_study"
}  # of problems
# which needs keras-hub
EXAMPLES = {name: path for name, path in FILES.items() if name != "keras_hub_lora"}


def arguments_of(example: str) -> list[str]:
    """Returns the arguments of the first command of the example's docstring, without its length in
    epochs."""
    return [
        word
        for word in next(commands(FILES[example])).arguments
        if not word.startswith("--epochs=")
    ]
