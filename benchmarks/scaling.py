"""Computes what more GPUs should bring: `python -m benchmarks.scaling`. No GPU is used and nothing is timed.

FLOPs, bytes and all-reduces are counted in each recipe's graph. docs/scaling.md has the formula, the sources of the
rates, and what is left out.
"""

from collections.abc import Sequence
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.runner import make_parser, print_table, program, save
from benchmarks.trainer_loop import setup_of, step_graph
from deploy.planning.gpu_constants import CONSTANTS
from trainer.base.settings.resolution import resolve
from trainer.cluster.strategy import make_replicas
from trainer.planning.step_work import NO_KERNEL, Operation, operations

RECIPES = ("wgan_gp_mnist", "wgan_gp_photos", "dcgan_mnist", "cnn_mnist", "mlp_mnist", "efficientnet_photos")
CASES = {recipe: [f"--recipe={recipe}"] for recipe in RECIPES}
CASES["efficientnet_photos"] += ["--weights=none", "--fine_tune_from=", "--fine_tune_after_steps=0"]
CASES["wgan_gp_photos"] += ["--diff_augment="]
CASES["wgan_gp_mnist --sync_batch_norm=false"] = [*CASES["wgan_gp_mnist"], "--sync_batch_norm=false"]
DEVICES = (2, 4, 8)
# Dense TF32 FLOP/s, bytes/s of the memory, and of the link to the other GPUs, each way. By data sheet.
MACHINES = {
    "L4, PCIe 4.0 x16": (60e12, 300e9, 32e9),
    "A100 40 GB, NVLink 3": (156e12, 1555e9, 300e9),
    "H100 SXM, NVLink 4": (494e12, 3350e9, 450e9),
}
PARSER = make_parser(__doc__)


class Step(NamedTuple):
    """Holds the counts of a step on one replica, at a recipe's batch and half of it, and what two replicas sum up."""

    whole: Sequence[Operation]
    half: Sequence[Operation]
    all_reduces: int
    reduced_bytes: int


def counted(flags: Sequence[str]) -> Step:
    """Counts the step of a recipe; the digits replace its data."""
    rows = resolve([*flags, "--data=digits"]).config.global_batch_size
    two = [op for op in _operations(*flags, "--replicas=2") if op.reduced_bytes]
    return Step(
        _operations(*flags, "--replicas=1"),
        _operations(*flags, "--replicas=1", f"--global_batch_size={rows // 2}"),
        sum(op.times for op in two) // 2,  # the graph has each once per replica
        sum(op.reduced_bytes for op in two) // 2,
    )


def _operations(*flags: str) -> list[Operation]:
    with patch("trainer.models.image_layers._has_gpu", return_value=True):  # builds the layers for GPUs
        setup = setup_of(*flags, "--data=digits")
        graph = step_graph(setup)
    return [op for op in operations(graph, rows=setup.replicas.rows) if op.type not in NO_KERNEL]


def step_seconds(step: Step, machine: str, devices: int) -> tuple[float, float]:
    """Returns the seconds of one step on 1/devices of the batch, and of its all-reduces.

    Every operation takes the longest of its dispatch, its FLOPs and its bytes.
    """
    flop_rate, memory_rate, link_rate = MACHINES[machine]

    def part(whole: int, half: int) -> float:  # the work of an operation is linear in the rows
        return whole - 2 * (1 - 1 / devices) * (whole - half)

    work = 0.0
    for a, b in zip(step.whole, step.half, strict=True):
        compute, move = part(a.flops, b.flops) / flop_rate, part(a.moved_bytes, b.moved_bytes) / memory_rate
        work += max(a.times * CONSTANTS.launch_seconds, compute, move)
    volume = 2 * (devices - 1) / devices * step.reduced_bytes
    return work, step.all_reduces * CONSTANTS.all_reduce_seconds * (devices > 1) + volume / link_rate


@program
def main() -> None:
    """Prints the tables and saves the counts."""
    PARSER.parse_args()
    make_replicas(resolve(["--replicas=2"]).config)  # two logical devices, before TensorFlow starts
    steps = {name: counted(flags) for name, flags in CASES.items()}
    raw = {}
    lines = ["| one step | GFLOP | GB moved | operations | all-reduces | MB all-reduced |", "|---|--:|--:|--:|--:|--:|"]
    for name, step in steps.items():
        flops, moved = sum(op.flops for op in step.whole), sum(op.moved_bytes for op in step.whole)
        kernels = sum(op.times for op in step.whole)
        raw[name] = [flops, moved, kernels, step.all_reduces, step.reduced_bytes]
        reduced = f"{step.all_reduces} | {step.reduced_bytes / 1e6:.2f}"
        lines.append(f"| {name} | {flops / 1e9:,.3g} | {moved / 1e9:,.3g} | {kernels:,} | {reduced} |")
    print_table("Counted", lines)
    lines = ["| | " + " | ".join(MACHINES) + " |", "|---|" + "---|" * len(MACHINES)]
    for name, step in steps.items():
        cells = []
        for machine in MACHINES:
            alone, all_reduce = step_seconds(step, machine, 1)[0], step_seconds(step, machine, 2)[1]
            faster = " ".join(f"{alone / sum(step_seconds(step, machine, devices)):.2f}" for devices in DEVICES)
            cells.append(f"{1e3 * alone:.1f}; {1e3 * all_reduce:.2f}; {faster}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    print_table(f"Milliseconds of a step on one GPU, of its all-reduces on two; speed-up on {DEVICES} GPUs", lines)
    save("scaling", of=["flops", "moved_bytes", "operations", "all_reduces", "reduced_bytes"], step=raw)
