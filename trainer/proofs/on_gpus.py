"""Runs the same steps on all devices of this machine in every variant, compares them and measures them."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from trainer.base.errors import DONE, USER_MUST_CHANGE
from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.gpu_environment import gpu_environment
from trainer.cluster.strategy import Replicas, local_devices
from trainer.data.dataset import Dataset
from trainer.data.sources import load_dataset
from trainer.invariance.step import NotCompilable
from trainer.proofs.bands import BANDS, Difference, Trained, banded_difference, difference, float32_difference, largest
from trainer.proofs.check_table import table
from trainer.proofs.rates import AllReduce, all_reduces
from trainer.proofs.variants import Speed, Trials, Variant, replicas_on
from trainer.reporting.run_info import gpu_names, versions
from trainer.run.training_setup import set_precision_and_seed
from trainer.training.error_lines import half_precision, one_line

REFERENCE = "float64 on the CPU"
CONTROLS = (7, 8)  # seeds of the orders of rows


@dataclass
class Row:
    """Holds one line of the table: a variant, how far it is from `against`, and what it costs."""

    name: str
    devices: int
    against: str = ""
    difference: Difference | None = None
    speed: Speed | None = None
    problem: str = ""


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
    all_reduces: list[AllReduce] = field(default_factory=list)
    collective: str = ""
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Returns whether everything that is judged is in its band."""
        return not self.problems and not any(row.problem for row in self.rows)

    def content(self) -> dict[str, Any]:
        """Returns the content of gpu_check.json."""
        ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"agrees": self.agrees, "versions": versions(), "gpu_environment": gpu_environment(), "ended": ended}
        return {**about, **dataclasses.asdict(self)}


def check_on_gpus(config: TrainConfig, write: Callable[[dict[str, Any]], str], seconds: float) -> int:
    """Checks all devices, prints one table, passes the result to `write`, returns the exit code.

    seconds: for which each speed is measured. On a machine without GPUs two logical CPU devices are checked.
    """
    devices = _devices(config)
    set_precision_and_seed(dataclasses.replace(config, precision="float32"))
    dataset = load_dataset(config)
    with _no_retracing_warnings():
        check = _checked(config, dataset, devices, seconds)
    for line in table(check):
        log.info(line)
    where = write(check.content())
    of_rows = [f"{row.name} on {row.devices}: {row.problem}" for row in check.rows if row.problem]
    for problem in [*of_rows, *check.problems]:
        log.error("%s", problem)
    if check.agrees:
        log.info(f"all agree; the numbers are in {where}")
    return DONE if check.agrees else USER_MUST_CHANGE


def variants(count: int, *, on_gpus: bool) -> tuple[list[Variant], list[str]]:
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
    if count > 1 and not on_gpus:
        both = [kind for kind in both if kind.devices == 1 or kind.jit_compile == "false"]
        left_out.append("XLA on several devices: it cannot sum over CPUs")
    return both[1:], left_out  # without float32 on one device, with which the others are compared


def _checked(config: TrainConfig, dataset: Dataset, devices: tuple[str, ...], seconds: float) -> GpuCheck:
    strategies = {1: tf.distribute.get_strategy()}
    if len(devices) > 1:
        strategies[len(devices)] = tf.distribute.MirroredStrategy(list(devices))
    replicas = {count: replicas_on(devices[:count], config, strategy) for count, strategy in strategies.items()}
    cpu = replicas_on(["CPU:0"], config, tf.distribute.OneDeviceStrategy("CPU:0"))
    whole, trials = replicas[len(devices)], Trials(config, dataset)
    base = Variant("float32", 1)
    alone, speed = trials.run(base, replicas[1], seconds)
    reference, _ = trials.run(Variant(REFERENCE, 1, precision="float64"), cpu)
    on_cpu = trials.run(base, cpu)[0] if devices[0] != "CPU:0" else alone
    orders = [trials.reordered(base, replicas[1], seed) for seed in CONTROLS]
    control = largest([difference(order, alone) for order in orders])
    of_cpu = difference(on_cpu, reference)
    names = [name or "unknown" for name in gpu_names()]
    check = GpuCheck(config.model, config.data, whole.sentence(), devices, names, control, of_cpu)
    from_reference = float32_difference(alone, reference, largest([control, of_cpu]))
    check.rows.append(Row(base.name, 1, REFERENCE, from_reference, speed, from_reference.problem))
    others, check.left_out = variants(len(devices), on_gpus=devices[0].startswith("GPU"))
    for variant in others:
        row = Row(variant.name, variant.devices)
        try:
            trained, row.speed = trials.run(variant, replicas[variant.devices], seconds)
        except NotCompilable as error:
            check.left_out.append(f"{variant.name} on {variant.devices}: {error}")
            continue
        except Exception as error:  # it is a line of the table, and the others still run
            row.problem = one_line(error)
            log.debug("the whole traceback:", exc_info=error)
        else:
            _judge(row, variant, trained, alone, reference, check)
        check.rows.append(row)
    _measure_rates(check, whole, seconds)
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


def _measure_rates(check: GpuCheck, replicas: Replicas, seconds: float) -> None:
    if replicas.count > 1:
        check.all_reduces, check.collective = all_reduces(replicas, seconds / 10)
        if replicas.devices[0].startswith("GPU") and "nccl" not in check.collective.lower():
            wrong = f"gradients are summed by {check.collective}, not by NCCL: GPUs then wait for the host"
            check.problems.append(wrong)


def _devices(config: TrainConfig) -> tuple[str, ...]:
    """Returns this machine's GPUs, or logical CPU devices, and starts TensorFlow with all of them."""
    simulated = 0 if tf.config.get_visible_devices("GPU") else 2
    every = dataclasses.replace(config, replicas=config.replicas or simulated, strategy="auto")
    devices = local_devices(every, Cluster())
    config.rows_per_replica(len(devices))
    tf.config.list_logical_devices()
    return devices


@contextmanager
def _no_retracing_warnings() -> Iterator[None]:
    """Hides TensorFlow's warnings within the block: it takes the steps of all variants for one function."""
    logger = tf.get_logger()
    before = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(before)
