"""Measures one network, ours beside Keras `fit` and PyTorch: `python -m benchmarks.gpu.network --case=cnn`.

Steps a second, how many kernels a step has and how much of the time the GPU computes, and the peak of memory beside
that of the plan, if `--plan` has made one before: on any CPU, which takes minutes.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import keras_fit
from benchmarks.gpu.part import keep, nvidia, turn
from benchmarks.processes import CONSTANT_RATE, Candidate, Run, digits_file, images_per_step, started
from benchmarks.runner import make_parser, possible
from trainer.base.run_files.plan_file import kept_plan, peak_of, read_plan
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.sources import load_dataset
from trainer.invariance.compat import parse_profile
from trainer.proofs.on_gpus import Running, Trials, Variant, steps_per_second
from trainer.reporting.error_lines import one_line
from trainer.run.training_setup import set_precision_and_seed

TEN = 10  # the steps of one execution of `fit`, of which all ways take multiples
_OWN = "benchmarks.networks"
_SMALL = ["--width=4", "--global_batch_size=8"]
# Of each network: flags of trainer.task on a GPU, and those that make it small for a rehearsal.
CASES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "resnet50": (
        [f"--model={_OWN}:resnet50", f"--data={_OWN}:photos", "--global_batch_size=64"],
        ["--size=32", "--global_batch_size=4"],
    ),
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
    "wgan_gp-64": (["--recipe=wgan_gp_photos", "--augment=", "--diff_augment=", "--global_batch_size=64"], _SMALL),
    "mlp": (["--recipe=mlp_mnist", "--global_batch_size=512", *CONSTANT_RATE], _SMALL),
}
TORCH = {"PyTorch": "pytorch:channels_last", "PyTorch, compiled": "pytorch:compile"}
PARSER = make_parser(__doc__, seconds=2.0)
PARSER.add_argument("--case", choices=CASES, required=True)
PARSER.add_argument("--plan", action="store_true", help="make and keep the plan of the size of a GPU, and end")


def main() -> None:
    """Builds every way beside what else builds, then measures them in a turn of its own."""
    options = PARSER.parse_args()
    small = not options.plan and not nvidia("name")
    with settings_of(options.case, small=small) as (config, flags), ExitStack() as stack:
        if options.plan:  # in a process whose TensorFlow has not started: it sets how memory is allocated
            sys.exit(subprocess.run([sys.executable, "-m", "trainer.plan", *flags], check=False).returncode)
        if kept_plan(config).exists():
            lines = read_plan(kept_plan(config)).memory.lines(config, gpu=True)
            keep(planned_gib=peak_of(lines, config.global_batch_size) / 2**30)
        with turn(alone=False):
            ways = _begun(config)
            rows = images_per_step(config)
            has_peer = config.model in ("wgan_gp", "dcgan", "cnn", "mlp")
            peers = {name: partial(Candidate, kind, flags, rows) for name, kind in TORCH.items() if has_peer}
            torch = stack.enter_context(started(possible(peers), options.seconds))
        with turn(alone=True):
            rates = {name: TEN * steps_per_second(tens, options.seconds) for name, tens in ways.items()}
            keep(steps_per_second=rates)
            rates |= {name: statistics.median(peer() / rows for _ in range(3)) for name, peer in torch.items()}
            keep(steps_per_second=rates)
            keep(kernels={name: kernels_of(tens) for name, tens in ways.items()})


@contextmanager
def settings_of(case: str, *, small: bool) -> Iterator[tuple[TrainConfig, list[str]]]:
    """Yields the settings and flags of a case; a recipe's data are digits in a file that every framework reads."""
    flags, smaller = CASES[case]
    every = ["--replicas=1", *flags, *(smaller if small else ())]
    own = any(flag.startswith("--data=") for flag in flags)
    with nullcontext((resolve(every).config, every)) if own else digits_file(every) as pair:
        yield pair


def _begun(config: TrainConfig) -> dict[str, Run]:
    """Returns the ways whose first steps run, each as a function of tens of steps; keeps why others failed.

    Ours is the first, so that its peak of memory is its own.
    """
    set_precision_and_seed(config)
    trials, replicas = Trials(config, load_dataset(config)), make_replicas(config)

    def ours(jit_compile: str) -> Run:
        running: Running = trials.begin(Variant("ours", 1, config.precision, config.tf32, jit_compile), replicas)
        keep(**{"compiled_gib" if jit_compile == "true" else "peak_gib": running.peak_gib})
        return running

    makers: dict[str, Callable[[], Run]] = {
        "ours": partial(ours, "false"),
        "ours, XLA": partial(ours, "true"),
        "fit": lambda: keras_fit.make_candidate(config, f"{TEN}")[0],
        "fit, XLA": lambda: keras_fit.make_candidate(config, f"{TEN}x")[0],
    }
    ways, failed = dict[str, Run](), dict[str, str]()
    for name, make in makers.items():
        try:
            run = make()
            run(TEN)
            ways[name] = _in_tens(run)
        except Exception as error:  # the other ways are measured all the same
            failed[name] = one_line(error)[:200]
            keep(failed=failed)
    return ways


def _in_tens(run: Run) -> Run:
    return lambda tens: run(TEN * tens)


def kernels_of(tens: Run) -> list[float]:
    """Returns how many kernels and copies a step starts, and the share of the time in which the GPU runs one.

    Both are of TensorFlow's trace of ten steps; [] without a GPU.
    """
    options = tf.profiler.experimental.ProfilerOptions(
        host_tracer_level=1, python_tracer_level=0, device_tracer_level=1
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder, options)
        tens(1)
        tf.profiler.experimental.stop()
        spaces = [parse_profile(file.read_bytes()) for file in Path(folder).rglob("*.xplane.pb")]
    return summary(sorted(_events(spaces)))


def _events(spaces: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yields when each kernel and copy on a stream of a GPU began and ended, in picoseconds."""
    for space in spaces:
        for plane in (plane for plane in space.planes if plane.name.startswith("/device:GPU")):
            for line in (line for line in plane.lines if line.name.startswith("Stream")):
                for event in line.events:
                    began = line.timestamp_ns * 1000 + event.offset_ps
                    yield began, began + event.duration_ps


def summary(events: Sequence[tuple[int, int]]) -> list[float]:
    """Returns what `kernels_of` does, of events in the order of their beginnings; overlaps count once."""
    if not events:
        return []
    busy, until = 0, events[0][0]
    for began, ended in events:
        busy += max(0, ended - max(began, until))
        until = max(until, ended)
    return [len(events) / TEN, busy / (until - events[0][0])]


if __name__ == "__main__":
    main()
