"""Chooses, before the first step that counts, whether XLA compiles a run's steps: where nobody says, by measuring.

docs/decisions/9-xla.md has the reasons and what was measured.
"""

import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import keras

from trainer.base.log import log
from trainer.base.run_files.records import number
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import Replicas
from trainer.invariance.compat import all_layers
from trainer.invariance.step import NotCompilable
from trainer.training.preemption import Interrupted
from trainer.training.state import put_back, snapshot, variables_of
from trainer.training.steps import StepRunner
from trainer.user_code.interface import ModelInterface
from trainer.user_code.mistakes import message_of

FEWEST_STEPS = 100  # a shorter run is not worth the three steps of a measurement
EARNED = 10  # a run is tried if its plain steps take this many times as long as compiling is expected to
TURNS, TURN_SECONDS = 3, 0.5
_SECONDS_AN_OPERATION, _LEAST_SECONDS = 0.01, 2.0  # of compiling; docs/decisions/9-xla.md


@dataclass(frozen=True)
class XlaChoice:
    """Holds whether XLA compiles a run's steps, why, and what was measured."""

    compiled: bool
    why: str
    plain_step_seconds: float | None = None
    compiled_step_seconds: float | None = None
    compile_seconds: float | None = None  # of tracing and compiling

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "XlaChoice | None":
        """Returns the choice that `asdict` wrote; None if there is none, or the content is damaged."""
        compiled, why = content.get("compiled"), content.get("why")
        if not isinstance(compiled, bool) or not isinstance(why, str):
            return None
        measured = ("plain_step_seconds", "compiled_step_seconds", "compile_seconds")
        return cls(compiled, why, *(number(content.get(name)) for name in measured))

    def sentence(self) -> str:
        """Describes the choice for the log."""
        way = "XLA compiles the steps" if self.compiled else "the steps run plain"
        return f"{way}: {self.why}"


class TimedSteps:
    """Runs steps that do not count: on leaving, the variables have the values that they had before.

    `make`: returns a runner, compiled or not; `rows`: returns an iterator for it, from `first_step` on; `check`: called
    after each call to the device, raises if the trial must end.
    """

    def __init__(
        self,
        model: keras.Model,
        replicas: Replicas,
        make: Callable[[bool], StepRunner],
        rows: Callable[[], Any],
        first_step: int,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.replicas = model, replicas
        self._make, self._rows, self._first_step, self._check, self._clock = make, rows, first_step, check, clock
        self._runners: dict[bool, StepRunner] = {}

    def __enter__(self) -> "TimedSteps":
        self._variables = variables_of(self.model)
        self._before, self.rows = snapshot(self._variables), self._rows()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        put_back(self._variables, self._before, self.replicas)
        del self.rows, self._before

    def runner(self, compiled: bool) -> StepRunner:
        """Returns the runner of plain or of compiled steps: the same one at each call, which is traced once."""
        if compiled not in self._runners:
            self._runners[compiled] = self._make(compiled)
        return self._runners[compiled]

    def seconds(self, compiled: bool, count: int) -> float:
        """Runs `count` steps; returns how long they took."""
        began = self._clock()
        self.runner(compiled)(self.rows, self._first_step, count)
        taken = self._clock() - began
        self._check()
        return taken


def choose(
    config: TrainConfig, trial: TimedSteps, steps_left: int, earlier: XlaChoice | None = None, why_plain: str = ""
) -> XlaChoice:
    """Returns how to run the steps, and logs a choice that was measured, or is not what was asked for.

    earlier: the choice of this run before it was resumed, which it keeps; why_plain: how compiled steps failed before.
    """
    if config.jit_compile == "false":
        return XlaChoice(False, "jit_compile=false")
    choice = XlaChoice(True, "jit_compile=true") if config.jit_compile == "true" else earlier
    if reason := barrier(config, trial.replicas.devices, trial.replicas.cluster) or why_plain:
        return _plain(trial, reason) if choice and choice.compiled else XlaChoice(False, reason)
    if choice:
        with trial:
            return _if_possible(choice, trial)
    if why := _not_tried(config, trial, steps_left):
        return XlaChoice(False, why)
    with trial:
        return _measured(trial, steps_left)


def barrier(config: TrainConfig, devices: Sequence[str], cluster: Cluster) -> str:
    """Returns why no step on these devices of each worker can be compiled as a whole, "" if it may be."""
    replicas = len(devices) * cluster.workers
    if config.remat:
        return f"XLA may keep what remat={config.remat} computes again"
    if cluster.several:
        return "XLA cannot sum over several machines"
    if config.virtual_replicas:
        return f"XLA would add the gradients of virtual_replicas={config.virtual_replicas} in another order"
    if config.micro_batches > 1:
        return f"XLA would keep all of micro_batches={config.micro_batches} in memory at once"
    if config.shard_optimizer and replicas > 1:
        return "XLA has no variables that live within a step, which shard_optimizer needs"
    return "XLA cannot sum over CPUs" if replicas > 1 and not devices[0].startswith("GPU") else ""


def _plain(trial: TimedSteps, why: str) -> XlaChoice:
    """Returns the choice where XLA was asked for and cannot be used, and logs it."""
    choice = XlaChoice(False, why)
    rest = "; only gradients are compiled" if ModelInterface.of(trial.model).compiles_gradients else ""
    log.warning(f"jit_compile: {choice.sentence()}{rest}")
    return choice


def _if_possible(choice: XlaChoice, trial: TimedSteps) -> XlaChoice:
    """Returns `choice`, or a plain one if it is to compile and XLA fails: tried with a step that does not count."""
    if not choice.compiled:
        return choice
    seconds, why_not = compiled_step(trial)
    if why_not:
        return _plain(trial, why_not)
    log.info(f"jit_compile: {choice.sentence()}; it took {seconds:.0f} s")
    return choice


def compiled_step(trial: TimedSteps) -> tuple[float, str]:
    """Runs a compiled step. Returns how long it took, in seconds, and why XLA cannot compile it, "" if it can."""
    try:
        return trial.seconds(True, 1), ""
    except Interrupted:
        raise
    except Exception as error:
        text = message_of(error)
        if isinstance(error, NotCompilable):
            return 0.0, text.removeprefix("NotCompilable: ")
        unknown = re.search(r"Detected unsupported operations[^:]* on XLA_\w+: (\w+)", str(error))
        return 0.0, f"XLA has no kernel for {unknown[1]}" if unknown else f"XLA fails: {text}"


def _not_tried(config: TrainConfig, trial: TimedSteps, steps_left: int) -> str:
    """Returns why a run with jit_compile=auto does not measure, "" if it may be worth it."""
    on_gpus = trial.replicas.devices[0].startswith("GPU")
    if on_gpus and trial.replicas.count > 1:
        return "on several GPUs nobody has run XLA's sums, and one that hangs cannot be ended: --jit_compile tries it"
    if config.deterministic:
        return "deterministic=true"
    layers = [layer.name for layer in all_layers(trial.model) if _is_grouped(layer)]
    if layers and not on_gpus:
        return f"XLA is slow on CPUs for convolutions by groups or by depth, as in {layers[0]}"
    return f"{steps_left} steps are too few to try" if steps_left < FEWEST_STEPS else ""


def _is_grouped(layer: keras.layers.Layer) -> bool:
    names = ("DepthwiseConv1D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D")
    return isinstance(layer, tuple(getattr(keras.layers, name) for name in names)) or getattr(layer, "groups", 1) > 1


def _measured(trial: TimedSteps, steps_left: int) -> XlaChoice:
    """Returns the faster way by both step times, in turn; plain if the run is too short to earn the trial."""
    trial.seconds(False, 1)  # traces
    step = statistics.median(trial.seconds(False, 1) for _ in range(3))
    expected = max(_LEAST_SECONDS, _SECONDS_AN_OPERATION * trial.runner(False).size(trial.rows))
    if step * steps_left < EARNED * expected:
        return XlaChoice(False, f"a run of some {step * steps_left:.0f} s is too short to compile for", step)
    log.info(f"jit_compile=auto: compiles the step, in some {expected:.0f} s, to compare both ways")
    choice = _faster(trial, max(1, round(TURN_SECONDS / max(step, 1e-9))))
    log.info(f"jit_compile=auto: {choice.sentence()}")
    return choice


def _faster(trial: TimedSteps, count: int) -> XlaChoice:
    """Measures both ways in turns of `count` steps."""
    compile_seconds, why_not = compiled_step(trial)
    if why_not:
        return XlaChoice(False, why_not)
    turns = [[trial.seconds(way, count) / count for way in (False, True)] for _ in range(TURNS)]
    plain, compiled = (statistics.median(times) for times in zip(*turns, strict=True))
    why = f"a step takes {plain:.3g} s plain, {compiled:.3g} s compiled ({compile_seconds:.0f} s to compile)"
    return XlaChoice(compiled < plain, why, plain, compiled, compile_seconds)
