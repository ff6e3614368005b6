"""Runs the input pipeline alone as a candidate: reads batches in the graph, as the loop does, and trains nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from benchmarks.processes import CONSTANT_RATE, Candidate, Run, Work, images_per_step, started, timed
from benchmarks.runner import alternate, quartiles, ratios
from trainer.base.settings.request import resolve
from trainer.base.settings.schedule import Schedule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.batches import batches
from trainer.data.sources import load_dataset

MODEL = "the model"


def make_candidate(config: TrainConfig, option: str = "") -> tuple[Run, Work]:
    """Returns a run that reads the batches of its steps; its work is empty."""
    examples, batch = load_dataset(config).train, config.global_batch_size
    schedule = Schedule(examples.count, batch, images_per_step(config) // batch, config.seed)
    rows = iter(batches(examples, schedule, make_replicas(config)))

    def count_images(steps: Any) -> Any:
        images = tf.constant(0, tf.int64)
        for _ in tf.range(steps):
            images += tf.reduce_prod(tf.shape(next(rows)[0], tf.int64)[:3])
        return images

    read = tf.function(count_images)

    def run(steps: int) -> None:
        assert int(read(tf.constant(steps))) == steps * images_per_step(config)

    return timed(run), {}


def measure_with_model(
    flags: Sequence[str], inputs: Mapping[str, Sequence[str]], repeats: int, seconds: float, multiple: int = 1
) -> dict[str, list[float]]:
    """Measures images/s of the model (on the first of `inputs`) and of the input pipeline alone on each, in turn.

    `inputs` has the additional flags by name. The steps of a turn of a pipeline are a multiple of `multiple`.
    """
    trained = [*flags, *next(iter(inputs.values())), *CONSTANT_RATE]
    images = images_per_step(resolve(trained).config)
    makers: dict[str, Callable[[], Candidate]] = {MODEL: partial(Candidate, "trainer_loop", trained, images)}
    for name, own in inputs.items():
        makers[name] = partial(Candidate, "input_pipeline", [*flags, *own], images, multiple=multiple)
    with started(makers, seconds) as candidates:
        return alternate(candidates, repeats)


def table(found: Mapping[str, list[float]], goal: float = 0.0) -> list[str]:
    """Returns Markdown: images/s of each pipeline, its multiple of the model's, and whether that is below `goal`."""
    lines = ["| | images/s (median) | times those of the model | quartiles |", "|---|--:|--:|--:|"]
    for name, values in found.items():
        low, median, high = quartiles(ratios(found, name, MODEL))
        missed = f", below {goal:g}" if median < goal else ""
        ratio = f"{median:,.1f} x{missed} | {low:,.1f} to {high:,.1f}" if name != MODEL else " | "
        lines.append(f"| {name} | {quartiles(values)[1]:,.0f} | {ratio} |")
    return lines
