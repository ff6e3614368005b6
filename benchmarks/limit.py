"""Measures the fraction of the cores' float32 matrix rate that a recipe reaches: `python -m benchmarks.limit`.

It is the FLOPs of a step, counted in its graph, over the rate of a large matrix product just before.
"""

import statistics
from functools import partial

import tensorflow as tf

from benchmarks.runner import elapsed, make_parser, print_table, program, ratios, save, some_of
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.config.overrides import recipe_names
from trainer.planning.counting import step_flops

PRODUCTS = ((512, 160), (1024, 20), (2048, 3))  # the size of square matrices and their products in some 0.2 s
PARSER = make_parser(__doc__, repeats=5, seconds=1.5)
PARSER.add_argument("--recipes", type=some_of(recipe_names()), default="cnn_mnist,wgan_gp_mnist,dcgan_mnist,mlp_mnist")


def matrix_rate() -> float:
    """Measures FLOP/s of large matrix products, of the size where they are highest."""
    rates = []
    for size, times in PRODUCTS:
        matrix = tf.random.normal((size, size))
        rates.append(2 * size**3 * times / elapsed(partial(_multiply, matrix, times)))
    return max(rates)


def _multiply(matrix: tf.Tensor, times: int) -> None:
    for _ in range(times):
        tf.matmul(matrix, matrix)


@program
def main() -> None:
    """Prints the table and saves the raw numbers; the package's digits replace each recipe's data."""
    options, raw = PARSER.parse_args(), {}
    lines = ["| | GFLOP/s | matrix rate | fraction reached | lowest to highest |", "|---|--:|--:|--:|--:|"]
    matrix_rate()  # warms up
    for recipe in options.recipes:
        setup = setup_of(f"--recipe={recipe}", "--data=digits", "--replicas=1")
        flops, loop = step_flops(setup), TrainingLoop(setup)
        steps = loop.steps_in(options.seconds)
        rounds = [(matrix_rate(), flops * steps / loop(steps)) for _ in range(options.repeats)]
        raw[recipe] = found = {"limit": [limit for limit, _ in rounds], "reached": [speed for _, speed in rounds]}
        limit, reached = (statistics.median(values) / 1e9 for values in found.values())
        parts = ratios(found, "reached", "limit")
        spread = f"{statistics.median(parts):.2f} | {min(parts):.2f} - {max(parts):.2f}"
        lines.append(f"| {recipe} | {reached:.0f} | {limit:.0f} | {spread} |")
    print_table("Fraction of the matrix rate", lines)
    save("limit", flops_per_second=raw)
