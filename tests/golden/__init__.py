"""Holds golden files of the recipes and of examples: `python -m tests.golden` records those anew
that have changed.

A golden file holds the numbers of a run's first steps in float64. A run that is compared with it
differs by rounding (within three times what another order of the rows does), or has changed: from
which step, in which tensor. wgan_gp_mnist would have the numbers of wgan_gp_fashion.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
# The flags of each run, which make it small; the digits of the package stand for data that are not
# in the tree.
RUNS = {file.stem: json.loads(file.read_text())["flags"] for file in sorted(FOLDER.glob("*.json"))}
