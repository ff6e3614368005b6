"""Computes what more GPUs should bring: `python -m benchmarks.scaling`. No GPU is used and nothing
is timed.

FLOPs, bytes and all-reduces are counted in the graph of each recipe's step, on one replica and on
two, as `deploy plan` does, whose formula and rates of data sheets turn them into times.
docs/scaling.md has both, and what is left out.
"""

import dataclasses

from benchmarks.runner import make_parser, print_table, program, save
from deploy.planning.step_time import (
    CONSTANTS,
    TimeFormula,
    all_reduce_seconds,
    device_seconds,
    host_seconds,
)
from deploy.tiers.machine_table import Rates, load_machines
from trainer.base.run_files.plan_file import Work
from trainer.base.settings.request import Overrides
from trainer.cluster.strategy import make_replicas
from trainer.data.sources import load_dataset
from trainer.planning.planner import MeasuredStep, work_of_replicas

RECIPES = (
    "wgan_gp_mnist",
    "wgan_gp_photos",
    "dcgan_mnist",
    "cnn_mnist",
    "mlp_mnist",
    "efficientnet_photos",
)
CASES = {recipe: [f"--recipe={recipe}"] for recipe in RECIPES}
CASES["efficientnet_photos"] += ["--weights=none", "--fine_tune_from=", "--fine_tune_after_steps=0"]
CASES["wgan_gp_photos"] += ["--diff_augment="]
CASES["wgan_gp_mnist --sync_batch_norm=false"] = [
    *CASES["wgan_gp_mnist"],
    "--sync_batch_norm=false",
]
DEVICES = (2, 4, 8)
GPUS = {"L4": "NVIDIA_L4", "A100": "NVIDIA_TESLA_A100", "H100": "NVIDIA_H100_80GB"}
PARSER = make_parser(__doc__)


@dataclasses.dataclass(frozen=True)
class Step:
    """Holds what a replica does alone and as one of two, and the rows of a recipe's global
    batch."""

    alone: Work
    of_two: Work
    rows: int
    sums_within: bool  # before its update, so that XLA compiles it on one GPU alone

    def seconds(self, rates: Rates, devices: int, *formulas: TimeFormula) -> float:
        """Returns the seconds of a step on so many GPUs of one machine, by the formula that says
        the least.

        The formulas are those of plain and of compiled steps, as `deploy plan` takes them: compiled
        ones are no slower.
        """
        work = self.alone if devices == 1 else self.of_two
        formulas = formulas or (
            CONSTANTS.plain,
            *(() if devices > 1 and self.sums_within else (CONSTANTS.compiled,)),
        )
        computed = min(
            device_seconds(work, self.rows / devices, rates, "tf32", formula)
            + host_seconds(work, 1, formula)
            for formula in formulas
        )
        return computed + (
            all_reduce_seconds(work, devices, 1, rates.link_gb_per_s) if devices > 1 else 0.0
        )


def counted(*flags: str) -> Step:
    """Counts the step of a recipe; the digits replace its data."""
    config = Overrides.parse([*flags, "--data=digits"]).config
    dataset = load_dataset(config)
    alone, of_two = (work_of_replicas(config, dataset, replicas) for replicas in (1, 2))
    return Step(
        alone, of_two, config.global_batch_size, MeasuredStep(config, dataset, 8).sums_within
    )


def numbers(work: Work, rows: int) -> list[float]:
    """Returns FLOPs, bytes, operations, all-reduces and their bytes of a replica with so many
    rows."""
    moved = sum(op.times * op.moved_bytes.at(rows) for op in work.operations)
    return [
        work.flops(rows),
        moved,
        sum(op.times for op in work.operations),
        work.all_reduces,
        work.reduced_bytes,
    ]


@program
def main() -> None:
    """Prints the tables and saves the counts."""
    PARSER.parse_args()
    # two logical devices, before TensorFlow starts
    make_replicas(Overrides.parse(["--replicas=2"]).config)
    steps = {name: counted(*flags) for name, flags in CASES.items()}
    raw = {
        name: (numbers(step.alone, step.rows), numbers(step.of_two, step.rows // 2))
        for name, step in steps.items()
    }
    lines = [
        "| one step | GFLOP | GB moved | operations | all-reduces | MB all-reduced |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, pair in raw.items():
        flops, moved, operations = (
            f"{one / unit:,.{digits}}, {two / unit:,.{digits}}"
            for one, two, unit, digits in zip(
                *pair, (1e9, 1e9, 1), ("3g", "3g", "0f"), strict=False
            )
        )
        all_reduces, reduced = pair[1][3:]
        lines.append(
            f"| {name} | {flops} | {moved} | {operations} | {all_reduces} | {reduced / 1e6:.2f} |"
        )
    print_table("Counted: a step on one replica; on each of two, with half of the rows", lines)
    lines = ["| | " + " | ".join(GPUS) + " |", "|---|" + "---|" * len(GPUS)]
    machines = load_machines().accelerators
    for name, step in steps.items():
        cells = []
        for gpu in GPUS.values():
            rates = machines[gpu].rates
            assert rates
            alone = step.seconds(rates, 1)
            plain = step.seconds(rates, 1, CONSTANTS.plain)
            summed = all_reduce_seconds(step.of_two, 2, 1, rates.link_gb_per_s)
            faster = " ".join(f"{alone / step.seconds(rates, devices):.2f}" for devices in DEVICES)
            cells.append(f"{1e3 * alone:.1f}, {1e3 * plain:.1f}; {1e3 * summed:.2f}; {faster}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    title = (
        "Milliseconds of a step on one GPU, compiled and plain, of its all-reduces on two; speed-up"
        " of a compiled one"
    )
    print_table(f"{title} on {DEVICES} GPUs, where steps with sums within run plain", lines)
    save(
        "scaling",
        of=["flops", "moved_bytes", "operations", "all_reduces", "reduced_bytes"],
        step=raw,
    )
