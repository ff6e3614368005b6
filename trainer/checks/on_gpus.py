"""Runs the same steps in every variant that this machine's devices allow, compares the results, and
times them.

Variants are precisions, TF32, XLA and numbers of devices (docs/gpus.md). Each trains from the same
weights with the `TrainingSetup` of a real run. The result has one row for each variant, even if it
failed.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.base.log import log
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import gpu_environment
from trainer.cluster.devices import gpu_names, half_precision
from trainer.cluster.strategy import Replicas, make_replicas
from trainer.data.dataset import Dataset
from trainer.data.sources import load_dataset
from trainer.invariance.gradients import all_reduce_sum, reachable
from trainer.invariance.internals import separate_collectives
from trainer.invariance.layers import refresh_normalization
from trainer.invariance.step import NotCompilable, StepContext
from trainer.reporting.error_lines import one_line
from trainer.reporting.progress import is_loss
from trainer.reporting.resources import peak_device_memory_gib
from trainer.reporting.result import library_versions
from trainer.run.replica_check import COMPARED_STEPS
from trainer.run.training_setup import TrainingSetup, set_precision_and_seed, setup_with
from trainer.training.checkpoint import assign_values, of_networks, snapshot, variables_of
from trainer.training.steps import StepRunner, nodes_of

PERMUTATION_SEEDS = (7, 8)  # of the orders of rows that make the control
TIMES_CONTROL = 3.0  # allowed multiple of the control
# A control, the difference that the same steps show with the rows of each batch in another order,
# is chance below this: the spacing of float32, and more for losses and norms, where differences may
# cancel.
_LEAST = {"weights": 1e-7, "losses": 1e-5, "gradients": 1e-5}
# The largest allowed relative difference of losses and gradients from float64. TF32 and float16
# round factors to 11 bits, bfloat16 to 8. Each band is more than ten times the difference of the
# recipes on a CPU (docs/gpus.md); TF32, which no CPU has, gets the band of float16.
BANDS = {"tf32": 0.03, "mixed_float16": 0.03, "mixed_bfloat16": 0.1}

# The numbers of each group. Moving statistics are a group of their own, since their large changes
# would hide those of trained weights.
Weights = Mapping[str, npt.NDArray[np.float64]]
Differences = Mapping[str, float]  # relative ones of weights, losses and gradients, or their limits


@dataclass(frozen=True)
class Trained:
    """Holds what a variant computed in its first steps, in float64."""

    before: Weights  # before the first step
    after: Weights
    losses: Mapping[str, float]  # means over the steps
    # root mean square over the updates; without Adam, that of the weights' change
    gradient_norm: float


def differences(variant: Trained, reference: Trained) -> Differences:
    """Returns the differences of a variant from a reference.

    Weights: the largest L2 norm of a group's difference, relative to how far the steps moved it. A
        group that did not move, such as frozen weights, must be equal. Losses: relative to the
        largest loss of the reference. Gradients: the relative difference of the norms.
    """
    # The divisors are never 0, so that a difference from 0 is huge.
    weights = [
        np.linalg.norm(variant.after[group] - after)
        / max(float(np.linalg.norm(after - reference.before[group])), 1e-300)
        for group, after in reference.after.items()
    ]
    scale = max(max(map(abs, reference.losses.values()), default=1.0), 1e-300)
    losses = [abs(variant.losses[name] - value) / scale for name, value in reference.losses.items()]
    gradient = abs(variant.gradient_norm - reference.gradient_norm) / max(
        reference.gradient_norm, 1e-300
    )
    # NumPy's maximum is NaN if one of the values is.
    return {
        "weights": float(np.max(weights, initial=0.0)),
        "losses": float(np.max(losses, initial=0.0)),
        "gradients": float(gradient),
    }


def largest_of_each(several: Sequence[Differences]) -> Differences:
    """Returns the largest difference of each kind among several."""
    return {kind: max(found[kind] for found in several) for kind in _LEAST}


def float32_limits(control: Differences) -> Differences:
    """Returns TIMES_CONTROL times the control: how far two variants in float32 may differ."""
    return {kind: TIMES_CONTROL * max(control[kind], least) for kind, least in _LEAST.items()}


def too_far(found: Differences, limits: Differences) -> str:
    """Returns text on the differences above their limits, "" if there are none."""
    return ", ".join(
        f"{kind} differ by {found[kind]:.1e}, more than {most:.1e}"
        for kind, most in limits.items()
        if not found[kind] <= most  # written so that NaN counts as too far
    )


@dataclass(frozen=True)
class Variant:
    """Describes one way to compute the same steps: its name in the table, and its settings."""

    name: str
    devices: int
    precision: str = "float32"
    tf32: bool = False
    jit_compile: str = "false"


@dataclass(frozen=True)
class Cost:
    """Holds the time and memory that a variant takes, and how several devices sum its gradients."""

    first_seconds: float  # to trace, compile and run the compared steps
    peak_gib: float | None  # memory of the fullest device; None where TensorFlow does not count it
    steps_per_second: float
    sums: str  # such as `CollectiveReduceV2 (nccl)`


def first_steps(
    config: TrainConfig,
    dataset: Dataset,
    start: dict[str, npt.NDArray[Any]],
    variant: Variant,
    replicas: Replicas,
    permutation_seed: int | None = None,
    seconds: float = 0.0,
) -> tuple[Trained, Cost]:
    """Trains the first steps of the model in one variant; returns their result and their cost.

    start: the weights to start from; if it is empty, it gets those of this variant.
    permutation_seed: the seed of another order of the rows and draws of each global batch; only
        for one replica.
    seconds: how long to measure the speed, by further steps.
    """
    gc.collect()  # frees the previous variant, whose traced function and model refer to each other
    log.info(f"{variant.name} on {', '.join(replicas.devices)} …")
    for device in replicas.devices:
        with suppress(ValueError):  # this device's allocator keeps no statistics
            tf.config.experimental.reset_memory_stats(device)
    config = replace(
        config,
        replicas=variant.devices,
        precision=variant.precision,
        tf32=variant.tf32,
        jit_compile=variant.jit_compile,
    )
    set_precision_and_seed(config)
    setup = setup_with(config, replicas, dataset)
    # Every variant gets the weights of the first one, because another precision would draw
    # different ones.
    weights = of_networks(variables_of(setup.model))
    if start:
        assign_values(weights, start, replicas)
        refresh_normalization(setup.model)
    else:
        start.update(snapshot(weights))
    runner, rows = runner_and_rows(setup, permutation_seed, compiled=variant.jit_compile == "true")
    before = _values(setup.model)
    began = time.monotonic()
    step = COMPARED_STEPS
    with dataset.reading():
        logs = runner(rows, 0, COMPARED_STEPS)
    first_seconds = time.monotonic() - began
    losses = {name: value for name, value in logs.means().items() if is_loss(name)}
    after = _values(setup.model)
    # The root mean square norm of the gradients since the start. Adam's second moments are their
    # mean squares: v / (1 - beta_2^t) after t updates (Kingma and Ba 2015, section 3).
    squares = [
        _array(moment).sum() / max(1.0 - adam.beta_2 ** float(_array(adam.iterations)), 1e-9)
        for adam in reachable(setup.model)
        if isinstance(adam, keras.optimizers.Adam)
        for moment in adam.variables
        if moment.name.endswith("velocity")
    ]
    changes = np.square(after["trained"] - before["trained"])
    trained = Trained(before, after, losses, float(np.sqrt(sum(squares) or changes.sum())))
    peak_gib = max(peak_device_memory_gib(replicas.devices), default=None)
    # The operations of the traced step that sum over devices; none on one device.
    nodes = nodes_of(runner.traced(rows).graph) if replicas.count > 1 else []
    sums = [node for node in nodes if node.op.startswith(("CollectiveReduce", "NcclAllReduce"))]
    hints = {(node.op, node.attr["communication_hint"].s.decode()) for node in sums}
    names = ", ".join(sorted(f"{name} ({hint})" if hint else name for name, hint in hints))

    def run_more(count: int) -> float:
        nonlocal step
        began = time.monotonic()
        with dataset.reading():
            runner(rows, step, count)
        step += count
        return time.monotonic() - began

    return trained, Cost(first_seconds, peak_gib, steps_per_second(run_more, seconds), names)


def runner_and_rows(
    setup: TrainingSetup, permutation_seed: int | None = None, *, compiled: bool = False
) -> tuple[StepRunner, Any]:
    """Returns a step runner and its rows.

    permutation_seed: the seed by which rows and draws of each micro-batch are permuted.
    """
    runner = setup.step_runner(compiled=compiled)
    if permutation_seed is None:
        return runner, setup.rows_from(0)
    rows = setup.replicas.rows // setup.replicas.micro_batches
    permutation = np.random.default_rng(permutation_seed).permutation(rows)

    def permuted_rows(values: Any, axis: int = 0) -> Any:
        firsts = np.arange(0, values.shape[axis], rows)
        return tf.gather(values, (firsts[:, None] + permutation).ravel(), axis=axis)

    class Reordered(StepContext):
        def draw(self, *arguments: Any, **named: Any) -> Any:
            return permuted_rows(super().draw(*arguments, **named))

        def draw_for_all(self, *arguments: Any, **named: Any) -> Any:
            drawn = super().draw_for_all(*arguments, **named)
            if not drawn.shape.rank or drawn.shape[0] is not None:
                return drawn
            # only at run time is it known whether these are all rows
            whole = (rows, *drawn.shape[1:])
            return tf.cond(
                tf.equal(tf.shape(drawn)[0], rows),
                lambda: permuted_rows(tf.ensure_shape(drawn, whole)),
                lambda: drawn,
            )

    def permuted(*parts: Any) -> Any:  # (replicas, batches, rows, …)
        return tf.nest.map_structure(lambda part: permuted_rows(part, axis=2), parts)

    runner.context = Reordered
    return runner, iter(setup.batches_from(0).map(permuted))


def steps_per_second(run: Callable[[int], float], seconds: float) -> float:
    """Returns the median steps per second of `run(steps)`, in long calls."""
    count = 1
    spent = list[float]()
    until = time.monotonic() + seconds
    while not spent or time.monotonic() < until:
        spent.append(run(count) / count)
        count = max(1, min(2 * count, int(seconds / 3 / spent[-1])))
    return 1.0 / float(np.median(spent[len(spent) // 2 :]))  # the first half are short calls


def _values(model: keras.Model) -> Weights:
    """Returns copies of the model's weights, grouped by whether they are trained."""
    groups = {"trained": model.trainable_weights, "others": model.non_trainable_weights}
    return {
        name: np.concatenate([np.zeros(0), *(_array(variable).ravel() for variable in weights)])
        for name, weights in groups.items()
    }


def _array(variable: Any) -> npt.NDArray[np.float64]:
    return np.asarray(tf.convert_to_tensor(variable)).astype(np.float64)


REFERENCE = "float64 on the CPU"
_HEADER = (
    "variant",
    "devices",
    "agrees",
    "weights",
    "losses",
    "gradients",
    "steps/s",
    "peak GiB",
    "first s",
)


@dataclass
class Row:
    """Holds a line of the table: a variant, its difference, its cost, and what is wrong."""

    name: str
    devices: int
    cost: Cost | None = None
    against: str = ""
    difference: Differences | None = None
    limits: Differences = field(default_factory=dict)
    problem: str = ""

    def compare(self, against: str, difference: Differences, limits: Differences) -> None:
        """Judges the difference of the variant from the one called `against`."""
        self.against = against
        self.difference = difference
        self.limits = limits
        self.problem = too_far(difference, limits)

    def cells(self) -> list[str]:
        """Returns the texts of the line's cells, in the order of _HEADER."""
        cells = [self.name, str(self.devices), "no" if self.problem else "yes"]
        for kind in _LEAST:
            limit = f" of {self.limits[kind]:.0e}" if kind in self.limits else ""
            cells.append(f"{self.difference[kind]:.0e}{limit}" if self.difference else "")
        if not self.cost:
            return [*cells, "", "", ""]
        peak = "?" if self.cost.peak_gib is None else f"{self.cost.peak_gib:.2f}"
        return [*cells, f"{self.cost.steps_per_second:.3g}", peak, f"{self.cost.first_seconds:.1f}"]


@dataclass
class GpuCheck:
    """Holds the result of a check: a row for each variant, and what they were compared by."""

    model: str
    data: str
    batch: str
    devices: tuple[str, ...]
    gpus: list[str]  # models; empty on CPUs
    control: Differences  # what another order of the rows changes in float32
    float32_of_cpu: Differences  # of float32 from float64, both on the CPU
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # what was not checked, and why

    def content(self) -> dict[str, Any]:
        """Returns the content of gpu_check.json."""
        return {
            "agrees": not any(row.problem for row in self.rows),
            "versions": library_versions(),
            "gpu_environment": gpu_environment(),
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **asdict(self),
        }

    def table(self) -> Iterator[str]:
        """Yields the lines for a terminal."""
        yield (
            f"{self.model} on {self.data}, {self.batch}, on {', '.join(self.gpus or self.devices)}"
        )
        lines = [_HEADER, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            yield "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        yield "each difference, and its limit (docs/gpus.md)"
        yield from (f"left out: {line}" for line in self.left_out)


def check_on_gpus(config: TrainConfig, seconds: float) -> dict[str, Any]:
    """Checks all devices, logs a table, and returns the content of gpu_check.json.

    seconds: how long to measure each speed. Without GPUs, two logical CPU devices are checked
        instead.
    """
    simulated = 0 if tf.config.get_visible_devices("GPU") else 2
    config = replace(
        config, replicas=config.replicas or simulated, strategy="auto", virtual_replicas=0
    )
    # it would take the variants for one function that is traced again and again
    tf.get_logger().setLevel("ERROR")
    check = checked(config, make_replicas(config), seconds)
    for line in check.table():
        log.info(line)
    for row in check.rows:
        if row.problem:
            log.error(f"{row.name} on {row.devices}: {row.problem}")
    return check.content()


def wrong_sums(devices: Sequence[str]) -> list[str]:
    """Returns each pair of devices, and all together, that add known tensors of 16 MiB wrongly.

    The sums are whole numbers below 2^24, which float32 holds: any order gives the same bits.
    """
    with tf.device("CPU:0"):  # from where each device gets them
        known = tf.range(2.0**22) % 1024
    wrong = []
    for group in {*itertools.combinations(devices, 2), tuple(devices)}:
        separate_collectives()
        strategy = tf.distribute.MirroredStrategy(group)

        def on_replica() -> Any:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group + 1
            return all_reduce_sum([known * tf.cast(number, tf.float32)])[0]

        totals = strategy.experimental_local_results(tf.function(strategy.run)(on_replica))
        sums = known.numpy() * sum(range(len(group) + 1))
        if not all(np.array_equal(total, sums) for total in totals):
            wrong.append(" and ".join(group))
    return sorted(wrong)


def variants(count: int) -> tuple[list[Variant], list[str]]:
    """Returns the variants to compare on `count` devices, and a line for each left out."""
    left_out = []
    kinds = [
        Variant("float32", 1),
        Variant("float32, TF32", 1, tf32=True),
        Variant("float32, XLA", 1, jit_compile="true"),
        Variant("mixed_bfloat16", 1, precision="mixed_bfloat16"),
        Variant("mixed_float16", 1, precision="mixed_float16"),
    ]
    if half_precision() != "mixed_bfloat16":
        kinds = [kind for kind in kinds if kind.precision != "mixed_bfloat16"]
        left_out.append("mixed_bfloat16: a GPU here is below compute capability 8.0")
    if count == 1:
        left_out.append("several devices: there is one")
    both = [replace(kind, devices=n) for kind in kinds for n in sorted({1, count})]
    # all but the first, float32 on one device, which they are compared with
    return both[1:], left_out


def checked(config: TrainConfig, every: Replicas, seconds: float) -> GpuCheck:
    """Trains the first steps in each variant, on all devices and on one, and compares them."""
    set_precision_and_seed(replace(config, precision="float32"))
    count = every.count
    wrong = []
    if count > 1:
        log.info("sums known tensors by each pair of devices, and by all …")
        wrong = wrong_sums(every.devices)
    run = partial(first_steps, config, load_dataset(config), {})
    replicas = {1: make_replicas(replace(config, replicas=1, expect_devices=0)), count: every}
    cpu = replace(
        replicas[1], strategy=tf.distribute.OneDeviceStrategy("CPU:0"), devices=("CPU:0",)
    )
    base = Variant("float32", 1)
    alone, cost = run(base, replicas[1], seconds=seconds)
    reference, _ = run(Variant(REFERENCE, 1, precision="float64"), cpu)
    on_cpu, _ = run(base, cpu)
    control = largest_of_each(
        [differences(run(base, replicas[1], seed)[0], alone) for seed in PERMUTATION_SEEDS]
    )
    of_cpu = differences(on_cpu, reference)
    # kernels of another processor, and XLA's, may round as differently
    either = largest_of_each([control, of_cpu])
    check = GpuCheck(
        config.model,
        config.data,
        every.sentence(),
        every.devices,
        [name or "unknown" for name in gpu_names()],
        control,
        of_cpu,
    )
    rows = check.rows
    rows.append(Row(base.name, 1, cost))
    rows[0].compare(REFERENCE, differences(alone, reference), float32_limits(either))
    if wrong:
        problem = (
            f"{', '.join(wrong)} add known tensors wrongly, by a card, the bus, or IOMMU or ACS"
            " between them: try NCCL_P2P_DISABLE=1 (docs/gpus.md)"
        )
        rows.append(Row("known sums", count, problem=problem))
    others, check.left_out = variants(count)
    for variant in others:
        row = Row(variant.name, variant.devices)
        try:
            trained, row.cost = run(variant, replicas[variant.devices], seconds=seconds)
        except NotCompilable as error:
            check.left_out.append(f"{variant.name} on {variant.devices}: {error}")
            continue
        except Exception as error:  # becomes this variant's line of the table; the others still run
            row.problem = one_line(error)
            log.debug("the whole traceback:", exc_info=error)
        else:
            if band := BANDS.get("tf32" if variant.tf32 else variant.precision):
                bands = {"losses": band, "gradients": band}
                row.compare(REFERENCE, differences(trained, reference), bands)
            else:
                most = control if variant.jit_compile == "false" else either
                row.compare("float32 on one", differences(trained, alone), float32_limits(most))
            if (
                replicas[variant.devices].collectives == "nccl"
                and "nccl" not in row.cost.sums.lower()
            ):
                slow = (
                    f"gradients are summed by {row.cost.sums}, not by NCCL: GPUs then wait for the"
                    " host"
                )
                row.problem = "; ".join(filter(None, (row.problem, slow)))
        rows.append(row)
    if config.deterministic:
        first, second = (run(Variant("float32", count), every)[0] for _ in range(2))
        rows.append(Row("float32, again", count))
        rows[-1].compare("float32 before", differences(second, first), dict.fromkeys(_LEAST, 0.0))
    else:
        check.left_out.append(
            "the same steps twice: without --deterministic they need not have equal bits"
        )
    return check
