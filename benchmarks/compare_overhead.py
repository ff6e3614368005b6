"""Measures the seconds that `deploy compare` adds to a run of `trainer.task`: `python -m benchmarks.compare_overhead`.

These include starting the run, waiting for its end and reading its output, but not the report, made once for all runs.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner import compare, count, elapsed, make_parser, program, quartiles, ratios, save
from deploy.comparison import execution
from deploy.comparison.runners import LocalRunner
from deploy.tiers.tier import load_tier
from trainer.base.errors import DONE
from trainer.base.settings.request import Overrides

COMPARED, ALONE = "a run of deploy compare", "trainer.task alone"
PARSER = make_parser(__doc__, repeats=9)
PARSER.add_argument("--steps", type=count, default=500, help="of each run")


def compared(flags: Sequence[str]) -> float:
    """Measures a comparison of one tier with one run on all cores of this machine, without the report."""
    tier = load_tier("cpu")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        plan, runner = execution.ComparisonRequest((tier,), Overrides.parse(flags)), LocalRunner()
        began = time.perf_counter()
        assert execution.run_comparison(plan, plan.resolve(), Path(folder), runner) == DONE
        return time.perf_counter() - began


def alone(flags: Sequence[str]) -> float:
    """Measures the trainer's process, with its output in a file."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "trainer.task", *flags, f"--job_dir={folder}/job"]
        return elapsed(lambda: subprocess.run(command, stdout=log, stderr=log, check=True))


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    options = PARSER.parse_args()
    flags = ["--recipe=wgan_gp_digits", f"--steps={options.steps}"]
    raw = compare(" ".join(flags), {COMPARED: lambda: compared(flags), ALONE: lambda: alone(flags)}, options.repeats)
    low, median, high = (100 * (ratio - 1) for ratio in quartiles(ratios(raw, COMPARED, ALONE)))
    print(f"\nA comparison adds {median:.1f} % to a run (quartiles {low:.1f} to {high:.1f} %)")
    save("compare_overhead", seconds=raw)
