"""The fraction of the cores' matrix rate that a recipe reaches: `python -m benchmarks.limit [--profile]`.

FLOPs of one step, counted in its graph (benchmarks/flops.py says what counts), over the rate of a large matrix product
on the same devices in the same run. With --profile: where the time of a step goes, by kind of operation.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from benchmarks.flops import operations, step_graph
from benchmarks.measure import base_parser, keep, possible, run_main, some_of
from benchmarks.profile import kind, seconds_by_kind
from trainer.build import build_setup
from trainer.config.recipe import recipe_names, resolve
from trainer.distribution.strategy import make_replicas

RECIPES = "cnn_mnist,wgan_gp_mnist,dcgan_mnist,mlp_mnist"
SIZES = (512, 1024, 2048)  # of the square matrices
DTYPES = {"float32": "float32", "mixed_bfloat16": "bfloat16"}  # by precision: what products are computed in
# The digits that come with the package stand in for each recipe's data: content does not change the speed.
FLAGS = ["--data=digits", "--replicas=1"]
EXTRA = {"efficientnet_photos": ["--weights=none", "--fine_tune_from=", "--fine_tune_after_steps=0"]}


class Training:
    """A recipe that goes on through all measurements, in calls of about `seconds`."""

    def __init__(self, recipe: str, precision: str, seconds: float) -> None:
        config = resolve([f"--recipe={recipe}", *EXTRA.get(recipe, []), *FLAGS, f"--precision={precision}"]).config
        assembly = build_setup(config, make_replicas(config))
        self.flops = Counter[str]()  # of one step, by kind of operation
        for op in operations(step_graph(assembly)):
            self.flops[kind(op.type, op.scope)] += op.flops
        self._rows, self._run, self._position, self.steps = assembly.rows_from(0), assembly.step_runner(), 0, 1
        self()  # traces
        self.steps = 3
        self.steps = max(1, round(seconds * self()))

    def __call__(self) -> float:
        """Steps a second of one call."""
        began = time.perf_counter()
        self._run(self._rows, self._position, self.steps)
        self._position += self.steps
        return self.steps / (time.perf_counter() - began)


def matrix_rate(dtype: str) -> Callable[[], float]:
    """A measurement: FLOP/s of the best of some large square products, each for 0.2 seconds."""
    multiply = tf.function(lambda a: tf.reduce_sum(a @ a), input_signature=[tf.TensorSpec([None, None], dtype)])
    matrices = {size: tf.cast(tf.random.normal((size, size)), dtype) for size in SIZES}
    for matrix in matrices.values():
        multiply(matrix)  # warms up

    def rate(size: int) -> float:
        began, done = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < 0.2:
            float(multiply(matrices[size]))  # one number comes back, once the product is there
            done += 1
        return done * 2 * size**3 / passed

    return lambda: max(rate(size) for size in SIZES)


def fractions(trainings: Mapping[str, Training], repeats: int) -> dict[str, Any]:
    """Prints the table of the fractions reached; returns the raw numbers."""
    rates = {dtype: matrix_rate(dtype) for dtype in {DTYPES[name.split()[1]] for name in trainings}}
    raw: dict[str, Any] = {name: {"flops": each.flops.total(), "limit": [], "steps": []}
                           for name, each in trainings.items()}  # fmt: skip
    for _ in range(repeats):
        for name, training in trainings.items():  # the limit just before, for a machine's speed drifts
            raw[name]["limit"].append(rates[DTYPES[name.split()[1]]]())
            raw[name]["steps"].append(training())
    print("\n| | GFLOP a step | steps/s | matrix rate, GFLOP/s | fraction reached | lowest to highest |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, found in raw.items():
        reached = [found["flops"] * speed / rate for speed, rate in zip(found["steps"], found["limit"], strict=True)]
        speed, rate = (statistics.median(found[each]) for each in ("steps", "limit"))
        print(f"| {name} | {found['flops'] / 1e9:.3g} | {speed:.3g} | {rate / 1e9:.0f} "
              f"| {statistics.median(reached):.2f} | {min(reached):.2f} - {max(reached):.2f} |")  # fmt: skip
    return raw


def profiles(trainings: Mapping[str, Training], repeats: int) -> dict[str, Any]:
    """Prints a table a recipe: where the time goes; returns the shares of every repeat."""
    raw = {}
    for name, training in trainings.items():
        rate, plain, shares = matrix_rate(DTYPES[name.split()[1]]), [], []
        for _ in range(repeats):
            limit, speed = rate(), training()
            seconds = seconds_by_kind(training)
            whole = sum(seconds.values())
            plain.append(training.steps / speed / whole)
            reached = {each: training.flops[each] * training.steps / value / limit for each, value in seconds.items()}
            shares.append({each: (value / whole, reached[each]) for each, value in seconds.items()})
        raw[name] = shares
        print("\n".join([f"\n{name}", "", *_shares_table(shares, training.flops)]))
        print(f"\nThe profiler made it {1 / statistics.median(plain):.2f} x as long (median).")
    return raw


def _shares_table(shares: Sequence[Mapping[str, tuple[float, float]]], flops: Counter[str]) -> list[str]:
    """Lines of Markdown, the largest kind first."""
    lines = ["| kind of operation | of the time | of the FLOPs | of the matrix rate |", "|---|--:|--:|--:|"]
    nothing = (0.0, 0.0)

    def median(each: str, part: int) -> float:
        return statistics.median(share.get(each, nothing)[part] for share in shares)

    for each in sorted({each for share in shares for each in share}, key=lambda each: -median(each, 0)):
        work = f"{flops[each] / flops.total():.1%} | {median(each, 1):.2f}" if flops[each] else " | "
        lines.append(f"| {each} | {median(each, 0):.1%} | {work} |")
    return lines


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = base_parser(__doc__, repeats=5, seconds=1.5)
    parser.add_argument("--recipes", type=some_of(recipe_names()), default=RECIPES, help="default: %(default)s")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    return parser


def main() -> None:
    """Prints the tables and keeps the raw numbers."""
    options = make_parser().parse_args()
    trainings = {
        f"{recipe} {precision}": Training(recipe, precision, options.seconds)
        for recipe in options.recipes
        for precision in possible(DTYPES)
    }
    measure, name = (profiles, "profile") if options.profile else (fractions, "limit")
    raw = measure(trainings, options.repeats)
    command = f"python -m benchmarks.limit --recipes={','.join(options.recipes)}" + " --profile" * options.profile
    keep(name, {"command": command, "tensorflow": tf.__version__, **raw})


if __name__ == "__main__":
    run_main(main)
