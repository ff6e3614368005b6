"""What more GPUs should bring, by arithmetic: `python -m benchmarks.scaling`. No GPU is used, nothing is timed.

FLOPs, bytes and all-reduces are counted in each recipe's graph. docs/scaling.md has the formula, the sources of the
rates, and what is left out.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import tensorflow as tf

from benchmarks.flops import Operation, operations, step_graph
from benchmarks.limit import EXTRA
from benchmarks.measure import base_parser, keep, run_main
from benchmarks.ours import fresh_collectives
from trainer.build import build_setup
from trainer.config.recipe import resolve
from trainer.distribution.strategy import make_replicas

CASES = {
    "wgan_gp_mnist": ["--recipe=wgan_gp_mnist"],
    "the same, --sync_batch_norm=false": ["--recipe=wgan_gp_mnist", "--sync_batch_norm=false"],
    "wgan_gp_photos": ["--recipe=wgan_gp_photos"],
    "dcgan_mnist": ["--recipe=dcgan_mnist"],
    "cnn_mnist": ["--recipe=cnn_mnist"],
    "mlp_mnist": ["--recipe=mlp_mnist"],
    "efficientnet_photos": ["--recipe=efficientnet_photos", *EXTRA["efficientnet_photos"]],
}
DEVICES = (1, 2, 4, 8)
# To dispatch one operation and to start one all-reduce: assumptions, not measured here.
LAUNCH_SECONDS, ALL_REDUCE_SECONDS = 5e-6, 30e-6
NO_KERNEL = {"Const", "Placeholder", "ReadVariableOp", "Identity", "NoOp", "Reshape", "Squeeze", "StopGradient"}


@dataclass(frozen=True)
class Machine:
    """A GPU: dense TF32 FLOP/s, bytes/s of its memory, and of its link to the others, each way. By data sheet."""

    name: str
    flops: float
    memory: float
    link: float


MACHINES = (
    Machine("L4, PCIe 4.0 x16", 60e12, 300e9, 32e9),
    Machine("A100 40 GB, NVLink 3", 156e12, 1555e9, 300e9),
    Machine("H100 SXM, NVLink 4", 494e12, 3350e9, 450e9),
)


@dataclass(frozen=True)
class Step:
    """One step at a recipe's global batch: on one replica, the same at half of the batch, and what two sum up."""

    whole: Sequence[Operation]
    half: Sequence[Operation]
    all_reduces: int
    reduced_bytes: int


def counted(flags: Sequence[str]) -> Step:
    """The step of a recipe; the digits stand in for its data."""
    rows = resolve(flags).config.global_batch_size
    two = [op for op in _operations(*flags, "--replicas=2") if op.reduced_bytes]
    return Step(
        _operations(*flags, "--replicas=1"),
        _operations(*flags, "--replicas=1", f"--global_batch_size={rows // 2}"),
        sum(op.times for op in two) // 2,  # each is in the graph once a replica
        sum(op.reduced_bytes for op in two) // 2,
    )


def _operations(*flags: str) -> list[Operation]:
    fresh_collectives()
    config = resolve([*flags, "--data=digits"]).config
    with patch("trainer.models.image_layers._has_gpu", return_value=True):  # the layers that a GPU would get
        graph = step_graph(build_setup(config, make_replicas(config)))
    return [op for op in operations(graph) if op.type not in NO_KERNEL]


def work_seconds(step: Step, machine: Machine, devices: int) -> float:
    """Of one replica with 1/devices of the batch: each operation takes its dispatch, its FLOPs or its bytes."""

    def part(whole: int, half: int) -> float:  # what an operation has to do is a line over the rows
        return whole - 2 * (1 - 1 / devices) * (whole - half)

    return sum(
        max(
            a.times * LAUNCH_SECONDS,
            part(a.flops, b.flops) / machine.flops,
            part(a.moved_bytes, b.moved_bytes) / machine.memory,
        )
        for a, b in zip(step.whole, step.half, strict=True)
    )


def all_reduce_seconds(step: Step, machine: Machine, devices: int) -> float:
    """K alpha + 2 (N - 1) / N V / beta."""
    volume = 2 * (devices - 1) / devices * step.reduced_bytes
    return (step.all_reduces * ALL_REDUCE_SECONDS + volume / machine.link) if devices > 1 else 0.0


def step_seconds(step: Step, machine: Machine, devices: int) -> float:
    """Of one step at the whole global batch over `devices`."""
    return work_seconds(step, machine, devices) + all_reduce_seconds(step, machine, devices)


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    return base_parser(__doc__)


def main() -> None:
    """Prints the tables and keeps the counts."""
    make_parser().parse_args()
    make_replicas(resolve(["--replicas=2"]).config)  # two logical devices, before TensorFlow starts
    steps = {name: counted(flags) for name, flags in CASES.items()}
    raw = {}
    print("\n| one step | GFLOP | GB moved | operations | all-reduces | MB all-reduced |\n|---|--:|--:|--:|--:|--:|")
    for name, step in steps.items():
        flops, moved = (sum(getattr(op, what) for op in step.whole) for what in ("flops", "moved_bytes"))
        kernels = sum(op.times for op in step.whole)
        raw[name] = [flops, moved, kernels, step.all_reduces, step.reduced_bytes]
        print(f"| {name} | {flops / 1e9:,.3g} | {moved / 1e9:,.3g} | {kernels:,} "
              f"| {step.all_reduces} | {step.reduced_bytes / 1e6:.2f} |")  # fmt: skip
    print(f"\nMilliseconds of a step on one GPU, of them all-reduce on two, and the speed-up on {DEVICES[1:]} GPUs\n")
    print("| | " + " | ".join(machine.name for machine in MACHINES) + " |\n|---|" + "---|" * len(MACHINES))
    for name, step in steps.items():
        cells = []
        for machine in MACHINES:
            alone = step_seconds(step, machine, 1)
            faster = " ".join(f"{alone / step_seconds(step, machine, devices):.2f}" for devices in DEVICES[1:])
            cells.append(f"{1e3 * alone:.1f}; {1e3 * all_reduce_seconds(step, machine, 2):.2f}; {faster}")
        print(f"| {name} | {' | '.join(cells)} |")
    units = ["flops", "moved_bytes", "operations", "all_reduces", "reduced_bytes"]
    keep("scaling", {"command": "python -m benchmarks.scaling", "tensorflow": tf.__version__, "of": units, "step": raw})


if __name__ == "__main__":
    run_main(main)
