"""How cost grows, and what grows faster than linearly: `python -m benchmarks.growth`.

Each axis is doubled (pixels: quadrupled) while all else stays; the exponent is that of a power law between two
neighbours: 1 is linear, 0 is free. Replicas are logical devices on the same cores, so the work stays and 0 is ideal.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import tensorflow as tf

from benchmarks.flops import step_flops
from benchmarks.measure import alternate, base_parser, keep, run_main
from benchmarks.ours import fresh_collectives
from benchmarks.report import report_seconds
from trainer.build import TrainingSetup, build_setup
from trainer.config.recipe import resolve
from trainer.config.train_config import TrainConfig
from trainer.data.batches import Schedule, batches
from trainer.data.dataset import Arrays
from trainer.distribution.strategy import make_replicas

WGAN_GP = ["--model=wgan_gp", "--data=digits", "--replicas=1", "--width=16"]
REPLICAS = (1, 2, 4)
MIB = 2**20


@dataclass(frozen=True)
class Axis:
    """What is measured at each size, and against what: `sizes` are numbers of `unit`. `explained`: why it grows so."""

    name: str
    unit: str
    measured: str
    points: Mapping[int, Callable[[], float]]
    explained: str


def step(assembly: TrainingSetup) -> Callable[[], float]:
    """A measurement: seconds of a step, over half a second of steps at least."""
    rows, run_steps = assembly.rows_from(0), assembly.step_runner()
    run_steps(rows, 0, 1)  # traces
    began, position = time.perf_counter(), 1
    run_steps(rows, position, 2)
    count = max(2, round(1.0 / (time.perf_counter() - began)))

    def measure() -> float:
        nonlocal position
        began = time.perf_counter()
        run_steps(rows, position, count)
        position += count
        return (time.perf_counter() - began) / count

    return measure


def assembled(*flags: str) -> TrainingSetup:
    """A small WGAN-GP."""
    fresh_collectives()  # strategies of several sizes live together
    config = resolve([*WGAN_GP, *flags]).config
    return build_setup(config, make_replicas(config))


def trace_seconds(replicas: int) -> float:
    """From nothing to the first step: building the model and its graph."""
    began = time.perf_counter()
    assembly = assembled("--image_size=16", "--global_batch_size=16", "--critic_steps=1", f"--replicas={replicas}")
    assembly.step_runner()(assembly.rows_from(0), 0, 1)
    return time.perf_counter() - began


def first_batch(examples: int) -> float:
    """Seconds until the input side gives the first batch of an epoch: it permutes the numbers of all rows."""
    config = TrainConfig(global_batch_size=64)
    arrays = Arrays(np.zeros((examples, 1, 1, 1), np.uint8))
    schedule = Schedule(examples, config.global_batch_size, 1, 0)
    rows = batches(arrays, schedule, make_replicas(config))
    began = time.perf_counter()
    next(iter(rows))
    return time.perf_counter() - began


def axes() -> list[Axis]:
    """Every axis, from what a user sets to what a comparison holds."""
    sized = {size: assembled(f"--image_size={size}", "--global_batch_size=16") for size in (16, 32, 64)}
    flops = {size: step_flops(assembly) for size, assembly in sized.items()}
    work = ", ".join(f"{size}x{size} {flops[size] / (size * size * flops[16] / 256):.2f}" for size in flops)
    split = {count: assembled("--image_size=16", "--global_batch_size=64", f"--replicas={count}") for count in REPLICAS}
    return [
        Axis("image size", "pixels", "seconds a step, wgan_gp, batch 16", {s * s: step(a) for s, a in sized.items()},
             f"each doubling of the side adds a layer with twice the filters: FLOPs a pixel, against 16x16: {work}"),
        Axis("global batch", "images", "seconds a step, wgan_gp 16x16",
             {batch: step(assembled("--image_size=16", f"--global_batch_size={batch}")) for batch in (16, 32, 64, 128)},
             "optimizer, moving average and dispatch cost the same at every batch"),
        Axis("examples", "rows", "seconds to an epoch's first batch",
             {count: partial(first_batch, count) for count in (10**5, 10**6, 4 * 10**6)},
             "an epoch is one permutation of all row numbers: linear, but its random reads leave the caches"),
        Axis("replicas, running", "replicas", "seconds a step, wgan_gp 16x16, global batch 64",
             {count: step(assembly) for count, assembly in split.items()},
             "the cores and the work stay: what is added is the work done once a replica (optimizer, dispatch, draws)"),
        Axis("replicas, starting", "replicas", "seconds to the first step, 1 critic step",
             {count: partial(trace_seconds, count) for count in REPLICAS},
             "the graph holds the operations of every replica and, from two on, their all-reduces"),
        Axis("tiers of a comparison", "tiers", "seconds of a report",
             {count: partial(report_seconds, count, 100) for count in (2, 8, 32)},
             "a figure and a file a tier, beside the fixed cost of the plots"),
    ]  # fmt: skip


def show(axis: Axis, found: Mapping[str, list[float]]) -> list[str]:
    """Lines of Markdown: medians, and the median exponent since the row before."""
    lines = [f"\n**{axis.name}**: {axis.measured}", "", f"| {axis.unit} | median | exponent |", "|--:|--:|--:|"]
    before: int | None = None
    for size in axis.points:
        exponents = [
            math.log(now / earlier) / math.log(size / before)
            for now, earlier in zip(found[str(size)], found[str(before)], strict=True)
        ] if before else []  # fmt: skip
        shown = f"{statistics.median(exponents):.2f}" if exponents else ""
        lines.append(f"| {size:,} | {statistics.median(found[str(size)]):.4f} | {shown} |")
        before = size
    return [*lines, "", f"{axis.explained}."]


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__, repeats=5)


def main() -> None:
    """Prints a table an axis and keeps the raw numbers."""
    repeats = make_parser().parse_args().repeats
    make_replicas(resolve([*WGAN_GP, f"--replicas={max(REPLICAS)}"]).config)  # logical devices: before all else
    raw = {}
    for axis in axes():
        found = alternate({str(size): measure for size, measure in axis.points.items()}, repeats)
        print("\n".join(show(axis, found)), flush=True)
        raw[axis.name] = {"unit": axis.unit, "measured": axis.measured, "seconds": found}
        keep("growth", {"command": "python -m benchmarks.growth", "tensorflow": tf.__version__, "axes": raw})


if __name__ == "__main__":
    run_main(main)
