"""Runs the same steps on all devices of this machine in every variant, compares them and measures them."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import gpu_environment
from trainer.cluster.strategy import Replicas, make_replicas
from trainer.data.sources import load_dataset
from trainer.invariance.step import NotCompilable
from trainer.proofs.bands import BANDS, Difference, Trained, banded_difference, difference, float32_difference, largest
from trainer.proofs.variants import Cost, Trials, Variant
from trainer.reporting.run_info import gpu_names, versions
from trainer.run.training_setup import set_precision_and_seed
from trainer.training.error_lines import half_precision, one_line

REFERENCE = "float64 on the CPU"
CONTROLS = (7, 8)  # seeds of the orders of rows
_HEADER = ("variant", "devices", "agrees", "weights", "losses", "gradients", "steps/s", "peak GiB", "first s")


@dataclass
class Row:
    """Holds one line of the table: a variant, how far it is from `against`, and what it costs."""

    name: str
    devices: int
    against: str = ""
    difference: Difference | None = None
    cost: Cost | None = None
    problem: str = ""

    def cells(self) -> list[str]:
        """Returns the line as the table shows it."""
        cells = [self.name, str(self.devices), "no" if self.problem else "yes"]
        for name in ("weights", "loss", "gradient"):
            most = getattr(self.difference, f"most_{name}", None)
            of_most = "" if most is None else f" of {most:.0e}"
            cells.append(f"{getattr(self.difference, name):.0e}{of_most}" if self.difference else "")
        if not self.cost:
            return [*cells, "", "", ""]
        peak = "?" if self.cost.peak_gib is None else f"{self.cost.peak_gib:.2f}"
        return [*cells, f"{self.cost.steps_per_second:.3g}", peak, f"{self.cost.first_seconds:.1f}"]


@dataclass
class GpuCheck:
    """Holds everything that the check found."""

    model: str
    data: str
    batch: str
    devices: tuple[str, ...]
    gpus: list[str]  # models; empty on CPUs
    control: Difference  # what the order of the rows alone changes in float32
    float32_of_cpu: Difference  # from float64
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Returns whether everything that is judged is in its band."""
        return not any(row.problem for row in self.rows)

    def content(self) -> dict[str, Any]:
        """Returns the content of gpu_check.json."""
        ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"agrees": self.agrees, "versions": versions(), "gpu_environment": gpu_environment(), "ended": ended}
        return {**about, **dataclasses.asdict(self)}

    def table(self) -> Iterator[str]:
        """Yields the lines for a terminal."""
        yield f"{self.model} on {self.data}, {self.batch}, on {', '.join(self.gpus or self.devices)}"
        lines = [_HEADER, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            yield "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        yield "each difference, and the most that it may be (docs/gpus.md)"
        yield from (f"left out: {line}" for line in self.left_out)


def check_on_gpus(config: TrainConfig, write: Callable[[dict[str, Any]], str], seconds: float) -> int:
    """Checks all devices, prints one table, passes the result to `write`, returns the exit code.

    seconds: for which each speed is measured. On a machine without GPUs two logical CPU devices are checked.
    """
    simulated = 0 if tf.config.get_visible_devices("GPU") else 2
    config = dataclasses.replace(config, replicas=config.replicas or simulated, strategy="auto", virtual_replicas=0)
    replicas = make_replicas(config)
    tf.get_logger().setLevel("ERROR")  # it takes the steps of all variants for one function, and warns of retracing
    check = checked(config, replicas, seconds)
    for line in check.table():
        log.info(line)
    where = write(check.content())
    for row in check.rows:
        if row.problem:
            log.error(f"{row.name} on {row.devices}: {row.problem}")
    if not check.agrees:
        return USER_MUST_CHANGE
    log.info(f"all agree; the numbers are in {where}")
    return DONE


def variants(count: int, *, nccl: bool) -> tuple[list[Variant], list[str]]:
    """Returns what is compared with float32 on one of `count` devices, and what is left out, with the reason."""
    left_out = []
    kinds = [Variant("float32", 1), Variant("float32, TF32", 1, tf32=True)]
    kinds.append(Variant("float32, XLA", 1, jit_compile="true"))
    if half_precision() == "mixed_bfloat16":
        kinds.append(Variant("mixed_bfloat16", 1, precision="mixed_bfloat16"))
    else:
        left_out.append("mixed_bfloat16: a GPU here is below compute capability 8.0")
    kinds.append(Variant("mixed_float16", 1, precision="mixed_float16"))
    if count == 1:
        left_out.append("several devices: there is one")
    both = [dataclasses.replace(kind, devices=n) for kind in kinds for n in sorted({1, count})]
    if count > 1 and not nccl:
        both = [kind for kind in both if kind.devices == 1 or kind.jit_compile == "false"]
        left_out.append("XLA on several devices: it sums over them by NCCL alone")
    return both[1:], left_out  # without float32 on one device, with which the others are compared


def checked(config: TrainConfig, every: Replicas, seconds: float) -> GpuCheck:
    """Trains the first steps in each variant, on every device and on one of them, and compares them."""
    set_precision_and_seed(dataclasses.replace(config, precision="float32"))
    trials, count = Trials(config, load_dataset(config)), every.count
    replicas = {1: make_replicas(dataclasses.replace(config, replicas=1, expect_devices=0)), count: every}
    cpu = dataclasses.replace(replicas[1], strategy=tf.distribute.OneDeviceStrategy("CPU:0"), devices=("CPU:0",))
    base = Variant("float32", 1)
    alone, cost = trials.measured(base, replicas[1], seconds)
    reference = trials.begin(Variant(REFERENCE, 1, precision="float64"), cpu).trained
    on_cpu = trials.begin(base, cpu).trained
    control = largest([difference(trials.reordered(base, replicas[1], seed), alone) for seed in CONTROLS])
    of_cpu, names = difference(on_cpu, reference), [name or "unknown" for name in gpu_names()]
    check = GpuCheck(config.model, config.data, every.sentence(), every.devices, names, control, of_cpu)
    from_reference = float32_difference(alone, reference, largest([control, of_cpu]))
    check.rows.append(Row(base.name, 1, REFERENCE, from_reference, cost, from_reference.problem))
    others, check.left_out = variants(count, nccl=every.collectives == "nccl")
    for variant in others:
        row = Row(variant.name, variant.devices)
        try:
            trained, row.cost = trials.measured(variant, replicas[variant.devices], seconds)
        except NotCompilable as error:
            check.left_out.append(f"{variant.name} on {variant.devices}: {error}")
            continue
        except Exception as error:  # it is a line of the table, and the others still run
            row.problem = one_line(error)
            log.debug("the whole traceback:", exc_info=error)
        else:
            _judge(row, variant, trained, alone, reference, check)
            if replicas[variant.devices].collectives == "nccl" and "nccl" not in row.cost.sums.lower():
                slow = f"gradients are summed by {row.cost.sums}, not by NCCL: GPUs then wait for the host"
                row.problem = "; ".join(filter(None, (row.problem, slow)))
        check.rows.append(row)
    if config.deterministic:
        check.rows.append(_repeated(trials, every))
    else:
        check.left_out.append("the same steps twice: without --deterministic they need not have equal bits")
    return check


def _judge(row: Row, variant: Variant, trained: Trained, alone: Trained, reference: Trained, check: GpuCheck) -> None:
    """Writes into the row how far the variant is from what it has to agree with."""
    if band := BANDS.get("tf32" if variant.tf32 else variant.precision):
        row.against, row.difference = REFERENCE, banded_difference(trained, reference, band)
    else:
        # XLA's kernels round otherwise, as those of another processor do.
        control = check.control if variant.jit_compile == "false" else largest([check.control, check.float32_of_cpu])
        row.against, row.difference = "float32 on one", float32_difference(trained, alone, control)
    row.problem = row.difference.problem


def _repeated(trials: Trials, replicas: Replicas) -> Row:
    """Trains the same steps twice, which must give the same numbers."""
    first, second = (trials.begin(Variant("float32", replicas.count), replicas).trained for _ in range(2))
    far = dataclasses.replace(difference(second, first), most_weights=0.0, most_loss=0.0, most_gradient=0.0)
    return Row("float32, again", replicas.count, "float32 before", far, problem=far.problem)
