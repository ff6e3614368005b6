"""Measures what the time of a recipe's step goes to, by TensorFlow's profile: `python -m benchmarks.breakdown`.

Also how much slower a step is while it is profiled, and whether the always-kept measure of waiting costs anything: the
same loop without it, in turn.
"""

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import tensorflow as tf

from benchmarks.runner import make_parser, print_table, program, ratios, save, some_of
from benchmarks.trainer_loop import TrainingLoop, setup_of
from trainer.base.run_files.breakdown import TIME_SHARES, WORDS
from trainer.base.settings.resolution import recipe_names
from trainer.measures.profiling import OPTIONS
from trainer.reporting.trace import PROFILES, shares_of

PARSER = make_parser(__doc__, repeats=5, seconds=1.5)
PARSER.add_argument("--recipes", type=some_of(recipe_names()), default="cnn_mnist,wgan_gp_mnist,dcgan_mnist,mlp_mnist")


def profiled(loop: TrainingLoop, count: int) -> tuple[dict[str, float], float]:
    """Runs `count` steps; returns the share of each kind, and seconds."""
    with TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options=OPTIONS):
            seconds = loop(count)
        (file,) = Path(folder).glob(PROFILES)
        return shares_of(file), seconds


def measure(recipe: str, repeats: int, seconds: float) -> dict[str, list[Any]]:
    """Returns the shares, and the seconds of a step while it is profiled, as it is, and without timestamps."""
    flags = (f"--recipe={recipe}", "--data=digits", "--replicas=1")
    with patch("trainer.training.steps.timestamp", lambda after: tf.constant(0.0, tf.float64)):
        bare = TrainingLoop(setup_of(*flags))
        count = bare.steps_in(seconds)
    loop = TrainingLoop(setup_of(*flags))
    loop(1)
    found: dict[str, list[Any]] = {name: [] for name in ("shares", "profiled", "plain", "bare")}
    for _ in range(repeats):
        shares, took = profiled(loop, count)
        found["shares"].append(shares)
        for name, each in (("profiled", took), ("plain", loop(count)), ("bare", bare(count))):
            found[name].append(each / count)
    return found


@program
def main() -> None:
    """Prints the table and saves the raw numbers; the package's digits replace each recipe's data."""
    options, raw = PARSER.parse_args(), {}
    lines = [f"| | {' | '.join(WORDS.values())} | profiled | timestamps |", "|---|" + (len(TIME_SHARES) + 2) * "--:|"]
    for recipe in options.recipes:
        raw[recipe] = found = measure(recipe, options.repeats, options.seconds)
        cells = [f"{100 * statistics.median(each[kind] for each in found['shares']):.0f} %" for kind in TIME_SHARES]
        cells += [
            f"{statistics.median(ratios(found, *pair)):.3f} x" for pair in (("profiled", "plain"), ("plain", "bare"))
        ]
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    print_table("What a step's time goes to", lines)
    save("breakdown", found=raw)
