"""Predicts step times of this CPU as if it were a tier: `python -m benchmarks.plan_time`.

Three rates (FLOPs, bytes, dispatches) are fitted to three recipes; their leave-one-out error is the band. The others
are then predicted from their graphs alone, as `deploy plan` does for GPUs, and measured.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.runner import make_parser, print_table, program, save
from benchmarks.trainer_loop import TrainingLoop, setup_of, step_graph
from trainer.training.work import NO_KERNEL, operations

KNOWN = ("mlp_mnist", "cnn_mnist", "wgan_gp_digits")
OTHERS = ("dcgan_mnist", "cnn_fashion", "wgan_gp_mnist")
LEAST = 1.5  # of the band
PARSER = make_parser(__doc__, repeats=5, seconds=1.0)
_GRID = (np.geomspace(1e10, 2e12, 24), np.geomspace(1e9, 4e11, 24), np.geomspace(1e-6, 2e-4, 16))
Counted = tuple[npt.NDArray[np.float64], ...]  # of each operation: times, FLOPs, bytes


def measure(recipe: str, seconds: float, repeats: int) -> tuple[Counted, float]:
    """Returns the work of a step, and the median of its seconds."""
    setup = setup_of(f"--recipe={recipe}", "--data=digits", "--replicas=1", "--width=32")
    found = [op for op in operations(step_graph(setup), rows=setup.replicas.rows) if op.type not in NO_KERNEL]
    counted = tuple(np.array([[op.times, op.flops, op.moved_bytes] for op in found], np.float64).T)
    loop = TrainingLoop(setup)
    steps = loop.steps_in(seconds)
    return counted, statistics.median(loop(steps) / steps for _ in range(repeats))


def predicted(counted: Counted, rates: Sequence[float]) -> float:
    """Returns the seconds of a step: each operation takes the longest of its dispatch, its FLOPs and its bytes."""
    times, flops, moved = counted
    flop_rate, byte_rate, dispatch = rates
    return float(np.maximum(np.maximum(times * dispatch, flops / flop_rate), moved / byte_rate).sum())


def fitted(known: Sequence[tuple[Counted, float]]) -> tuple[float, ...]:
    """Returns the rates with the least squares of the logarithms of predicted over measured times."""

    def error(rates: Sequence[float]) -> float:
        return sum(math.log(predicted(counted, rates) / seconds) ** 2 for counted, seconds in known)

    return min(itertools.product(*_GRID), key=error)


def band(known: Sequence[tuple[Counted, float]]) -> float:
    """Returns the factor by which a prediction may be off, either way, from each recipe's error without itself."""
    errors = []
    for index, (counted, seconds) in enumerate(known):
        rates = fitted([*known[:index], *known[index + 1 :]])
        errors.append(abs(math.log(predicted(counted, rates) / seconds)))
    return max(LEAST, math.exp(max(errors)))


@program
def main() -> None:
    """Prints the table and saves the raw numbers."""
    options = PARSER.parse_args()
    found = {name: measure(name, options.seconds, options.repeats) for name in (*KNOWN, *OTHERS)}
    known = [found[name] for name in KNOWN]
    rates, factor = fitted(known), band(known)
    lines = ["| | ms/step, predicted | measured | |", "|---|--:|--:|---|"]
    raw = {}
    for name in OTHERS:
        guess, seconds = predicted(found[name][0], rates), found[name][1]
        inside = 1 / factor <= guess / seconds <= factor
        raw[name] = [guess, seconds, inside]
        lines.append(f"| {name} | {1e3 * guess:.3g} ({1e3 * guess / factor:.3g} - {1e3 * guess * factor:.3g}) | "
                     f"{1e3 * seconds:.3g} | {'inside' if inside else 'outside'} |")  # fmt: skip
    print_table(f"This CPU as a tier, from {', '.join(KNOWN)}", lines)
    save("plan_time", rates=rates, band=factor, steps=raw)
