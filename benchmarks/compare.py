"""What `deploy compare` adds to a run, against the same `trainer.task` command alone: `python -m benchmarks.compare`.

Wall seconds of the whole run: its start, the waiting for its end and the reading of what it prints are within them; the
report, which is made once for all runs, is not.
"""

import argparse
import contextlib
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import alternate, base_parser, count, keep, quartiles, ratios, run_main, table
from deploy.comparison.execution import Plan, compare
from deploy.comparison.local_runner import LocalRunner
from deploy.spec.tier import load_tier
from trainer.config.recipe import Overrides
from trainer.errors import DONE

COMPARED, ALONE = "a run of deploy compare", "trainer.task alone"


def compared(flags: Sequence[str]) -> float:
    """Seconds of a comparison of one tier with one run, on all cores of this machine, the report left out."""
    tier = load_tier("cpu")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        began = time.perf_counter()
        plan, runner = Plan((tier.facts,), Overrides.parse(flags)), LocalRunner([tier])
        assert compare(plan, plan.resolve(runner), Path(folder), runner) == DONE
        return time.perf_counter() - began


def alone(flags: Sequence[str]) -> float:
    """Seconds of the trainer's process, whose output goes to a file."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "trainer.task", *flags, f"--job_dir={folder}/job"]
        began = time.perf_counter()
        subprocess.run(command, stdout=log, stderr=log, check=True)
        return time.perf_counter() - began


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=9)
    parser.add_argument("--steps", type=count, default=500, help="of each run")
    return parser


def main() -> None:
    """Prints the table and keeps the raw numbers."""
    options = make_parser().parse_args()
    flags = ["--recipe=wgan_gp_digits", f"--steps={options.steps}"]
    raw = alternate({COMPARED: lambda: compared(flags), ALONE: lambda: alone(flags)}, options.repeats)
    print("\n".join([f"\n{' '.join(flags)}", "", *table(raw, COMPARED, "seconds")]))
    low, median, high = (100 * (ratio - 1) for ratio in quartiles(ratios(raw, COMPARED, ALONE)))
    print(f"\nA comparison adds {median:.1f} % to a run (quartiles {low:.1f} to {high:.1f} %)")
    command = " ".join(["python -m benchmarks.compare", *sys.argv[1:]])
    keep("compare", {"command": command, "seconds": raw})


if __name__ == "__main__":
    run_main(main)
