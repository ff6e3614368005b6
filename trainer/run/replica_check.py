"""Proves by its graph that the number of replicas changes nothing in a step, or else compares a few
steps in numbers.

While the run starts, a child of the chief does so on the CPU, as `trainer.check` does. Only what
the graph does not prove is compared: weights and losses of steps on one and on two replicas, in
float64. With --virtual_replicas it compares all bits of weights, slots and averages in the
precision of the run.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.base.errors import FAULT, PlatformFault, UserError
from trainer.base.log import log
from trainer.base.settings.model_settings import function_of
from trainer.base.settings.own_settings import has_own_code, is_named
from trainer.base.settings.step_counts import Schedule
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig
from trainer.cluster.strategy import Replicas, make_replicas
from trainer.data.dataset import NestedArrays
from trainer.data.examples import rows_in
from trainer.data.fingerprint import changed_values
from trainer.data.sources import load_dataset
from trainer.invariance.internals import in_float64, layers_by_path, metrics_that_run
from trainer.invariance.layers import depends_on_replicas
from trainer.reporting.progress import is_loss
from trainer.run.proof import (
    MAY_MIX,
    NOT_PROVED,
    PROVED,
    Proof,
    copied_variables,
    prove,
    prove_built,
)
from trainer.run.training_setup import TrainingSetup, build_setup, set_precision_and_seed
from trainer.training.checkpoint import (
    assign_values,
    digest_of,
    snapshot,
    variables_of,
)
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake, load_function, message_of

# A few steps of a few rows take much less; this limit only ends a comparison that hangs.
LONGEST_SECONDS = 1800.0
# This environment variable skips the comparison, for tests of this project that are about something
# else.
SKIP = "TRAINER_SKIP_REPLICA_CHECK"
# Variables of a job that the child does not inherit.
_JOB_VARIABLES = (
    "TF_CONFIG",
    "CLUSTER_SPEC",
    "AIP_MODEL_DIR",
    "AIP_CHECKPOINT_DIR",
    "AIP_TENSORBOARD_LOG_DIR",
)
COMPARED_STEPS = 5
REMEDY = (
    "change that, train on one replica (--replicas=1), or use --allow_replica_dependence: the"
    " numbers then hold for this many replicas only"
)
_FEW_ROWS = 16
TOLERANCE = 1e-10  # relative L2 norm of a weight tensor's difference; far above float64 rounding
# It is relative, and wider, as a metric may compute in float32 and training does not use it.
_METRIC_TOLERANCE = 1e-6
# Relative, of a comparison in float32: Adam makes large updates of gradients that are rounding
# alone.
_FLOAT32_WEIGHTS = 1e-3
_FLOAT32_LOSSES = 1e-4


@dataclass(frozen=True)
class ReplicaVerdict:
    """Holds what a comparison found, as run.json keeps it.

    `agrees` is None if nothing was compared.
    """

    agrees: bool | None
    problems: list[str] = field(default_factory=list)  # what differs, and what to change
    reason: str = ""  # why nothing was compared, or which settings the comparison changed
    # whether all bits were compared, with --virtual_replicas, and are equal
    equal_bits: bool = False
    # nothing was compared, as the settings ask for a dependence that the log reports
    by_settings: bool = False
    fault: bool = False  # whether the comparison itself failed, through no mistake of the user
    proof: str = ""  # what the graph shows: "proved", "mixes rows", "may mix rows" or "not proved"
    # what is not proved, with the lines of the user's files
    lines: list[str] = field(default_factory=list)
    # metrics that mix rows, which changes no update
    metrics: list[str] = field(default_factory=list)
    precision: str = ""  # in which steps were compared, as "in float64"
    replicas: int = 2  # with which one was compared

    @property
    def outcome(self) -> str:
        """Returns the outcome in the words of result.json.

        "proved", "agree", "equal bits", "differ" or "not compared: why".
        """
        if self.proof == PROVED:
            return PROVED
        if self.agrees is None:
            return f"not compared: {self.reason}"
        return "differ" if not self.agrees else "equal bits" if self.equal_bits else "agree"

    @property
    def not_compared(self) -> str:
        """Returns why it is unknown whether the number of replicas changes the result.

        It is "" if it is known.
        """
        return self.reason if self.agrees is None and not self.by_settings else ""


def needs_check(config: TrainConfig, replicas: int) -> bool:
    """Returns whether a new run needs a proof.

    It does for a user's own model or data, on several replicas or in micro-batches.
    """
    parts = replicas * config.micro_batches
    return (
        (parts > 1 or config.virtual_replicas > 0)
        and has_own_code(config)
        and not os.environ.get(SKIP)
    )


@contextmanager
def comparing(arguments: Sequence[str]) -> Iterator[Callable[[], ReplicaVerdict]]:
    """Runs the comparison in a child process within the block, by the flags of the run.

    Yields a function that waits for the child, until LONGEST_SECONDS after its start, and returns
    its verdict. The child is outside of this job's cluster and folders, and has no GPUs.
    """
    began = time.monotonic()
    inherited = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    with TemporaryDirectory(prefix="trainer-replicas-") as folder:
        file = Path(folder) / "verdict.json"
        log_file = Path(folder) / "log"
        with log_file.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "trainer.check", *arguments, f"--verdict={file}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, "CUDA_VISIBLE_DEVICES": "-1"},
            )
        with suppress(OSError):
            # If memory runs short, Linux kills the child first.
            Path(f"/proc/{child.pid}/oom_score_adj").write_text("1000")

        def verdict() -> ReplicaVerdict:
            try:
                child.wait(max(0.0, began + LONGEST_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                minutes = (time.monotonic() - began) / 60
                return ReplicaVerdict(None, reason=f"it took longer than {minutes:.3g} minutes")
            with suppress(OSError, ValueError, TypeError):
                return ReplicaVerdict(**json.loads(file.read_text()))
            if (code := child.returncode) < 0:  # killed, for instance because memory ran short
                return ReplicaVerdict(None, reason=f"its process was ended by signal {-code}")

            # The last error in its output says why, or else the last line.
            lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
            reason = (errors or lines or ["it printed nothing"])[-1]
            return ReplicaVerdict(None, reason=reason, fault=code == FAULT)

        try:
            yield verdict
        finally:
            child.kill()
            child.wait()


def act_on_verdict(verdict: ReplicaVerdict, *, allowed: bool, paid: bool = False) -> None:
    """Logs a verdict or, unless `allowed` (--allow_replica_dependence), refuses to train.

    Raises UserError if steps differ, or if rows may be mixed, or were not compared, though several
    replicas are `paid` for; PlatformFault if the comparison itself failed.
    """
    for line in verdict.metrics:
        log.warning(f"a metric depends on the number of replicas: {line}")
    lines = "; ".join(verdict.lines)

    # The proof suffices, or the comparison agrees.
    if verdict.proof == PROVED:
        line = "proved: every update is what one device with all rows would make, whatever the data"
        log.info(f"{line} ({verdict.reason})" if verdict.reason else line)
    elif verdict.proof == MAY_MIX and verdict.agrees:
        line = (
            f"{MAY_MIX}, though {COMPARED_STEPS} steps on 1 and on {verdict.replicas} replicas give"
            f" the same {verdict.precision}: {lines}"
        )
        if paid and not allowed:
            raise UserError(f"{line}: {REMEDY}")
        log.warning(line)
    elif verdict.equal_bits:
        log.info("equal bits: steps on 1 and on 2 replicas, compared before training")
    elif verdict.agrees:
        about = f" ({NOT_PROVED}: {lines})" if lines else ""
        log.info(
            f"steps on 1 and on {verdict.replicas} replicas give the same, compared"
            f" {verdict.precision} before training{about} {verdict.reason}".rstrip()
        )

    # Nothing was compared, for which several replicas are not paid.
    elif verdict.agrees is None:
        line = f"one replica and two were not compared before training: {verdict.reason}"
        line = f"{line}; {lines}" if lines else line
        if verdict.fault and not allowed:
            raise PlatformFault(f"{line}: --allow_replica_dependence trains anyway")
        if paid and verdict.not_compared and not allowed:
            raise UserError(
                f"{line}: compare them on your machine (python -m trainer.check with the same"
                " flags), then pay for several replicas with --allow_replica_dependence"
            )
        log.warning(line)

    # Steps differ.
    elif allowed:
        log.warning(
            "the result depends on the number of replicas, as allowed:"
            f" {'; '.join(verdict.problems)}"
        )
    else:
        raise UserError(f"{'; '.join(verdict.problems)}: {REMEDY}")


_PLAIN = "with --sync_batch_norm=true and --micro_batches=1"


def asks_for_less(config: TrainConfig) -> bool:
    """Returns whether batch norm may take fewer rows than those of all replicas."""
    return not config.sync_batch_norm or config.micro_batches > 1


def proof_of(config: TrainConfig) -> Proof:
    """Returns what the graph of a step shows.

    It proves nothing if the step cannot be traced for other numbers of rows.
    """

    def built_anew() -> Proof:
        set_precision_and_seed(config)
        return prove(config, load_dataset(config))

    return _traced(built_anew)


def _traced(proved: Callable[[], Proof]) -> Proof:
    """Returns the proof that a function makes, or one of nothing if the step cannot be traced."""
    try:
        return proved()
    except Exception as error:
        line = message_of(as_user_mistake(error) or error)
        return Proof(unknown=[f"its step cannot be traced as one of several replicas: {line}"])


def judge(config: TrainConfig) -> dict[str, Any]:
    """Proves that replicas change nothing, or compares steps with few rows.

    Returns a `ReplicaVerdict`'s fields.
    """
    if config.virtual_replicas:
        return {**compare_few_rows(config), "proof": ""}
    return _judged(config, proof_of(config), lambda: compare_few_rows(config))


def judge_built(setup: TrainingSetup) -> ReplicaVerdict:
    """Does what `judge` does for a model that a script has built, on the devices of the run.

    Every worker must call it. The variables are afterwards as they were.
    """
    proof = _traced(lambda: prove_built(setup.config, setup.dataset, setup.model))
    return ReplicaVerdict(**_judged(setup.config, proof, lambda: compare_built(setup)))


def _judged(
    config: TrainConfig, proof: Proof, compared: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Returns a `ReplicaVerdict`'s fields, of the proof or of steps that are then compared."""
    if proof.holds:
        exempt = f"batch norm as {_PLAIN}" if asks_for_less(config) else ""
        return {"agrees": True, "proof": PROVED, "metrics": proof.metrics, "reason": exempt}
    fields = compared()
    differ = fields["agrees"] is False
    fields |= {"proof": proof.verdict(differ=differ), "metrics": proof.metrics}
    if differ:
        fields["problems"] += proof.lines
    return {**fields, "lines": proof.lines}


def compare_built(setup: TrainingSetup) -> dict[str, Any]:
    """Compares steps with few rows on one device and on all; returns a verdict's fields.

    The variables are afterwards as they were.
    """
    # The run's data and settings are cut to one batch of few rows.
    model = setup.model
    replicas = setup.replicas
    count = replicas.count
    parts = setup.dataset.train.first(max(1, _FEW_ROWS // count) * count)
    rows = rows_in(parts) // count * count
    config = replace(
        setup.config,
        global_batch_size=rows,
        micro_batches=1,
        virtual_replicas=0,
        sync_batch_norm=True,
    )
    train = NestedArrays(*tf.nest.map_structure(lambda part: part[:rows], parts))
    few = replace(
        setup,
        config=config,
        dataset=replace(setup.dataset, train=train),
        schedule=Schedule(rows, rows, 1, config.seed),
    )
    variables = variables_of(model)
    values = snapshot(variables)
    starts = model.get_weights()

    def after_steps(on: Replicas) -> _StepsResult:
        on = replace(on, rows=rows // on.count, global_batch_size=rows, micro_batches=1, virtual=0)
        steps = replace(few, replicas=on, runners={})
        model.reset_metrics()
        means = steps.step_runner()(steps.rows_from(0), 0, COMPARED_STEPS).means()
        return _StepsResult(model, {}, starts, model.get_weights(), means)

    # On one device the steps change copies of the variables, and on all of them the variables.
    widths = {layer.compute_dtype for layer in layers_by_path(model).values()}
    try:
        if rows == 0 or count == 1 or widths & {"float16", "bfloat16"}:
            raise UserError("one device, few rows or 16 bits prove nothing")
        with copied_variables(model):
            alone = after_steps(Replicas(tf.distribute.get_strategy(), replicas.devices[:1], 0, 0))
        together = after_steps(replicas)
    except Exception as error:
        line = message_of(as_user_mistake(error) or error)
        return {"agrees": None, "reason": f"its steps cannot be compared: {line}"}
    finally:
        assign_values(variables, values if replicas.cluster.is_chief else None, replicas)
        model.reset_metrics()

    # The tolerance follows the type of the weights.
    in_float32 = any(part.dtype != np.float64 for part in starts)
    precision = f"in float32 (up to {_FLOAT32_LOSSES:g} of a loss)" if in_float32 else "in float64"
    problems, _, precision = _differences(
        config, alone, together, precision, in_float32=in_float32, replicas=count
    )
    return {
        "agrees": not problems,
        "problems": problems,
        "precision": precision,
        "replicas": count,
    }


def compare_few_rows(config: TrainConfig) -> dict[str, Any]:
    """Compares steps with few rows each, or with whole batches if few rows fail.

    Returns a `ReplicaVerdict`'s fields. Batch norm without --sync_batch_norm, or over
    micro-batches, depends on replicas by its settings, as the log says anyway, so the comparison
    changes these settings.
    """
    # Each global batch is divided into so many shards of one size.
    shards = config.virtual_replicas or 2 * config.micro_batches
    few, whole = (max(rows // shards, 2) * shards for rows in (_FEW_ROWS, config.global_batch_size))
    for rows in (few, whole):
        try:
            fewer = replace(config, global_batch_size=min(rows, whole))
            problems = compare_bits(fewer, 2) if config.virtual_replicas else []
            warnings = list[str]()
            precision = ""
            # With equal bits, the loss of a shard may still differ from that of the whole batch.
            if not problems:
                fewer = replace(fewer, virtual_replicas=0, sync_batch_norm=True, micro_batches=1)
                problems, warnings, precision = compare_replicas(fewer)
            break
        # A PyDataset fixes its batch size and may refuse few rows.
        except UserError:
            if rows == whole:
                raise
    if problems and warnings:
        reason = f"a warning names a dependence already: {'; '.join(warnings)}"
        return {"agrees": None, "reason": reason, "by_settings": True}
    return {
        "agrees": not problems,
        "problems": problems,
        "reason": _PLAIN if asks_for_less(config) else "",
        "equal_bits": bool(config.virtual_replicas and not problems),
        "precision": precision,
    }


def compare_bits(config: TrainConfig, replicas: int) -> list[str]:
    """Returns a line if bits of variables differ between one replica and `replicas`.

    Otherwise the list is empty.
    """
    runs = [_run_steps(config, count, config.precision) for count in (1, replicas)]
    if other := _different_starts(config, *runs):
        return other
    alone, several = (snapshot(variables_of(run.model)) for run in runs)
    log.info(
        f"SHA-256 of {len(alone)} variables: {digest_of(alone)} on 1 replica, {digest_of(several)}"
        f" on {replicas}"
    )
    unequal = [name for name in alone if alone[name].tobytes() != several[name].tobytes()]
    if not unequal:
        return []
    return [
        f"{config.model}: on {replicas} replicas {len(unequal)} of {len(alone)} variables have"
        f" other bits after {COMPARED_STEPS} steps, {unequal[0]} the first: a layer keeps numbers"
        " of its own from shard to shard or draws by tf.random, or a gradient is taken outside of"
        " accumulate"
    ]


class ComparedSteps(NamedTuple):
    """Holds what differs, with the likely reasons.

    `warnings` are those reasons that the log of the run gives anyway. Both lists are empty if
    nothing differs. The precision is text, such as "in float64".
    """

    problems: list[str]
    warnings: list[str]
    precision: str


def compare_replicas(config: TrainConfig) -> ComparedSteps:
    """Compares weights and losses on one and two replicas, in float64 or float32.

    It takes float32 if the model cannot run in float64. Compiled metrics that float64 lacks are
    left out. Raises UserError if the steps give NaN or infinity on one replica.
    """
    in_float32 = False
    with metrics_that_run() as omitted:
        try:
            alone, together = (_run_steps(config, replicas, "float64") for replicas in (1, 2))
        # An operation may have no float64; each layer says so in words of its own.
        except Exception:
            in_float32 = True
    if in_float32:
        alone, together = (_run_steps(config, replicas, "float32") for replicas in (1, 2))
        precision = (
            f"in float32 (up to {_FLOAT32_LOSSES:g} of a loss, as the model does not run in"
            " float64)"
        )
    else:
        names = ", ".join(dict.fromkeys(omitted))
        precision = "in float64"
        if names:
            precision += f" (without {names}, which does not run in it)"
    if other := _different_starts(config, alone, together):
        return ComparedSteps(other, [], precision)
    return _differences(config, alone, together, precision, in_float32=in_float32)


def _differences(
    config: TrainConfig,
    alone: "_StepsResult",
    together: "_StepsResult",
    precision: str,
    *,
    in_float32: bool,
    replicas: int = 2,
) -> ComparedSteps:
    """Compares what steps have computed on one replica and on this many.

    Raises UserError if the steps give NaN or infinity on one replica.
    """
    means = alone.means
    infinite = [name for name in means if is_loss(name) and not np.isfinite(means[name])]
    if infinite:
        raise UserError(
            f"{config.model}: {infinite[0]} is {means[infinite[0]]} within the first"
            f" {COMPARED_STEPS} steps, on one replica too: look for a logarithm, root or division"
            " of 0, or use a smaller learning rate"
        )

    # A weight without effect (a bias before batch norm) has only rounding errors for gradients,
    # which Adam, with its epsilon of 1e-7, turns into up to 1e-8 of an update. So a difference is
    # relative to a hundred updates at least.
    rate = getattr(ModelInterface.of(alone.model).optimizer, "learning_rate", config.learning_rate)
    hundred_updates = 100 * COMPARED_STEPS * float(keras.ops.convert_to_numpy(rate))
    differences = []
    for a, b in zip(alone.weights, together.weights, strict=True):
        size = max(float(np.linalg.norm(a)), hundred_updates * np.sqrt(a.size), 1e-30)
        differences.append(float(np.nan_to_num(np.linalg.norm(a - b), nan=np.inf)) / size)

    # Losses and metrics are compared each by a tolerance of its own.
    losses = {name: (value, together.means[name]) for name, value in means.items()}
    tolerance = _FLOAT32_WEIGHTS if in_float32 else TOLERANCE
    tolerances = {name: 1e-8 if is_loss(name) else _METRIC_TOLERANCE for name in losses}
    if in_float32:
        tolerances = dict.fromkeys(losses, _FLOAT32_LOSSES)

    def is_uneven(name: str) -> bool:
        return not np.isclose(*losses[name], rtol=tolerances[name], atol=1e-30, equal_nan=True)

    uneven = {name: pair for name, pair in losses.items() if is_uneven(name)}
    if max(differences) <= tolerance and not uneven:
        return ComparedSteps([], [], precision)

    # The report says what differs, and then why that may be, the most likely reason first.
    problems = [
        f"{config.model}: {name} is {a:.9g} on 1 replica and {b:.9g} on {replicas}"
        for name, (a, b) in uneven.items()
    ]
    if max(differences) > tolerance:
        worst = alone.model.weights[int(np.argmax(differences))].path
        difference = (
            f"{worst} differs by {max(differences):.1e} (relative) after {COMPARED_STEPS} steps"
        )
        problems.insert(0, f"{config.model}: on {replicas} replicas {difference}")
    ratios = {name: b / a for name, (a, b) in uneven.items() if a}
    doubled = [name for name, ratio in ratios.items() if abs(ratio / replicas - 1) < 0.1]
    halved = [name for name, ratio in ratios.items() if abs(ratio * replicas - 1) < 0.1]
    if halved:
        problems.append(
            f"{halved[0]} is about half as large: it is a sum over rows, or one divided by the"
            " global batch, as in a tutorial of TensorFlow's: take the mean over the rows at hand"
            " (tf.reduce_mean)"
        )
    if doubled:
        problems.append(
            f"{doubled[0]} is about twice as large: divide its sum by the GLOBAL batch, not by the"
            " rows of one replica (reduce_mean)"
        )
    layers = layers_by_path(together.model).items()
    dtypes = () if in_float32 else ("float32", "float16", "bfloat16")
    narrow = [path for path, layer in layers if layer.compute_dtype in dtypes]
    if narrow:
        problems.append(
            f"{narrow[0]} computes in a narrower dtype than float64, so that its rounding may"
            " differ"
        )
    warnings = depends_on_replicas(together.model, replicas, micro_batches=config.micro_batches)
    return ComparedSteps([*problems, *warnings], warnings, precision)


@dataclass(frozen=True)
class _StepsResult:
    """Holds what a few steps began with and what they computed."""

    model: Any  # after the steps
    # counts and classes of the data, and for data of a function also digests of the rows
    content: dict[str, Any]
    starts: list[Any]  # the weights before the steps
    weights: list[Any]  # those after them
    means: Mapping[str, float]  # of losses and metrics


def _run_steps(config: TrainConfig, replicas: int, precision: str) -> _StepsResult:
    """Runs a few steps on so many replicas."""
    config = replace(
        config,
        precision=precision,
        replicas=replicas,
        strategy="auto",
        expect_devices=0,
        jit_compile="false",
    )

    # A module may draw when it is first imported: import it before the seed, so that both builds
    # draw the same.
    set_precision_and_seed(config)
    load_function(function_of(config.model), "model")
    if is_named(config.data):
        load_function(DATA_SOURCES.get(config.data, config.data), "data")
    # A layer may fix its own dtype, as the last one under mixed precision does.
    with in_float64() if precision == "float64" else nullcontext():
        setup = build_setup(config, make_replicas(config))

    # Runs the steps on the data's first rows.
    starts = setup.model.get_weights()
    with setup.dataset.reading():
        runner = setup.step_runner()
        rows = setup.rows_from(0)
        try:
            means = runner(rows, 0, COMPARED_STEPS).means()
        except Exception as error:
            raise as_user_mistake(error) or error from error
        return _StepsResult(setup.model, setup.content, starts, setup.model.get_weights(), means)


def _different_starts(
    config: TrainConfig, alone: _StepsResult, together: _StepsResult
) -> list[str]:
    """Returns a line if the two builds differ before any step, else an empty list."""
    if changes := changed_values(alone.content, together.content):
        return [
            f"data={config.data}: a second reading gives other rows ({changes}): draw with a"
            " generator that is made, with a seed, inside the function, and make a Dataset that is"
            " shuffled there, too"
        ]
    pairs = zip(alone.starts, together.starts, strict=True)
    if unlike := [place for place, pair in enumerate(pairs) if not np.array_equal(*pair)]:
        return [
            f"{config.model}: a second model starts from other weights,"
            f" {alone.model.weights[unlike[0]].path} the first: make every initializer and layer"
            " inside the function, and draw with generators made there"
        ]
    return []
