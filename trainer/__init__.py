"""Trains Keras models on one device, several GPUs or several machines, with the same numbers
everywhere."""

import importlib.util
import sys

__version__ = "0.4.0"
# what to do where a requirement is missing
ACTIVATE = (
    "activate the one in which this package is installed, as by source .venv/bin/activate, or"
    " install it here (pip install vertex-trainer)"
)

# A program of this package, of which `python -m` imports the packages first.
if sys.argv[:1] == ["-m"] and not importlib.util.find_spec("yaml"):
    print(f"error: {sys.executable} has no PyYAML in its environment: {ACTIVATE}", file=sys.stderr)
    sys.exit(2)
