"""One process of a contender (benchmarks.turns): `python -m benchmarks.contender FRAMEWORK[:OPTION] FLAGS`.

FLAGS are those of trainer.task; `--data` is an .npz file of images in their final size, which every framework reads.
"""

import importlib
import sys

from benchmarks.turns import Run, Work, wait_for_turns
from trainer.config.recipe import resolve

MODULES = {
    "ours": "benchmarks.ours",
    "talk": "benchmarks.talk",
    "input_side": "benchmarks.input_side",
    "tutorial": "benchmarks.tutorial",
    "fit": "benchmarks.keras_fit",
    "pytorch": "benchmarks.pytorch",
}


def start() -> tuple[Run, Work]:
    """The contender that the command line names."""
    framework, _, option = sys.argv[1].partition(":")
    return importlib.import_module(MODULES[framework]).contender(resolve(sys.argv[2:]).config, option)


if __name__ == "__main__":
    wait_for_turns(start)
