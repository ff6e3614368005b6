"""Compares a few steps of a run on one and on two replicas, in a process of its own.

While the run starts, a child of the chief runs the steps on the CPU, as `trainer.check` does. It compares weights and
losses in float64 or, with --virtual_replicas, all bits of weights, slots and averages in the precision of the run.
Later children compare further steps, from the state of the running job.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from keras.callbacks import CallbackList

from trainer.base.errors import FAULT, PlatformFault, UserError
from trainer.base.log import log
from trainer.base.settings.model_settings import function_of
from trainer.base.settings.train_config import DATA_SOURCES, TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.fingerprint import changed_values
from trainer.data.sources import is_named
from trainer.invariance.internals import all_layers, floats_of_variables
from trainer.invariance.layers import depends_on_replicas
from trainer.reporting.progress import Progress, is_loss
from trainer.run.rehearsal import has_own_code
from trainer.run.start import StartedJob
from trainer.run.training_setup import TrainingSetup, build_setup, set_precision_and_seed
from trainer.training.callbacks import load_callbacks
from trainer.training.checkpoint import (
    assign_values,
    digest_of,
    of_networks,
    read_checkpoint,
    snapshot,
    variables_of,
    write_checkpoint,
)
from trainer.training.loop import Hook
from trainer.training.steps import nodes_of
from trainer.user_code.command import last_error, start_command
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake, load_function

# A few steps of a few rows take much less; this limit only ends a comparison that hangs.
LONGEST_SECONDS = 1800.0
# This environment variable skips the comparison, for tests of this project that are about something else.
SKIP = "TRAINER_SKIP_REPLICA_CHECK"
COMPARED_STEPS = 5
# Operations that draw from TensorFlow's own random state, and the public functions that create them.
_DRAWS = {
    "RandomStandardNormal": "tf.random.normal", "RandomUniform": "tf.random.uniform",
    "RandomUniformInt": "tf.random.uniform", "TruncatedNormal": "tf.random.truncated_normal",
    "RandomGamma": "tf.random.gamma", "RandomPoissonV2": "tf.random.poisson", "RandomShuffle": "tf.random.shuffle",
    "Multinomial": "tf.random.categorical", "StatefulStandardNormalV2": "tf.random.Generator",
    "StatefulUniform": "tf.random.Generator",
}  # fmt: skip
_UNKNOWN_REASON = (
    "a loss or a metric must be a mean of one value a row: what is computed from a whole batch (a correlation, pairs "
    "within the batch, the root of a mean) differs on half of its rows; add_loss takes a mean over the rows "
    "at hand, and a masked sum over a mask's sum is mean_with_sample_weight (docs/training.md)"
)
REMEDY = (
    "change that, train on one replica (--replicas=1), or use --allow_replica_dependence: the numbers then hold for "
    "this many replicas only"
)
_FEW_ROWS = 16
TOLERANCE = 1e-10  # relative L2 norm of a weight tensor's difference; far above float64 rounding
_METRIC_TOLERANCE = 1e-6  # relative; wider, as a user's metric may compute in float32, and training does not use it
# A layer may fix its own dtype, as the last one under mixed precision does; all tolerances are then larger.
_NARROW_DTYPES = ("float32", "float16", "bfloat16")
_NARROW_FACTOR = 1e5


@dataclass(frozen=True)
class ReplicaVerdict:
    """Holds what a comparison found, as run.json keeps it. `agrees` is None if nothing was compared."""

    agrees: bool | None
    problems: list[str] = field(default_factory=list)  # what differs, and what to change
    reason: str = ""  # why nothing was compared, or which settings the comparison changed
    equal_bits: bool = False  # whether all bits were compared, with --virtual_replicas, and are equal
    by_settings: bool = False  # nothing was compared, as the settings ask for a dependence that the log reports
    fault: bool = False  # whether the comparison itself failed, through no mistake of the user
    draws: list[str] = field(default_factory=list)  # functions that draw from TensorFlow's state, if the steps agree

    @property
    def outcome(self) -> str:
        """Returns the outcome in the words of result.json: "agree", "equal bits", "differ" or "not compared: why"."""
        if self.agrees is None:
            return f"not compared: {self.reason}"
        return "differ" if not self.agrees else "equal bits" if self.equal_bits else "agree"

    @property
    def not_compared(self) -> str:
        """Returns why it is unknown whether the number of replicas changes the result; "" if it is known."""
        return self.reason if self.agrees is None and not self.by_settings else ""


def needs_check(config: TrainConfig, replicas: int) -> bool:
    """Returns whether a new run needs the comparison: a user's own model or data, on several replicas."""
    return (replicas > 1 or config.virtual_replicas > 0) and has_own_code(config) and not os.environ.get(SKIP)


class ReplicaCheck:
    """Starts the comparison in a child process when it is created, and reads its verdict.

    arguments: the flags of the run. state: nothing, or the values and the manifest that `write_checkpoint` takes, to
    compare steps from the state of a running job.
    """

    def __init__(self, arguments: Sequence[str], *state: Any) -> None:
        self._folder = TemporaryDirectory(prefix="trainer-replicas-")
        self._file, self._log, at = (Path(self._folder.name) / name for name in ("verdict.json", "log", "state"))
        words = ["trainer.check", *arguments, f"--verdict={self._file}"]
        if state:
            write_checkpoint(at, *state)
            words.append(f"--from_state={at}")
        self._began = time.monotonic()
        self._child = start_command(words, self._log)
        with suppress(OSError):
            if state:  # the job is training: the child yields the processor to it
                os.setpriority(os.PRIO_PROCESS, self._child.pid, 10)
            # If memory runs short, Linux kills the child first.
            Path(f"/proc/{self._child.pid}/oom_score_adj").write_text("1000")

    @property
    def ended(self) -> bool:
        """Returns whether the child has ended or run out of time, so that `verdict` does not wait."""
        return self._child.poll() is not None or time.monotonic() > self._began + LONGEST_SECONDS

    def verdict(self, most_seconds: float = LONGEST_SECONDS) -> ReplicaVerdict:
        """Waits for the child, at most `most_seconds` or until LONGEST_SECONDS after its start; returns its verdict."""
        try:
            self._child.wait(min(most_seconds, max(0.0, self._began + LONGEST_SECONDS - time.monotonic())))
        except subprocess.TimeoutExpired:
            return ReplicaVerdict(
                None, reason=f"it took longer than {(time.monotonic() - self._began) / 60:.3g} minutes"
            )
        with suppress(OSError, ValueError, TypeError):
            return ReplicaVerdict(**json.loads(self._file.read_text()))
        if self._child.returncode < 0:  # killed, for instance because memory ran short
            return ReplicaVerdict(None, reason=f"its process was ended by signal {-self._child.returncode}")
        return ReplicaVerdict(None, reason=last_error(self._log), fault=self._child.returncode == FAULT)

    def close(self) -> None:
        """Kills the child if it still runs, and removes its files."""
        self._child.kill()
        self._child.wait()
        self._folder.cleanup()


def act_on_verdict(
    verdict: ReplicaVerdict, *, allowed: bool, paid: bool = False, when: str = "before training"
) -> None:
    """Logs a verdict or, unless `allowed` (--allow_replica_dependence), refuses to train.

    when: when the steps were compared. Raises UserError if they differ, or were not compared though several replicas
    are `paid` for, and PlatformFault if the comparison itself failed.
    """
    if verdict.draws:
        log.warning(f"steps on 1 and on 2 replicas agree so far, but {other_numbers(verdict.draws)}")
    if verdict.equal_bits:
        log.info(f"equal bits: steps on 1 and on 2 replicas, compared {when}")
    elif verdict.agrees:
        log.info(f"steps on 1 and on 2 replicas give the same, compared in float64 {when} {verdict.reason}".rstrip())
    elif verdict.agrees is None:
        line = f"one replica and two were not compared {when}: {verdict.reason}"
        if verdict.fault and not allowed:
            raise PlatformFault(f"{line}: --allow_replica_dependence trains all the same")
        if paid and verdict.not_compared and not allowed:
            raise UserError(
                f"{line}: compare them at your desk (python -m trainer.check with the same flags), then pay for "
                "several replicas with --allow_replica_dependence"
            )
        log.warning(line)
    elif allowed:
        log.warning(f"the result depends on the number of replicas, as allowed: {'; '.join(verdict.problems)}")
    else:
        raise UserError(f"{'; '.join(verdict.problems)}: {REMEDY}")


def other_numbers(draws: Sequence[str]) -> str:
    """Returns a line that names the functions that draw from TensorFlow's own state, and what to use instead."""
    return (
        f"the step draws by {', '.join(dict.fromkeys(draws))}, whose numbers differ on each replica: draw by "
        "keras.random (normal, truncated_normal, uniform, randint) or a layer, such as GaussianNoise"
    )


def compare_few_rows(config: TrainConfig, state: Path | None = None) -> dict[str, Any]:
    """Compares steps with few rows each, or with whole batches if few rows fail; returns a `ReplicaVerdict`'s fields.

    Batch norm without --sync_batch_norm, or over micro-batches, depends on replicas by its settings, as the log says
    anyway, so the comparison changes these settings. A difference from the `state` of a running job counts only if
    other rows show it too, because a single row at a kink of the loss may round to either side.
    """
    fields = _compare_once(config, state, 0)
    return _compare_once(config, state, COMPARED_STEPS) if state and fields["agrees"] is False else fields


def _compare_once(config: TrainConfig, state: Path | None, first_rows: int) -> dict[str, Any]:
    """Compares once, as `compare_few_rows` describes, on the rows of the steps from number `first_rows` on."""
    cuts = config.virtual_replicas or 2 * config.micro_batches  # of each global batch, all of one size
    few, whole = (max(rows // cuts, 2) * cuts for rows in (_FEW_ROWS, config.global_batch_size))
    for rows in (few, whole):
        try:
            fewer = replace(config, global_batch_size=min(rows, whole))
            problems = compare_bits(fewer, 2, state, first_rows) if config.virtual_replicas else []
            warnings, draws = list[str](), list[str]()
            if not problems:  # with equal bits, the loss of a shard may still differ from that of the whole batch
                fewer = replace(fewer, virtual_replicas=0, sync_batch_norm=True, micro_batches=1)
                problems, warnings, draws = compare_replicas(fewer, state, first_rows)
            break
        except UserError:  # a PyDataset fixes its batch size and may refuse few rows
            if rows == whole:
                raise
    if problems and warnings:
        reason = f"the log tells of a dependence already: {'; '.join(warnings)}"
        return {"agrees": None, "reason": reason, "by_settings": True}
    plain = config.sync_batch_norm and config.micro_batches == 1
    return {
        "agrees": not problems,
        "problems": problems,
        "reason": "" if plain else "with --sync_batch_norm=true and --micro_batches=1",
        "equal_bits": bool(config.virtual_replicas and not problems),
        "draws": [] if problems else draws,
    }


def compare_bits(config: TrainConfig, replicas: int, state: Path | None = None, first_rows: int = 0) -> list[str]:
    """Returns a line if any bits of the variables differ between one replica and `replicas`, else an empty list."""
    runs = [_run_steps(config, count, config.precision, state, first_rows) for count in (1, replicas)]
    if other := _different_starts(config, *runs):
        return other
    alone, several = (snapshot(variables_of(run.model)) for run in runs)
    log.info(f"SHA-256 of {len(alone)} variables: {digest_of(alone)} on 1 replica, {digest_of(several)} on {replicas}")
    unequal = [name for name in alone if alone[name].tobytes() != several[name].tobytes()]
    if not unequal:
        return []
    return [
        f"{config.model}: on {replicas} replicas {len(unequal)} of {len(alone)} variables have other bits after "
        f"{COMPARED_STEPS} steps, {unequal[0]} the first: a layer keeps numbers of its own from shard to shard or "
        "draws by tf.random, or a gradient is taken outside of accumulate"
    ]


def compare_replicas(
    config: TrainConfig, state: Path | None = None, first_rows: int = 0
) -> tuple[list[str], list[str], list[str]]:
    """Compares weights and losses in float64 on one and two replicas; returns (problems, warnings, draws).

    Problems are what differs and the likely reasons; warnings are those reasons that the log of the run gives anyway.
    Both are empty if nothing differs. Draws are functions in the step that draw from TensorFlow's own state, even if
    they have not run yet.
    """
    alone, together = (_run_steps(config, replicas, "float64", state, first_rows) for replicas in (1, 2))
    if other := _different_starts(config, alone, together):
        return other, [], []
    draws = [_DRAWS[name] for name in together.draws]
    # A weight without effect (a bias before batch norm) has only rounding errors for gradients, which Adam, with its
    # epsilon of 1e-7, turns into up to 1e-8 of an update. So a difference is relative to a hundred updates at least.
    rate = float(getattr(ModelInterface.of(alone.model).optimizer, "learning_rate", config.learning_rate))
    hundred_updates = 100 * COMPARED_STEPS * rate
    differences = [
        float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), hundred_updates * np.sqrt(a.size), 1e-30))
        for a, b in zip(alone.model.get_weights(), together.model.get_weights(), strict=True)
    ]
    losses = {name: (value, together.means[name]) for name, value in alone.means.items()}
    factor = _NARROW_FACTOR if any(layer.compute_dtype in _NARROW_DTYPES for layer in all_layers(alone.model)) else 1.0
    tolerances = {name: factor * 1e-8 if is_loss(name) else max(factor * 1e-10, _METRIC_TOLERANCE) for name in losses}
    uneven = {
        name: pair for name, pair in losses.items()
        if abs(np.subtract(*pair)) > tolerances[name] * max(*map(abs, pair), 1e-30)
    }  # fmt: skip
    if max(differences) <= factor * TOLERANCE and not uneven:
        return [], [], draws
    problems = [f"{config.model}: {name} is {a:.9g} on 1 replica and {b:.9g} on 2" for name, (a, b) in uneven.items()]
    if max(differences) > factor * TOLERANCE:
        worst = alone.model.weights[int(np.argmax(differences))].path
        difference = f"{worst} differs by {max(differences):.1e} (relative) after {COMPARED_STEPS} steps"
        problems.insert(0, f"{config.model}: on 2 replicas {difference}")
    ratios = {name: b / a for name, (a, b) in uneven.items() if a}
    warnings = depends_on_replicas(together.model, replicas=2, micro_batches=config.micro_batches)
    doubled = [name for name, ratio in ratios.items() if abs(ratio - 2) < 0.2]
    halved = [name for name, ratio in ratios.items() if abs(ratio - 0.5) < 0.05]
    reasons = [  # the most likely one comes first
        f"{halved[0]} is about half as large: it is a sum over rows, or one divided by the global batch, as in a "
        "tutorial of TensorFlow's: take the mean over the rows at hand (tf.reduce_mean)" if halved else "",
        f"{doubled[0]} is about twice as large: divide its sum by the GLOBAL batch, not by the rows of one replica "
        "(reduce_mean)" if doubled else "",
        other_numbers(draws) if draws else "",
        *warnings,
    ]  # fmt: skip
    return [*problems, *([reason for reason in reasons if reason] or [_UNKNOWN_REASON])], warnings, draws


@dataclass(frozen=True)
class _StepsResult:
    """Holds what a few steps began with and what they computed."""

    model: Any  # after the steps
    content: dict[str, Any]  # counts and classes of the data; for data of a function also digests of the rows
    starts: list[Any]  # the weights before the steps
    means: Mapping[str, float]  # of losses and metrics
    draws: list[str]  # TensorFlow's random operations in the graph of a step


def _run_steps(config: TrainConfig, replicas: int, precision: str, state: Path | None, first_rows: int) -> _StepsResult:
    """Runs a few steps on so many replicas, from the start or from the `state` of a running job."""
    config = replace(
        config, precision=precision, replicas=replicas, strategy="auto", expect_devices=0, jit_compile="false"
    )
    # A module may draw when it is first imported: import it before the seed, so that both builds draw the same.
    set_precision_and_seed(config)
    load_function(function_of(config.model), "model")
    if is_named(config.data):
        load_function(DATA_SOURCES.get(config.data, config.data), "data")
    setup, first_step = build_setup(config, make_replicas(config)), 0
    if state:
        manifest, values = read_checkpoint(state)
        first_step, variables = manifest["step"], variables_of(setup.model)
        if variables.keys() != values.keys():  # float16 wraps the optimizer for loss scaling, float64 does not
            variables = of_networks(variables)
        assign_values(variables, values, setup.replicas)
        floats_of_variables()
        params = {"epochs": config.epochs or 1, "steps": setup.schedule.steps_per_epoch, "verbose": 0}
        callbacks = CallbackList(load_callbacks(config), model=setup.model, **params)
        callbacks.on_epoch_begin(manifest["state"]["epoch"])
    starts = setup.model.get_weights()
    with setup.dataset.reading():
        runner, rows = setup.step_runner(), setup.rows_from(first_rows)
        try:
            means = runner(rows, first_step, COMPARED_STEPS).means()
        except Exception as error:
            raise as_user_mistake(error) or error from error
        operations = {node.op for node in nodes_of(runner.traced(rows).graph)}
        return _StepsResult(setup.model, setup.content, starts, means, sorted(_DRAWS.keys() & operations))


def _different_starts(config: TrainConfig, alone: _StepsResult, together: _StepsResult) -> list[str]:
    """Returns a line if the two builds differ in data or weights before any step, else an empty list."""
    if changes := changed_values(alone.content, together.content):
        return [
            f"data={config.data}: a second reading gives other rows ({changes}): draw with a generator that is made, "
            "with a seed, inside the function, and make a Dataset that is shuffled there, too"
        ]
    pairs = zip(alone.starts, together.starts, strict=True)
    if unlike := [place for place, pair in enumerate(pairs) if not np.array_equal(*pair)]:
        return [
            f"{config.model}: a second model starts from other weights, {alone.model.weights[unlike[0]].path} the "
            "first: make every initializer and layer inside the function, and draw with generators made there"
        ]
    return []


_POWERS = tuple(10**exponent for exponent in range(3, 16))
_FINAL_WAIT_SECONDS = 300.0  # how long the end of a run waits for a comparison, unless its budget is spent
_UNFINISHED = ReplicaVerdict(None, reason="the run ended meanwhile")  # kept until a child has its verdict


class LaterReplicaChecks:
    """Compares again beside the running job: after its first epoch, and at steps 1,000, 10,000, …

    The comparison before training cannot see what begins later, such as a loss term whose weight a callback raises. So
    a child of the chief takes the variables of the running job and fresh callbacks, and compares the next steps on the
    CPU. Every worker has one of these objects; only the chief's has a child.
    """

    def __init__(self, job: StartedJob, setup: TrainingSetup, progress: Progress) -> None:
        self._job = job
        self._variables = variables_of(setup.model)
        self._steps = tuple(step for step in sorted({progress.steps_per_epoch, *_POWERS}) if step > progress.step)
        self._child: ReplicaCheck | None = None
        self._compared = ""  # which steps the child compares, as text
        before = [steps for steps, outcome in job.result.replica_checks.items() if outcome == "differ"]
        if before and not job.config.allow_replica_dependence:
            raise UserError(f"steps {before[0]} differ on 1 and on 2 replicas, as an earlier start found: {REMEDY}")

    def hook(self) -> Hook:
        """Returns the hook that ends calls to the device at the compared steps, and acts after each call."""
        return Hook(0, self._act, requested=lambda: True, cuts=self._steps)

    def close(self) -> None:
        """Kills the child, if one runs."""
        if self._child:
            self._child.close()
            self._child = None

    def _act(self, progress: Progress) -> None:
        """Reports the verdict of a child that has ended, waiting for it at the end of the run; starts one if it is due.

        Raises UserError if steps differ and that is not allowed.
        """
        if self._child and (self._child.ended or progress.ends):
            verdict = self._child.verdict(0.0 if progress.budget_spent else _FINAL_WAIT_SECONDS)
            self.close()
            self._record(self._compared, verdict)
            # A comparison that fails by itself ends no run that trains, and the draws are in the log already.
            where = f"(steps {self._compared}, from the state of this run)"
            problems = [f"{'; '.join(verdict.problems)} {where}"] if verdict.problems else []
            verdict = replace(verdict, problems=problems, fault=False, draws=[])
            allowed = self._job.config.allow_replica_dependence
            act_on_verdict(verdict, allowed=allowed, when=f"beside the run, steps {self._compared}")
            self._job.result.depends_on_replicas = [*self._job.result.depends_on_replicas, *problems]
        if progress.step in self._steps and not progress.ends and self._job.cluster.is_chief:
            steps = f"{progress.step + 1:,} to {progress.step + COMPARED_STEPS:,}"
            if self._child:
                self._record(steps, ReplicaVerdict(None, reason=f"that of steps {self._compared} still ran"))
            else:
                values = snapshot(self._variables)
                manifest = {"step": progress.step, "state": {"epoch": progress.step // progress.steps_per_epoch}}
                self._child, self._compared = ReplicaCheck(self._job.command[3:], values, manifest), steps
                self._record(steps, _UNFINISHED)

    def _record(self, steps: str, verdict: ReplicaVerdict) -> None:
        """Writes the outcome to run.json; the next writing of result.json has it, too."""
        if self._job.cluster.is_chief:
            self._job.result.replica_checks[steps] = verdict.outcome
            self._job.job_dir.add_to_run_info(replica_checks=self._job.result.replica_checks)
