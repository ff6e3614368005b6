"""Trains Keras models on one device, several GPUs or several machines, with the same numbers
everywhere."""

import importlib.util
import sys

__version__ = "0.4.0"

# A program of this package, of which `python -m` imports the packages first.
if sys.argv[0] == "-m" and not importlib.util.find_spec("yaml"):
    print(
        f"error: {sys.executable} has no PyYAML, which this package requires: activate the"
        " environment in which it is installed, as by source .venv/bin/activate, or install it here"
        " (pip install vertex-trainer)",
        file=sys.stderr,
    )
    sys.exit(2)
