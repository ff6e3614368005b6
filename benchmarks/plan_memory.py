"""Proves the predictions of memory: `python -m benchmarks.plan_memory` measures what `trainer.plan` predicts.

Predicts each recipe's step at twice the largest number of rows that it ran, and runs that many. Then draws limits of
memory: with `TF_CPU_BFC_MEM_LIMIT_IN_MB`, a real step runs out of memory where the prediction says so, or it does not.
Each step runs in a process of its own: `python -m benchmarks.plan_memory --only=measure --rows=64 FLAGS`.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from benchmarks.runner import count, make_parser, print_table, program, save
from trainer.plan import ENVIRONMENT

CASES = {
    "cnn_mnist": ["--recipe=cnn_mnist", "--data=digits", "--width=32"],
    "mlp_mnist": ["--recipe=mlp_mnist", "--data=digits"],
    "dcgan_mnist": ["--recipe=dcgan_mnist", "--data=digits", "--width=16"],
    "wgan_gp_digits": ["--recipe=wgan_gp_digits"],
    "examples/table.py": ["--model=examples.table:build", "--data=examples.table:data"],
    "examples/conditional_gan.py": ["--model=examples.conditional_gan:build", "--data=digits", "--image_size=16"],
}
MARGIN = 0.07  # of a limit: within it of what is predicted, either outcome is right
ROWS = 32
_EXHAUSTED = "OOM when allocating"
PARSER = make_parser(__doc__)
PARSER.add_argument("--only", choices=("predict", "measure"), help="one step of the flags that follow, in this process")
PARSER.add_argument("--rows", type=count, default=ROWS)
PARSER.add_argument("--limits", type=count, default=60, help="random limits of memory, over all cases")
PARSER.add_argument("--seed", type=int, default=0)


def child(only: str, rows: int, flags: Sequence[str], limit_mb: int = 0) -> dict[str, Any]:
    """Returns what a process of its own finds; {"exhausted": True} if TensorFlow ran out of memory.

    After some of these errors kernels of oneDNN end the process.
    """
    command = [sys.executable, "-m", "benchmarks.plan_memory", f"--only={only}", f"--rows={rows}", *flags]
    environment = {**os.environ, **ENVIRONMENT, "TF_CPP_MIN_LOG_LEVEL": "1"}
    if limit_mb:
        environment["TF_CPU_BFC_MEM_LIMIT_IN_MB"] = str(limit_mb)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if _EXHAUSTED in done.stderr:
        return {"exhausted": True}
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def predicted(rows: int, flags: Sequence[str]) -> dict[str, Any]:
    """Predicts a step of twice `rows` from those of a half and all of them; runs in the process of `child`."""
    from trainer.planning.peaks import Prediction
    from trainer.reporting.plan_file import peak_of

    (small, _), (large, state) = _trace(rows // 2, flags), _trace(rows, flags)
    prediction = Prediction(small, large, state)
    low, high = prediction.limits(2 * rows, temporaries=True)
    lines = {"device": prediction.device_lines(), "cpu": prediction.cpu_lines()}
    return {**{name: peak_of(each, 2 * rows) for name, each in lines.items()}, "limits": [low, high]}


def measured(rows: int, flags: Sequence[str]) -> dict[str, Any]:
    """Measures a step of `rows`; runs in the process of `child`."""
    from trainer.planning.peaks import peak_bytes

    trace, state = _trace(rows, flags)
    return {name: peak_bytes(trace, state, temporaries=name == "cpu") for name in ("device", "cpu")}


def _trace(rows: int, flags: Sequence[str]) -> Any:
    from trainer.build import set_precision_and_seed
    from trainer.config.overrides import resolve
    from trainer.data.sources import load_dataset
    from trainer.planning.allocations import traced
    from trainer.planning.measured_step import MeasuredStep

    config = resolve(flags).config
    set_precision_and_seed(config)
    built = []
    with closing(load_dataset(config)) as dataset:

        def build() -> MeasuredStep:
            built.append(MeasuredStep(config, dataset, rows))
            return built[0]

        return traced(rows, build), built[0].state_bytes


def agrees(limit: float, limits: Sequence[float], exhausted: bool) -> bool | None:
    """Returns whether the prediction was right; None if the limit is so near that it says neither."""
    if limits[0] * (1 - MARGIN) <= limit <= limits[1] * (1 + MARGIN):
        return None
    return exhausted == (limit < limits[0])


@program
def main() -> None:
    """Prints the table and the count of limits, or what one process found."""
    options, flags = PARSER.parse_known_args()
    if options.only:
        print(json.dumps((predicted if options.only == "predict" else measured)(options.rows, flags)))
        return
    draw, raw = random.Random(options.seed), {}
    lines = ["| | a GPU would hold: predicted, measured (MB) | a CPU | limits: right, too near to say, wrong |",
             "|---|--:|--:|--:|"]  # fmt: skip
    for number, (name, given) in enumerate(CASES.items()):
        guess, found = child("predict", ROWS, given), child("measure", 2 * ROWS, given)
        outcomes = []
        for _ in range(options.limits * (number + 1) // len(CASES) - options.limits * number // len(CASES)):
            limit_mb = max(1, round(draw.uniform(0.6, 1.5) * guess["limits"][1] / 2**20))
            ran = child("measure", 2 * ROWS, given, limit_mb)
            outcomes.append(agrees(limit_mb * 2**20, guess["limits"], "exhausted" in ran))
        raw[name] = {"predicted": guess, "measured": found, "limits": outcomes}
        shown = (f"{guess[kind] / 1e6:.1f}, {found[kind] / 1e6:.1f}" for kind in ("device", "cpu"))
        counted = ", ".join(str(outcomes.count(kind)) for kind in (True, None, False))
        lines.append(f"| `{name}` | {' | '.join(shown)} | {counted} |")
    print_table(f"A step of {2 * ROWS} rows, predicted from {ROWS // 2} and {ROWS}", lines)
    save("plan_memory", cases=raw)
