"""Measures a plan of all tiers, the first time and again: `python -m benchmarks.plan_speed`.

The first one trains some steps in a process of its own; the second finds the plan in the cache.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.runner import compare, elapsed, make_parser, program, save

FLAGS = ("--recipe=wgan_gp_photos", "--data=digits")
PARSER = make_parser(__doc__, repeats=3)


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    repeats = PARSER.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        caches = iter(range(repeats))

        def plan(cache: str) -> float:
            command = [sys.executable, "-m", "deploy", "plan", *FLAGS, f"--out={folder}/out"]
            environment = {**os.environ, "XDG_CACHE_HOME": str(Path(folder) / cache)}
            run = partial(subprocess.run, command, env=environment, check=True, capture_output=True)
            return elapsed(run)

        both = {"first": lambda: plan(f"cache-{next(caches)}"), "again": lambda: plan("cache-0")}
        found = compare("Plan of all tiers, wgan_gp_photos", both, repeats)
    save("plan_speed", seconds=found)
