"""Tests that XLA compiles whole steps with the same numbers, and that jit_compile=auto keeps the faster way."""

import dataclasses
import json
import os
import pkgutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.trainer_loop import fresh_collectives, setup_of
from tests.fixtures import Log, Make, Patch
from tests.support import Signals, largest_difference, permute_rows, run_job, weights
from trainer.base.errors import INTERRUPTED
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import Replicas
from trainer.data.dataset import Dataset
from trainer.invariance.step import NotCompilable
from trainer.reporting.progress import StepLogs
from trainer.run import job
from trainer.run.training_run import TrainingRun
from trainer.training.steps import StepRunner
from trainer.training.xla_choice import TimedSteps, XlaChoice, choose

STEPS = 3
GANS = ("--image_size=16", "--width=8", "--latent_dim=8", "--global_batch_size=16")
FAMILIES = {
    "mlp": ("--model=mlp", "--dropout=0.3", "--augment=flip,crop", *GANS[:2], "--global_batch_size=16"),
    "cnn": ("--model=cnn", "--dropout=0.3", "--width=4", "--image_size=24", "--global_batch_size=8"),
    "dcgan": ("--model=dcgan", *GANS),
    "wgan_gp": ("--model=wgan_gp", *GANS, "--critic_steps=2"),
    "r3gan": ("--model=r3gan", *GANS, "--diff_augment=color,translation,cutout"),
    "conditional": ("--model=wgan_gp", "--conditional", *GANS, "--critic_steps=2"),
    "embedding": (f"--model={__name__}:embedded", *GANS[:1], "--global_batch_size=8"),
    "stock": ("--model=tests.models:stock_layers", *GANS[:1], "--global_batch_size=8"),
}  # fmt: skip
SLOW = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "dcgan", "wgan_gp", "r3gan", "conditional", "stock")
]


def trained(compiled: bool, *flags: str, steps: int = STEPS) -> tuple[dict[str, Any], StepLogs]:
    setup = setup_of("--data=digits", *flags)
    logs = setup.step_runner(compiled=compiled)(setup.rows_from(0), 0, steps)
    return weights(setup.model), logs


@pytest.mark.parametrize("name", ["mlp", "embedding", *SLOW])
def test_in_float64_a_compiled_step_agrees_to_1e_10(name: str) -> None:
    (plain, logs), (compiled, others) = (trained(way, *FAMILIES[name], "--precision=float64") for way in (False, True))
    assert largest_difference(plain, compiled, 1e-6) < 1e-10
    assert np.abs(logs.values - others.values).max() < 1e-10


@pytest.mark.slow
def test_in_float32_it_differs_by_rounding_alone(monkeypatch: Patch) -> None:
    flags = [flag for flag in FAMILIES["mlp"] if not flag.startswith("--augment")]
    (plain, _), (compiled, _) = (trained(way, *flags, steps=20) for way in (False, True))
    controls = []
    for seed in (7, 8, 9):
        with monkeypatch.context() as patch:
            permute_rows(patch, 16, seed)
            controls.append(largest_difference(plain, trained(False, *flags, steps=20)[0]))
    assert largest_difference(plain, compiled) <= 3 * max(controls)


def embedded(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Takes the pixels for words of a large vocabulary, whose gradients have the rows of those that occur alone."""
    words = [keras.layers.Flatten(), keras.layers.Embedding(50_000, 4), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input(dataset.image_shape), *words, keras.layers.Dense(10)])
    model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Mixing(keras.layers.Layer):
    """Draws in a way that XLA must not: `how` names one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seed = how, keras.random.SeedGenerator(0)

    def call(self, values: Any) -> Any:
        if self.how == "in a loop":
            return tf.while_loop(lambda i, x: i < 2, self._looped, (0, values))[1]
        if self.how == "by TensorFlow":
            return values + tf.random.normal(tf.shape(values)) + tf.random.stateless_normal((1,), (1, 2))
        return tf.unique_with_counts(tf.reshape(values, (-1,)))[0][0] + values

    def _looped(self, i: Any, values: Any) -> Any:
        return i + 1, values + keras.random.normal((1,), seed=self.seed)


def mixing(config: TrainConfig, dataset: Dataset, *, how: str = "in a loop") -> keras.Model:
    layers = [keras.layers.Flatten(), Mixing(how), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input(dataset.image_shape), *layers])
    model.compile("adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(("flags", "why"), [
    (["--how=in a loop"], "draws random numbers inside a loop"),
    (["--how=by TensorFlow"], "its train_step draws random numbers by RandomStandardNormal, StatelessRandom"),
    (["--how=without a kernel"], "XLA has no kernel for UniqueWithCounts"),
    (["--model=tests.own_data:bag_of_words", "--data=tests.own_data:sentences"], "its data hold text, which XLA"),
])  # fmt: skip
def test_what_xla_cannot_or_must_not_compile_runs_plain(flags: list[str], why: str, caplog: Log) -> None:
    common = ["--data=digits", "--image_size=16", "--global_batch_size=8", "--jit_compile"]
    setup = setup_of(f"--model={__name__}:mixing", *common, *flags)
    before = weights(setup.model)
    trial = setup.timed_steps(0)
    choice = choose(setup.config, trial, 10)
    assert not choice.compiled
    assert why in choice.why
    assert f"jit_compile: the steps run plain: {choice.why}" in caplog.text
    assert largest_difference(before, weights(setup.model)) == 0
    trial.runner(False)(setup.rows_from(0), 0, 1)


def converted(function: Any) -> str:
    """Returns the HLO that XLA makes of a traced function: of its arguments only the shapes matter."""
    captured = function.captured_inputs
    given = [*function.inputs[: -len(captured)], *captured]
    values = [one if one.dtype == tf.resource else tf.zeros(one.shape, one.dtype) for one in given]

    def call(*numbers: Any) -> Any:
        left = iter(numbers)
        flat = [one if one.dtype == tf.resource else next(left) for one in values]
        return function._inference_function.call_flat(*flat)

    compiled = tf.function(call, jit_compile=True, autograph=False)
    hlo = compiled.experimental_get_compiler_ir(*(one for one in values if one.dtype != tf.resource))(stage="hlo")
    return str(hlo)


@pytest.mark.parametrize("name", ["mlp", pytest.param("wgan_gp", marks=pytest.mark.slow)])
def test_on_gpus_sums_are_inside_what_xla_compiles(name: str, monkeypatch: Patch) -> None:
    """A trace test: two CPUs that TensorFlow takes for GPUs, which sum by NCCL. XLA converts the step; nothing runs it.

    Whether it runs is not proved.
    """
    setup = setup_of("--data=digits", *FAMILIES[name], "--replicas=2")
    arguments = setup.rows_from(0), tf.constant(0, tf.int64), tf.constant(1)
    with monkeypatch.context() as patch:
        for module in ("mirrored_run", "mirrored_strategy"):
            path = f"tensorflow.python.distribute.{module}"
            patch.setattr(pkgutil.resolve_name(path), "_is_gpu_device", lambda device: True)
        sums_of = pkgutil.resolve_name("tensorflow.python.ops.collective_ops")
        by_nccl = partial(sums_of.all_reduce_v2, communication_hint="NCCL")
        patch.setattr(sums_of, "all_reduce_v2", lambda *given, communication_hint, **named: by_nccl(*given, **named))
        made, function = list[Any](), tf.function

        def noting(of: Any = None, **options: Any) -> Any:
            made.append(function(of, **options))
            return made[-1]

        patch.setattr(tf, "function", noting)
        graph = setup.step_runner(compiled=True)._run.get_concrete_function(*arguments).graph.as_graph_def()
    steps = [step for each in made if each.__name__ == "whole_step" for step in each._list_all_concrete_functions()]
    sums = [Counter(op.type for op in each.graph.get_operations())["CollectiveReduceV2"] for each in steps]
    outside = Counter(node.op for function in graph.library.function for node in function.node_def)
    plain = setup.step_runner()._run.get_concrete_function(*arguments).graph.as_graph_def()
    expected = Counter(node.op for function in plain.library.function for node in function.node_def)
    assert len(sums) == 2
    assert sums[0] == sums[1] > 0
    assert sum(sums) == outside["CollectiveReduceV2"] == expected["CollectiveReduceV2"]
    assert converted(steps[0]).count(" all-reduce(") == sums[0]


class Clock:
    """Stands for the device too: its steps take planted seconds of a clock that only they move."""

    def __init__(self, plain: float, compiled: float, fails: str = "", operations: int = 100) -> None:
        self.now, self.step_seconds, self.fails, self.operations = (
            0.0,
            {False: plain, True: compiled},
            fails,
            operations,
        )
        self.calls: list[tuple[bool, int]] = []

    def __call__(self) -> float:
        return self.now

    def runner(self, compiled: bool) -> Any:
        return PlantedRunner(self, compiled)


@dataclasses.dataclass
class PlantedRunner:
    clock: Clock
    compiled: bool

    def __call__(self, rows: Any, first: int, count: int) -> None:
        self.clock.calls.append((self.compiled, count))
        if self.compiled and self.clock.fails:
            raise NotCompilable(self.clock.fails)
        self.clock.now += self.clock.step_seconds[self.compiled] * count

    def size(self, rows: Any) -> int:
        return self.clock.operations


def planted(clock: Clock, devices: tuple[str, ...] = ("CPU:0",), **of_replicas: Any) -> TimedSteps:
    replicas = Replicas(tf.distribute.get_strategy(), devices, 8, 8, **of_replicas)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return TimedSteps(model, replicas, clock.runner, lambda: None, 0, clock=clock)


@pytest.fixture
def auto() -> TrainConfig:
    return TrainConfig()


@pytest.mark.parametrize(("plain", "compiled", "faster"), [(0.2, 0.1, True), (0.1, 0.2, False), (0.1, 0.1, False)])
def test_auto_keeps_the_faster_way(plain: float, compiled: float, faster: bool, auto: TrainConfig) -> None:
    clock = Clock(plain, compiled)
    choice = choose(auto, planted(clock), 1000)
    assert (choice.compiled, choice.plain_step_seconds, choice.compiled_step_seconds) == (
        faster, pytest.approx(plain), pytest.approx(compiled)
    )  # fmt: skip
    assert f"a step takes {plain:.3g} s plain, {compiled:.3g} s compiled" in choice.sentence()
    turns = [way for way, _ in clock.calls[-6:]]
    assert turns == [False, True] * 3


@pytest.mark.parametrize(("seconds", "steps", "operations", "tried"), [
    (0.1, 199, 1, False), (0.1, 200, 1, True), (1.0, 99, 1, False), (0.1, 999, 1000, False), (0.1, 1000, 1000, True),
])  # fmt: skip
def test_a_run_too_short_to_earn_it_is_not_tried(
    seconds: float, steps: int, operations: int, tried: bool, auto: TrainConfig
) -> None:
    clock = Clock(seconds, seconds / 2, operations=operations)
    assert choose(auto, planted(clock), steps).compiled is tried
    assert any(way for way, _ in clock.calls) is tried
    assert steps >= 100 or clock.calls == []


@pytest.mark.parametrize(("devices", "of_replicas", "why"), [
    (("GPU:0", "GPU:1"), {}, "on several GPUs nobody has run XLA's sums"),
    (("CPU:0", "CPU:1"), {}, "XLA cannot sum over CPUs"),
    (("GPU:0",), {"cluster": Cluster(("one:1", "other:1"), 1)}, "XLA cannot sum over several machines"),
])  # fmt: skip
def test_auto_is_plain_on_several_gpus_and_where_xla_cannot_sum(
    devices: tuple[str, ...], of_replicas: dict[str, Any], why: str, auto: TrainConfig
) -> None:
    clock = Clock(1.0, 0.1)
    choice = choose(auto, planted(clock, devices, **of_replicas), 1000)
    assert (choice.compiled, clock.calls) == (False, [])
    assert why in choice.why
    forced = choose(dataclasses.replace(auto, jit_compile="true"), planted(clock, devices, **of_replicas), 1000)
    assert forced.compiled is (devices == ("GPU:0", "GPU:1"))


def test_what_failed_in_a_process_of_its_own_is_not_tried_again(auto: TrainConfig, caplog: Log) -> None:
    told, clock = dataclasses.replace(auto, jit_compile="true"), Clock(1.0, 0.1)
    choice = choose(told, planted(clock, ("GPU:0", "GPU:1")), 1000, why_plain="it did not end within 900 s")
    assert (choice, clock.calls) == (XlaChoice(False, "it did not end within 900 s"), [])
    assert "jit_compile: the steps run plain: it did not end within 900 s" in caplog.text


def test_what_is_computed_again_or_added_in_one_order_runs_plain(auto: TrainConfig) -> None:
    told, clock = dataclasses.replace(auto, jit_compile="true"), Clock(1.0, 0.1)
    again = choose(dataclasses.replace(told, remat="blocks"), planted(clock), 1000)
    assert again == XlaChoice(False, "XLA may keep what remat=blocks computes again")
    sharded = choose(dataclasses.replace(told, shard_optimizer=True), planted(clock, ("GPU:0", "GPU:1")), 1000)
    assert sharded == XlaChoice(False, "XLA has no variables that live within a step, which shard_optimizer needs")
    cut = choose(dataclasses.replace(told, virtual_replicas=4), planted(clock), 1000)
    assert cut == XlaChoice(False, "XLA would add the gradients of virtual_replicas=4 in another order")
    assert clock.calls == []


def test_auto_measures_on_one_gpu(auto: TrainConfig) -> None:
    """Convolutions by depth, which are slow on CPUs, are measured too."""
    for plain, compiled in ((0.1, 1.0), (1.0, 0.1)):
        trial = planted(Clock(plain, compiled), ("GPU:0",))
        trial.model = keras.Sequential([keras.Input((8, 8, 2)), keras.layers.SeparableConv2D(2, 3)])
        assert choose(auto, trial, 1000).compiled is (compiled < plain)


def test_convolutions_by_depth_and_deterministic_runs_are_not_tried(auto: TrainConfig) -> None:
    clock = Clock(1.0, 0.1)
    trial = planted(clock)
    assert "deterministic" in choose(dataclasses.replace(auto, deterministic=True), trial, 1000).why
    for layer in (keras.layers.SeparableConv2D(2, 3), keras.layers.Conv2D(2, 3, groups=2)):
        trial.model = keras.Sequential([keras.Input((8, 8, 2)), layer])
        assert f"convolutions by groups or by depth, as in {layer.name}" in choose(auto, trial, 1000).why
    assert clock.calls == []


def test_it_says_why_it_could_not_compile(auto: TrainConfig) -> None:
    assert choose(auto, planted(Clock(1.0, 0.1, fails="dropout draws")), 1000) == XlaChoice(False, "dropout draws")


def test_a_resumed_run_keeps_its_way_unless_told_otherwise(auto: TrainConfig) -> None:
    clock, before = Clock(0.1, 1.0), XlaChoice(True, "faster")
    assert choose(auto, planted(clock), 1000, before) == before
    assert choose(auto, planted(clock), 1000, XlaChoice(False, "slower")) == XlaChoice(False, "slower")
    assert choose(dataclasses.replace(auto, jit_compile="false"), planted(clock), 1000, before).compiled is False
    assert XlaChoice.read(json.loads(json.dumps(dataclasses.asdict(before)))) == before
    for damaged in ({}, {"compiled": "yes", "why": ""}, {"compiled": True}):
        assert XlaChoice.read(damaged) is None


@pytest.fixture
def compiled_is_faster(monkeypatch: Patch) -> list[bool]:
    """Makes auto choose XLA in a short run; the list has the way of each call of a trial."""
    calls: list[bool] = []

    def seconds(self: TimedSteps, compiled: bool, count: int) -> float:
        calls.append(compiled)
        self.runner(compiled)(self.rows, 0, 1)
        self._check()
        return (50.0 if compiled else 100.0) * count

    monkeypatch.setattr(TimedSteps, "seconds", seconds)
    return calls


def run_info(config: TrainConfig) -> dict[str, Any]:
    return json.loads((Path(config.job_dir) / "run.json").read_text())


@pytest.mark.slow
def test_killed_equals_never_killed_and_a_trial_leaves_no_trace(
    small_config: Make, tmp_path: Path, compiled_is_faster: list[bool], monkeypatch: Patch
) -> None:
    """A run that auto compiles, killed once it has chosen and once later, against one that was told to compile."""
    final: dict[str, dict[str, Any]] = {}
    train, stops = TrainingRun.train, iter([0, 100])

    class Killed(BaseException):
        pass

    def keep(self: TrainingRun, *given: Any) -> Any:
        control = train(self, *given)
        final[self.job.config.job_dir] = weights(self.setup.model)
        return control

    call = StepRunner.__call__

    def killed(self: StepRunner, iterator: Any, first: int, count: int) -> StepLogs:
        if "choice" in made and first == stop_at[0]:
            stop_at[0] = next(stops, -1)
            raise Killed
        return call(self, iterator, first, count)

    flags = ("--model=mlp", "--image_size=16", "--steps=120", "--checkpoint_every_steps=50", "--dropout=0.3")
    told = small_config(*flags, "--jit_compile", f"--job_dir={tmp_path}/told")
    auto = small_config(*flags, f"--job_dir={tmp_path}/auto")
    monkeypatch.setattr(TrainingRun, "train", keep)
    run_job(told)
    compiled_is_faster.clear()
    made: set[str] = set()
    stop_at = [next(stops)]
    chosen = TrainingRun._chosen_steps

    def choosing(self: TrainingRun, *given: Any) -> Any:
        made.clear()
        runner = chosen(self, *given)
        made.add("choice")
        return runner

    monkeypatch.setattr(TrainingRun, "_chosen_steps", choosing)
    monkeypatch.setattr(StepRunner, "__call__", killed)
    tried = []
    for _ in range(2):
        with pytest.raises(Killed):
            run_job(auto)
        tried.append(len(compiled_is_faster))
        assert run_info(auto)["compilation"]["compiled"] is True
    run_job(auto)
    assert tried == [11, 12]  # 4 plain, 1 compiled and 3 turns; then one compiled step a start
    assert len(compiled_is_faster) == 13
    assert run_info(auto)["compilation"]["plain_step_seconds"] == 100.0
    assert largest_difference(final[told.job_dir], final[auto.job_dir]) == 0


def test_a_signal_while_it_compiles_saves_and_the_next_start_chooses(
    small_config: Make, compiled_is_faster: list[bool], monkeypatch: Patch
) -> None:
    signals, trial = Signals(monkeypatch), TimedSteps.seconds

    def signalled(self: TimedSteps, compiled: bool, count: int) -> float:
        if compiled:
            signals.come()
        return trial(self, compiled, count)

    config = small_config("--model=mlp", "--image_size=16", "--steps=120")
    with monkeypatch.context() as patch:
        patch.setattr(TimedSteps, "seconds", signalled)
        fresh_collectives()
        assert job.run(config, [], 0.0) == INTERRUPTED
    assert run_info(config)["compilation"] == {}
    assert json.loads((Path(config.job_dir) / "result.json").read_text())["steps"] == 0
    run_job(config)
    assert run_info(config)["compilation"]["compiled"] is True


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    *(["wgan_gp_digits", f"--critic_steps={count}"] for count in (2, 5)),
    ["wgan_gp_digits", "--critic_steps=3", "--conditional=false"], ["cnn_mnist", "--data=digits"],
    ["wgan_gp_digits", "--model=r3gan"], ["wgan_gp_digits", "--model=dcgan"],
])  # fmt: skip
def test_xla_compiles_once(flags: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.training.compiled_steps", str(tmp_path), *flags],
        env={**os.environ, "XLA_FLAGS": f"--xla_dump_to={tmp_path}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, last = map(int, done.stdout.split()[-2:])
    assert first == last > 0
