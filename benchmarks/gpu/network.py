"""Measures one network, ours beside Keras `fit` and PyTorch: `python -m benchmarks.gpu.network
--case=cnn`.

"ours" is what a long run does by default. Steps a second, how many kernels a step has and how much
of the time the GPU computes, and the peak of memory beside that of the plan, if `--plan` has made
one before: on any CPU, which takes minutes.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from benchmarks import keras_fit, trainer_loop
from benchmarks.gpu.part import keep, nvidia, turn
from benchmarks.processes import (
    CONSTANT_RATE,
    Candidate,
    Run,
    digits_file,
    images_per_step,
    started,
)
from benchmarks.runner import make_parser, possible
from trainer.base.run_files.plan_file import kept_plan, peak_of, read_plan
from trainer.base.settings.train_config import TrainConfig
from trainer.checks.on_gpus import steps_per_second
from trainer.cluster.strategy import make_replicas
from trainer.invariance.internals import parse_profile
from trainer.reporting.error_lines import one_line
from trainer.reporting.resources import peak_device_memory_gib
from trainer.run.step_program import MOST_STEPS

_FEW = 10  # steps of a call, where it need not be more: long networks take a second for them
_OWN = "benchmarks.networks"
_SMALL = ["--width=4", "--global_batch_size=8"]
# Of each network: flags of trainer.task on a GPU, and those that make it small for a rehearsal.
_FLOAT32: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    **{
        f"resnet50-{rows}": (
            [f"--model={_OWN}:resnet50", f"--data={_OWN}:photos", f"--global_batch_size={rows}"],
            ["--size=32", "--global_batch_size=4"],
        )
        for rows in (64, 128, 256)
    },
    "wgan_gp-32": (["--recipe=wgan_gp_mnist", "--global_batch_size=64"], _SMALL),
    "cnn": (["--recipe=cnn_mnist", "--global_batch_size=512", *CONSTANT_RATE], _SMALL),
    "unet": (
        [f"--model={_OWN}:unet", f"--data={_OWN}:masks", "--global_batch_size=32"],
        ["--size=16", "--filters=4", "--global_batch_size=4"],
    ),
    "dcgan": (["--recipe=dcgan_mnist", "--global_batch_size=64"], _SMALL),
    "transformer": (
        [f"--model={_OWN}:transformer", f"--data={_OWN}:sentences", "--global_batch_size=64"],
        ["--length=16", "--width=16", "--blocks=1", "--heads=2", "--global_batch_size=8"],
    ),
    "wgan_gp-64": (
        ["--recipe=wgan_gp_photos", "--augment=", "--diff_augment=", "--global_batch_size=64"],
        _SMALL,
    ),
    "mlp": (["--recipe=mlp_mnist", "--global_batch_size=512", *CONSTANT_RATE], _SMALL),
}
BFLOAT16 = "-bf16"
CASES = _FLOAT32 | {
    f"{name}{BFLOAT16}": ([*flags, "--precision=mixed_bfloat16"], small)
    for name, (flags, small) in _FLOAT32.items()
}
WAYS = ("ours", "ours, plain", "fit", "fit, XLA, 50 steps")
TORCH = {
    "PyTorch": "pytorch:eager",
    "PyTorch, channels_last": "pytorch:channels_last",
    "PyTorch, compiled": "pytorch:compile",
}
PARSER = make_parser(__doc__, seconds=1.0)
PARSER.add_argument("--case", choices=CASES, required=True)
PARSER.add_argument(
    "--plan", action="store_true", help="make and keep the plan of the size of a GPU, and end"
)


def main() -> None:
    """Builds every way beside what else builds, then measures them in a turn of its own."""
    options = PARSER.parse_args()
    small = not options.plan and not nvidia("name")
    with settings_of(options.case, small=small) as (config, flags), ExitStack() as stack:
        # in a process whose TensorFlow has not started: it sets how memory is allocated
        if options.plan:
            sys.exit(
                subprocess.run(
                    [sys.executable, "-m", "trainer.plan", *flags], check=False
                ).returncode
            )
        if kept_plan(config).exists():
            lines = read_plan(kept_plan(config)).memory.lines(config, gpu=True)
            keep(planned_gib=peak_of(lines, config.global_batch_size) / 2**30)
        with turn(alone=False):
            ways = _begun(config)
            rows = images_per_step(config)
            kinds = {} if config.model.startswith(_OWN) else TORCH
            makers = {
                name: partial(Candidate, kind, flags, rows, multiple=MOST_STEPS)
                for name, kind in kinds.items()
            }
            peers = stack.enter_context(started(possible(makers), options.seconds))
        with turn(alone=True):
            rates = {
                name: way.steps * steps_per_second(way.times, options.seconds)
                for name, way in ways.items()
            }
            keep(steps_per_second=rates)
            rates |= {
                name: statistics.median(peer() / rows for _ in range(3))
                for name, peer in peers.items()
            }
            keep(steps_per_second=rates)
            traced = {name: kernels_of(way) for name, way in ways.items()}
            keep(kernels={name: of[0] for name, of in traced.items() if of})
            # Of the time without a trace, in which XLA makes a graph of its kernels, and of that of
            # the trace.
            keep(busy={name: [rates[name] * of[1], of[2]] for name, of in traced.items() if of})


@contextmanager
def settings_of(case: str, *, small: bool) -> Iterator[tuple[TrainConfig, list[str]]]:
    """Yields the settings and flags of a case; a recipe's data are digits in a file that every
    framework reads."""
    flags, smaller = CASES[case]
    every = ["--replicas=1", *flags, *(smaller if small else ())]
    with digits_file(every) as pair:
        yield pair


class Way(NamedTuple):
    """Runs multiples of so many steps."""

    steps: int
    run: Run

    def times(self, times: int) -> float:
        """Runs the steps so many times; returns the seconds that they took."""
        return self.run(times * self.steps)


def _begun(config: TrainConfig) -> dict[str, Way]:
    """Returns the ways whose first steps run; keeps why others failed.

    Ours are the first, so that their peaks of memory are their own.
    """
    (device,) = make_replicas(config).devices

    def ours(option: str, peak: str) -> Way:
        with suppress(ValueError):  # a CPU's allocator keeps no statistics
            tf.config.experimental.reset_memory_stats(device)
        loop = trainer_loop.make_candidate(config, option)[0]
        way = Way(max(_FEW, getattr(loop, "steps_per_program", 1)), loop)
        way.times(1)
        keep(**{peak: max(peak_device_memory_gib([device]), default=None)})
        return way

    makers: Sequence[Callable[[], Way]] = (
        lambda: ours("auto", "peak_gib"),
        lambda: ours("plain", "plain_gib"),
        lambda: Way(_FEW, keras_fit.make_candidate(config, "1")[0]),
        lambda: Way(MOST_STEPS, keras_fit.make_candidate(config, f"{MOST_STEPS}x")[0]),
    )
    ways = dict[str, Way]()
    failed = dict[str, str]()
    for name, make in zip(WAYS, makers, strict=True):
        try:
            way = make()
            way.times(1)
            ways[name] = way
        except Exception as error:  # the other ways are measured all the same
            failed[name] = one_line(error)[:200]
            keep(failed=failed)
    # some are traced anew, and compiled, once another one has set the precision
    for way in ways.values():
        way.times(1)
    return ways


def kernels_of(way: Way) -> list[float]:
    """Returns how many kernels and copies a step starts, for how many seconds they run, and for
    what share of a trace.

    They are of TensorFlow's trace of one call; [] without a GPU.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=1, python_tracer_level=0, device_tracer_level=1
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        way.times(1)
        tf.profiler.experimental.stop()
        spaces = [parse_profile(file.read_bytes()) for file in Path(folder).rglob("*.xplane.pb")]
    return summary(sorted(_events(spaces)), way.steps)


def _events(spaces: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yields when each kernel and copy on a stream of a GPU began and ended, in picoseconds."""
    for space in spaces:
        for plane in (plane for plane in space.planes if plane.name.startswith("/device:GPU")):
            for line in (line for line in plane.lines if line.name.startswith("Stream")):
                for event in line.events:
                    began = line.timestamp_ns * 1000 + event.offset_ps
                    yield began, began + event.duration_ps


def summary(events: Sequence[tuple[int, int]], steps: int) -> list[float]:
    """Returns what `kernels_of` does, of events in the order of their beginnings; overlaps count
    once."""
    if not events:
        return []
    busy = 0
    until = events[0][0]
    for began, ended in events:
        busy += max(0, ended - max(began, until))
        until = max(until, ended)
    return [len(events) / steps, 1e-12 * busy / steps, busy / (until - events[0][0])]


if __name__ == "__main__":
    main()
