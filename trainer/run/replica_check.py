"""Compares steps of a run on one and on two replicas before it trains, in a process of its own.

A child of the chief compares, on the CPU while the run starts, what a few steps give on one and on two replicas, as
`trainer.check` does: weights and losses in float64 or, with --virtual_replicas, the bits of weights, slots and averages
in the precision of the run. Later it compares again, from the state of the running job.
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

import keras
import numpy as np

from trainer.base.errors import FAULT, PlatformFault, UserError
from trainer.base.log import log
from trainer.base.settings.train_config import DATA_SOURCES, MODELS, TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.data.fingerprint import differing
from trainer.data.sources import is_named
from trainer.invariance.internals import all_layers, floats_of_variables
from trainer.invariance.layers import depends_on_replicas
from trainer.reporting.progress import Progress, is_loss
from trainer.run.rehearsal import has_own_parts
from trainer.run.start import StartedJob
from trainer.run.training_setup import TrainingSetup, build_setup, set_precision_and_seed
from trainer.training.callbacks import load_callbacks
from trainer.training.checkpoint import (
    WEIGHTS,
    digest_of,
    put_back,
    read_checkpoint,
    sharded,
    snapshot,
    variables_of,
    write_checkpoint,
)
from trainer.training.loop import Cuts, Hook
from trainer.training.steps import nodes_of
from trainer.user_code.command import last_error, start_command
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import as_user_mistake, load_function

# The comparison is bounded by its work, a few steps of a few rows; this only ends one that hangs.
LONGEST_SECONDS = 1800.0
SKIP = "TRAINER_SKIP_REPLICA_CHECK"  # an environment variable: this project's own tests prove it elsewhere
COMPARED_STEPS = 5
# Operations that draw from TensorFlow's own state.
_DRAWS = {
    "RandomStandardNormal": "tf.random.normal", "RandomUniform": "tf.random.uniform",
    "RandomUniformInt": "tf.random.uniform", "TruncatedNormal": "tf.random.truncated_normal",
    "RandomGamma": "tf.random.gamma", "RandomPoissonV2": "tf.random.poisson", "RandomShuffle": "tf.random.shuffle",
    "Multinomial": "tf.random.categorical", "StatefulStandardNormalV2": "tf.random.Generator",
    "StatefulUniform": "tf.random.Generator",
}  # fmt: skip
_OTHERWISE = (
    "a loss or a metric must be a mean of one value a row: what is computed from a whole batch (a correlation, pairs "
    "within the batch, the root of a mean) differs on half of its rows; add_loss takes a mean over the rows "
    "at hand, and a masked sum over a mask's sum is mean_with_sample_weight (docs/training.md)"
)
REMEDY = (
    "change that, train on one replica (--replicas=1), or use --allow_replica_dependence: the numbers then hold for "
    "this many replicas only"
)
_FEW_ROWS, _NARROW = 16, ("float32", "float16", "bfloat16")
_OF_METRICS = 1e-6  # relative: a metric of the user's may compute in float32, and nothing is trained by it
TOLERANCE = 1e-10  # relative L2 norm of a weight tensor, far above float64 rounding
_COARSE = 1e5  # times as much where a layer keeps to float32, or to 16 bits, as the last one of mixed precision does


@dataclass(frozen=True)
class ReplicaVerdict:
    """Holds what the comparison found; run.json keeps it. `agrees`: None if nothing could be compared."""

    agrees: bool | None
    problems: list[str] = field(default_factory=list)  # what differs, and what to change
    reason: str = ""  # why nothing could be compared, or with which other settings it was
    equal_bits: bool = False  # whether all bits were compared, with --virtual_replicas, and are equal
    by_settings: bool = False  # whether nothing was compared as settings ask for a dependence, which the log tells
    fault: bool = False  # whether the comparison itself failed, by no mistake of the user
    draws: list[str] = field(default_factory=list)  # what draws from TensorFlow's own state in steps that agree

    @property
    def outcome(self) -> str:
        """Returns what result.json says of it."""
        if self.agrees is None:
            return f"not compared: {self.reason}"
        return "differ" if not self.agrees else "equal bits" if self.equal_bits else "agree"

    @property
    def not_compared(self) -> str:
        """Returns why it is not known whether the number of replicas changes the result, "" if it is."""
        return self.reason if self.agrees is None and not self.by_settings else ""


def needs_check(config: TrainConfig, replicas: int) -> bool:
    """Returns whether a new run with a model or data of the user's own, on several replicas, is to be compared."""
    return (replicas > 1 or config.virtual_replicas > 0) and has_own_parts(config) and not os.environ.get(SKIP)


class ReplicaCheck:
    """Runs the comparison in a child process, from its creation on.

    arguments: the flags of the run; state: the variables of a running job, from which steps are compared, and the
    manifest that `write_checkpoint` takes, with step and epoch.
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
            if state:  # beside the job, whose processor it shares
                os.setpriority(os.PRIO_PROCESS, self._child.pid, 10)
            # On Linux: where memory is short, the child goes first.
            Path(f"/proc/{self._child.pid}/oom_score_adj").write_text("1000")

    @property
    def ended(self) -> bool:
        """Returns whether `verdict` returns at once."""
        return self._child.poll() is not None or time.monotonic() > self._began + LONGEST_SECONDS

    def verdict(self, most_seconds: float = LONGEST_SECONDS) -> ReplicaVerdict:
        """Waits for the child, until LONGEST_SECONDS from its start or `most_seconds`, and returns what it found."""
        try:
            self._child.wait(min(most_seconds, max(0.0, self._began + LONGEST_SECONDS - time.monotonic())))
        except subprocess.TimeoutExpired:
            return ReplicaVerdict(
                None, reason=f"it took longer than {(time.monotonic() - self._began) / 60:.3g} minutes"
            )
        with suppress(OSError, ValueError, TypeError):
            return ReplicaVerdict(**json.loads(self._file.read_text()))
        if self._child.returncode < 0:  # as where memory is short
            return ReplicaVerdict(None, reason=f"its process was ended by signal {-self._child.returncode}")
        return ReplicaVerdict(None, reason=last_error(self._log), fault=self._child.returncode == FAULT)

    def close(self) -> None:
        """Ends the child, if it still runs, and removes its files."""
        self._child.kill()
        self._child.wait()
        self._folder.cleanup()


def act_on_verdict(verdict: ReplicaVerdict, *, allowed: bool, paid: bool = False) -> None:
    """Logs a verdict. Raises UserError if the steps differ and that is not `allowed` (--allow_replica_dependence).

    The same holds where several `paid` replicas were not compared; PlatformFault if the comparison itself failed.
    """
    if verdict.draws:
        log.warning(f"steps on 1 and on 2 replicas agree so far, but {other_numbers(verdict.draws)}")
    if verdict.equal_bits:
        log.info("equal bits: steps on 1 and on 2 replicas, compared before training")
    elif verdict.agrees:
        log.info(
            f"steps on 1 and on 2 replicas give the same, compared in float64 before training {verdict.reason}".rstrip()
        )
    elif verdict.agrees is None:
        line = f"one replica and two were not compared before training: {verdict.reason}"
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
    """Returns the line that names what draws from TensorFlow's own state."""
    return (
        f"the step draws by {', '.join(dict.fromkeys(draws))}, whose numbers are others on each replica: draw by "
        "keras.random (normal, truncated_normal, uniform, randint) or a layer, such as GaussianNoise"
    )


def compare_few_rows(config: TrainConfig, state: Path | None = None) -> dict[str, Any]:
    """Returns the fields of a `ReplicaVerdict`: of steps of few rows, or of all where few fail.

    What settings ask of batch norm depends on replicas, as the log tells: other settings are compared in their place.
    From a `state` of a running job a difference counts only if other rows show it, too: one row on an edge of a piece
    of the loss may round to either side.
    """
    fields = _few_rows_compared(config, state, 0)
    return _few_rows_compared(config, state, COMPARED_STEPS) if state and fields["agrees"] is False else fields


def _few_rows_compared(config: TrainConfig, state: Path | None, first_rows: int) -> dict[str, Any]:
    """Compares steps of few rows, or of all where few fail; their rows are those of the steps from `first_rows` on."""
    passes = config.virtual_replicas or 2 * config.micro_batches
    few, whole = (max(rows // passes, 2) * passes for rows in (_FEW_ROWS, config.global_batch_size))
    for rows in (few, whole):
        try:
            fewer = replace(config, global_batch_size=min(rows, whole))
            problems = compare_bits(fewer, 2, state, first_rows) if config.virtual_replicas else []
            warnings, draws = list[str](), list[str]()
            if not problems:  # a loss of a shard has equal bits, but is another loss than that of the batch
                fewer = replace(fewer, virtual_replicas=0, sync_batch_norm=True, micro_batches=1)
                problems, warnings, draws = compare(fewer, state, first_rows)
            break
        except UserError:  # a PyDataset has batches of its own size
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
    """Returns a line if variables have other bits on so many replicas than on one, else nothing."""
    runs = [_steps(config, count, config.precision, state, first_rows) for count in (1, replicas)]
    if other := _unlike_starts(config, *runs):
        return other
    alone, several = (snapshot(variables_of(run.model)) for run in runs)
    log.info(f"SHA-256 of {len(alone)} variables: {digest_of(alone)} on 1 replica, {digest_of(several)} on {replicas}")
    unequal = [name for name in alone if alone[name].tobytes() != several[name].tobytes()]
    if not unequal:
        return []
    return [
        f"{config.model}: on {replicas} replicas {len(unequal)} of {len(alone)} variables have other bits after "
        f"{COMPARED_STEPS} steps, {unequal[0]} the first: a layer keeps numbers of its own from pass to pass or "
        "draws by tf.random, or a gradient is taken outside of accumulate"
    ]


def compare(
    config: TrainConfig, state: Path | None = None, first_rows: int = 0
) -> tuple[list[str], list[str], list[str]]:
    """Returns what differs between one and two replicas with likely reasons, and those that the log tells anyway.

    Both are empty if nothing differs. Last comes what draws from TensorFlow's own state, perhaps in later steps alone.
    """
    alone, together = (_steps(config, replicas, "float64", state, first_rows) for replicas in (1, 2))
    if other := _unlike_starts(config, alone, together):
        return other, [], []
    draws = [_DRAWS[name] for name in together.draws]
    # A weight without effect (a bias before batch norm) moves by rounding alone, of which Adam's epsilon of 1e-7 makes
    # up to 1e-8 of an update: compare it with a hundred of them.
    rate = float(getattr(ModelInterface.of(alone.model).optimizer, "learning_rate", config.learning_rate))
    moved = 100 * COMPARED_STEPS * rate
    differences = [
        float(np.linalg.norm(a - b) / max(float(np.linalg.norm(a)), moved * np.sqrt(a.size), 1e-30))
        for a, b in zip(alone.model.get_weights(), together.model.get_weights(), strict=True)
    ]
    losses = {name: (value, together.means[name]) for name, value in alone.means.items()}
    coarse = _COARSE if any(layer.compute_dtype in _NARROW for layer in all_layers(alone.model)) else 1.0
    tolerances = {name: coarse * 1e-8 if is_loss(name) else max(coarse * 1e-10, _OF_METRICS) for name in losses}
    uneven = {
        name: pair for name, pair in losses.items()
        if abs(np.subtract(*pair)) > tolerances[name] * max(*map(abs, pair), 1e-30)
    }  # fmt: skip
    if max(differences) <= coarse * TOLERANCE and not uneven:
        return [], [], draws
    problems = [f"{config.model}: {name} is {a:.9g} on 1 replica and {b:.9g} on 2" for name, (a, b) in uneven.items()]
    if max(differences) > coarse * TOLERANCE:
        worst = alone.model.weights[int(np.argmax(differences))].path
        difference = f"{worst} differs by {max(differences):.1e} (relative) after {COMPARED_STEPS} steps"
        problems.insert(0, f"{config.model}: on 2 replicas {difference}")
    ratios = {name: b / a for name, (a, b) in uneven.items() if a}
    warnings = depends_on_replicas(together.model, replicas=2, micro_batches=config.micro_batches)
    reasons = list(warnings)  # why the steps depend on replicas, most likely
    if draws:
        reasons.insert(0, other_numbers(draws))
    if doubled := [name for name, ratio in ratios.items() if abs(ratio - 2) < 0.2]:
        line = "divide its sum by the GLOBAL batch, not by the rows of one replica (reduce_mean)"
        reasons.insert(0, f"{doubled[0]} is about twice as large: {line}")
    if halved := [name for name, ratio in ratios.items() if abs(ratio - 0.5) < 0.05]:
        line = (
            "it is a sum over rows, or one divided by the global batch, as in a tutorial of TensorFlow's: take the mean"
        )
        reasons.insert(0, f"{halved[0]} is about half as large: {line} over the rows at hand (tf.reduce_mean)")
    return [*problems, *(reasons or [_OTHERWISE])], warnings, draws


@dataclass(frozen=True)
class _Steps:
    """Holds what a few steps began with and what they gave."""

    model: Any  # after them
    content: dict[str, Any]  # of the data; of those of a function, with digests of their rows
    starts: list[Any]  # the weights before them
    means: Mapping[str, float]  # of losses and metrics
    draws: list[str]  # TensorFlow's random operations in them


def _steps(config: TrainConfig, replicas: int, precision: str, state: Path | None, first_rows: int) -> _Steps:
    """Runs a few steps of the run on so many replicas, from the `state` of a running job on if there is one."""
    config = replace(
        config, precision=precision, replicas=replicas, strategy="auto", expect_devices=0, jit_compile="false"
    )
    # What a module draws when it is imported would move the draws of the first build alone.
    set_precision_and_seed(config)
    load_function(MODELS.get(config.model, config.model), "model")
    if is_named(config.data):
        load_function(DATA_SOURCES.get(config.data, config.data), "data")
    setup, first_step = build_setup(config, make_replicas(config)), 0
    if state:
        manifest, values = read_checkpoint(state)
        first_step, variables = manifest["step"], variables_of(setup.model)
        if variables.keys() != values.keys():  # float64 needs no optimizer around the optimizer, as float16 does
            variables = {name: variable for name, variable in variables.items() if name.startswith(WEIGHTS)}
        put_back(variables, values, setup.replicas)
        floats_of_variables()
        params = {"epochs": config.epochs or 1, "steps": setup.schedule.steps_per_epoch, "verbose": 0}
        callbacks = keras.callbacks.CallbackList(load_callbacks(config), model=setup.model, **params)
        callbacks.on_epoch_begin(manifest["state"]["epoch"])
    starts = setup.model.get_weights()
    with setup.dataset.reading():
        runner, rows = setup.step_runner(), setup.rows_from(first_rows)
        try:
            means = runner(rows, first_step, COMPARED_STEPS).means()
        except Exception as error:
            raise as_user_mistake(error) or error from error
        operations = {node.op for node in nodes_of(runner.traced(rows).graph)}
        return _Steps(setup.model, setup.content, starts, means, sorted(_DRAWS.keys() & operations))


def _unlike_starts(config: TrainConfig, alone: _Steps, together: _Steps) -> list[str]:
    """Returns a line if the two builds have other data or other weights before any step, else nothing."""
    if changes := differing(alone.content, together.content):
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
_LAST_SECONDS = 300.0  # that the end of a run waits for a comparison, unless its budget is spent
_STARTED = ReplicaVerdict(None, reason="the run ended meanwhile")


class LaterReplicaChecks:
    """Compares again beside the running job: after its first epoch, and at steps 1,000, 10,000, …

    What begins after the first steps, as a term of the loss whose weight a callback raises, is not in the comparison
    before training. A child of the chief takes the variables of the running job and fresh callbacks, and compares the
    next steps on the CPU. Every worker has one of these, and the chief's has the child.
    """

    def __init__(self, job: StartedJob, setup: TrainingSetup, progress: Progress) -> None:
        self._job, self._replicas, self._variables = job, setup.replicas, variables_of(setup.model)
        self._steps = tuple(step for step in sorted({progress.steps_per_epoch, *_POWERS}) if step > progress.step)
        self._child: ReplicaCheck | None = None
        self._compared = ""  # the steps that it compares
        before = [steps for steps, outcome in job.result.replica_checks.items() if outcome == "differ"]
        if before and not job.config.allow_replica_dependence:
            raise UserError(f"steps {before[0]} differ on 1 and on 2 replicas, as an earlier start found: {REMEDY}")

    def hooks(self) -> Sequence[Hook]:
        """Returns the hooks that end calls at the steps, and act after each call."""
        cuts = Cuts(0, lambda progress: None, at_end=False, steps=self._steps)
        return [cuts, Hook(0, self._act, requested=lambda: True)]

    def close(self) -> None:
        """Ends the child, if one runs."""
        if self._child:
            self._child.close()
            self._child = None

    def _act(self, progress: Progress) -> None:
        """Takes the verdict of a child that has ended, at the end of the run of each, and starts another child."""
        if self._child and (self._child.ended or progress.ends):
            verdict = self._child.verdict(0.0 if progress.budget_spent else _LAST_SECONDS)
            self.close()
            result, steps = self._job.result, self._compared
            self._record(steps, verdict)
            problems = f"{'; '.join(verdict.problems)} (steps {steps}, from the state of this run)"
            if verdict.agrees is None:
                log.warning(f"steps {steps} of one replica and of two were not compared: {verdict.reason}")
            elif verdict.agrees:
                log.info(f"steps {steps} on 1 and on 2 replicas give the same, compared beside the run")
            elif self._job.config.allow_replica_dependence:
                log.warning(f"the result depends on the number of replicas, as allowed: {problems}")
                result.depends_on_replicas = [*result.depends_on_replicas, problems]
            else:
                raise UserError(f"{problems}: {REMEDY}")
        if progress.step in self._steps and not progress.ends:
            steps = f"{progress.step + 1:,} to {progress.step + COMPARED_STEPS:,}"
            # Of slots that are sharded each worker has parts.
            of_worker = self._variables if self._job.is_chief else sharded(self._variables)
            values = snapshot(of_worker, self._replicas)
            if self._child:
                self._record(steps, ReplicaVerdict(None, reason=f"that of steps {self._compared} still ran"))
            elif self._job.is_chief:
                epoch = progress.step // progress.steps_per_epoch
                manifest = {"step": progress.step, "state": {"epoch": epoch}}
                self._child, self._compared = ReplicaCheck(self._job.command[3:], values, manifest), steps
                self._record(steps, _STARTED)

    def _record(self, steps: str, verdict: ReplicaVerdict) -> None:
        """Keeps the outcome in run.json, and in result.json when that is written next."""
        if self._job.is_chief:
            self._job.result.replica_checks[steps] = verdict.outcome
            self._job.job_dir.add_to_run_info(replica_checks=self._job.result.replica_checks)
