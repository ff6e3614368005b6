"""The input side alone, as a contender: batches are taken in the graph, as the loop takes them, by no model."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.digits import images_a_step
from benchmarks.measure import alternate, quartiles, ratios
from benchmarks.turns import CONSTANT_RATE, Contender, Run, Work, started, timed
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.data.batches import Schedule, batches
from trainer.data.sources import load_dataset
from trainer.distribution.strategy import make_replicas

MODEL = "the model"


def contender(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """What gives the model of `config` its rows; nothing is trained."""
    examples, batch = load_dataset(config).train, config.global_batch_size
    schedule = Schedule(examples.count, batch, images_a_step(config) // batch, config.seed)
    rows = iter(batches(examples, schedule, make_replicas(config)))

    def taken(steps: Any) -> Any:
        images = tf.constant(0, tf.int64)
        for _ in tf.range(steps):
            images += tf.reduce_prod(tf.shape(next(rows)[0], tf.int64)[:3])
        return images

    take = tf.function(taken)

    def run(steps: int) -> None:
        assert int(take(tf.constant(steps))) == steps * images_a_step(config)

    return timed(run), {}


def against_the_model(
    flags: Sequence[str], inputs: Mapping[str, Sequence[str]], repeats: int, seconds: float, multiple: int = 1
) -> dict[str, list[float]]:
    """images/s of the model that `flags` name, on the first of `inputs`, and of the input side alone on each, in turn.

    `inputs`: what else the flags are, by name. A turn of the input side is a multiple of `multiple` steps.
    """
    trained = [*flags, *next(iter(inputs.values())), *CONSTANT_RATE]
    images = images_a_step(resolve(trained).config)
    makers: dict[str, Callable[[], Contender]] = {MODEL: partial(Contender, "ours", trained, images)}
    for name, own in inputs.items():
        makers[name] = partial(Contender, "input_side", [*flags, *own], images, multiple=multiple)
    with started(makers, seconds) as contenders:
        return alternate(contenders, repeats)


def table(found: Mapping[str, list[float]], goal: float = 0.0) -> list[str]:
    """Lines of Markdown: how many times what the model takes each input side gives; what is below `goal` says so."""
    lines = ["| | images/s (median) | times what the model takes | quartiles |", "|---|--:|--:|--:|"]
    for name, values in found.items():
        low, median, high = quartiles(ratios(found, name, MODEL))
        missed = f", below {goal:g}" if median < goal else ""
        ratio = f"{median:,.1f} x{missed} | {low:,.1f} to {high:,.1f}" if name != MODEL else " | "
        lines.append(f"| {name} | {quartiles(values)[1]:,.0f} | {ratio} |")
    return lines
