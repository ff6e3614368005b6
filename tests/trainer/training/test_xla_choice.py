"""Tests that XLA compiles whole steps with the same numbers, and by which rule jit_compile=auto
does."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.trainer_loop import setup_of
from tests.fixtures import Log, Make, Patch
from tests.support import classifier_of, largest_difference, run_job, weights
from trainer.base.settings import xla_rule
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import Replicas
from trainer.data.dataset import Dataset
from trainer.invariance.internals import parse_profile
from trainer.reporting.progress import StepLogs
from trainer.run import step_program, training_setup
from trainer.run.step_program import MOST_BYTES, gains_by_loop, steps_per_program
from trainer.training import xla_choice
from trainer.training.checkpoint import (
    assign_values,
    checkpoint_folders,
    read_checkpoint,
    snapshot,
    variables_of,
)
from trainer.training.step_profile import OPTIONS
from trainer.training.xla_choice import XlaChoice, choose, failure_of

STEPS = 3
GANS = ("--image_size=16", "--width=8", "--latent_dim=8", "--global_batch_size=16")
FAMILIES = {
    "mlp": (
        "--model=mlp",
        "--dropout=0.3",
        "--augment=flip,crop",
        *GANS[:2],
        "--global_batch_size=16",
    ),
    "cnn": (
        "--model=cnn",
        "--dropout=0.3",
        "--width=4",
        "--image_size=24",
        "--global_batch_size=8",
    ),
    "wgan_gp": ("--model=wgan_gp", *GANS, "--critic_steps=2"),
    "r3gan": ("--model=r3gan", *GANS, "--diff_augment=color,translation,cutout"),
    "embedding": (f"--model={__name__}:embedded", *GANS[:1], "--global_batch_size=8"),
    "stock": ("--model=tests.models:stock_layers", *GANS[:1], "--global_batch_size=8"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("cnn", "wgan_gp", "r3gan", "stock")]


def trained(compiled: bool, *flags: str, steps: int = STEPS) -> tuple[dict[str, Any], StepLogs]:
    setup = setup_of("--data=digits", *flags)
    logs = setup.step_runner(compiled=compiled)(setup.rows_from(0), 0, steps)
    return weights(setup.model), logs


@pytest.mark.parametrize("name", ["mlp", "embedding", *SLOW])
def test_in_float64_a_compiled_step_agrees_to_1e_10(name: str) -> None:
    (plain, logs), (compiled, others) = (
        trained(way, *FAMILIES[name], "--precision=float64") for way in (False, True)
    )
    assert largest_difference(plain, compiled, 1e-6) < 1e-10
    assert np.abs(logs.values - others.values).max() < 1e-10


HELD_BACK = ["--evaluation_fraction=0.25"]
TABLE = ("--data=tests.own_data:arrays", "--global_batch_size=16", "--learning_rate=0.01")
LOOPED = {
    "table": ("--model=tests.own_data:regression", *TABLE),
    "mlp": ("--data=digits", *FAMILIES["mlp"]),
    "weighted": (
        "--model=tests.own_data:regression",
        "--data=tests.own_data:weighted",
        *TABLE[1:],
        *HELD_BACK,
    ),
    "embedding": ("--data=digits", *FAMILIES["embedding"]),
    "clipped": (
        "--data=digits",
        "--image_size=8",
        "--global_batch_size=8",
        f"--model={__name__}:clipped",
    ),
    "masks": (
        "--model=tests.own_data:masked_text",
        "--data=tests.own_data:next_tokens",
        *TABLE[1:],
    ),
}
TRANSFORMER = (
    f"--model={__name__}:transformer",
    "--data=digits",
    "--image_size=8",
    "--global_batch_size=8",
)
CUT = {
    **LOOPED,
    "transformer": TRANSFORMER,
    "scaled": (*TRANSFORMER, "--scaled"),
    "wgan_gp": ("--data=digits", *FAMILIES["wgan_gp"]),
}


def looped(
    steps: int, calls: Sequence[int], *flags: str, killed_at: int = 0, then: Sequence[str] = ()
) -> tuple[list[Any], list[Any]]:
    """Returns all variables after these calls, and the scalars of the steps that are no Keras
    metric.

    `killed_at`: a step at which another process goes on, from the variables alone, perhaps with
        other flags.
    """
    setup = setup_of(*flags)
    done = 0
    values = []
    runner = setup.step_runner(compiled=True, steps_per_program=steps)
    rows = setup.rows_from(0, steps)
    for count in calls:
        if done == killed_at > 0:
            before = snapshot(variables_of(setup.model))
            setup = setup_of(*flags, *then)
            assign_values(variables_of(setup.model), before, setup.replicas)
            runner = setup.step_runner(compiled=True, steps_per_program=steps)
            rows = setup.rows_from(done, steps)
        logs = runner(rows, done, count)
        done = done + count
        values += logs.values[:, [name == "loss" for name in logs.names]].tolist()
    return [*snapshot(variables_of(setup.model)).values()], values if calls == (60,) else []


@pytest.mark.parametrize(
    "name",
    [
        "table",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("mlp", "weighted", "embedding", "clipped")
        ),
    ],
)
def test_a_loop_within_a_program_has_the_bits_of_one_step_a_program(
    name: str, monkeypatch: Patch, caplog: Log
) -> None:
    """However the steps fall into programs and calls, and where a run is killed and resumed.

    Where a program gets numbers of rows, as on a GPU that can hold all data, too: its memory is
    planted.
    """
    expected, losses = looped(1, (60,), *LOOPED[name])
    for steps, calls, killed_at in ((50, (60,), 0), (7, (1, 2, 4, 24, 29), 31)):
        monkeypatch.setattr(
            training_setup, "free_memory", lambda device, many=steps == 7: 2**40 * many
        )
        variables, values = looped(steps, calls, *LOOPED[name], killed_at=killed_at)
        assert all(map(np.array_equal, expected, variables)), (steps, calls)
        assert not values or values == losses
        assert ("CPU:0 holds all" in caplog.text) is (steps == 7)


@pytest.mark.parametrize(("name", "draws", "flops"), [("mlp", 2, 144_896), ("table", 0, 2_816)])
def test_few_operations_are_started_for_each_step_of_a_program(
    name: str, draws: int, flops: int, tmp_path: Path
) -> None:
    """Counts what TensorFlow's executor ran, from its trace, and the FLOPs of a step.

    Dropout draws outside of XLA. FLOPs are those of the forward pass, of gradients by weights, and
    by the inputs of all layers but the first.
    """
    setup = setup_of(*LOOPED[name], *(["--augment="] if name == "mlp" else []))
    runner = setup.step_runner(compiled=True, steps_per_program=50)
    rows = setup.rows_from(0, 50)
    runner(rows, 0, 1)
    with tf.profiler.experimental.Profile(str(tmp_path), OPTIONS):
        runner(rows, 50, 50)
    (file,) = tmp_path.rglob("*.xplane.pb")
    names = [
        plane.event_metadata[event.metadata_id].name
        for plane in parse_profile(file.read_bytes()).planes
        for line in plane.lines
        for event in line.events
    ]
    started = [name for name in names if re.match(r"[\w/]+:[A-Z]\w+(#|$)", name)]
    assert 50 < len(started) <= 50 * (5 + 4 * draws)
    assert runner.flops == flops


def clipped(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Clips by the norm of all gradients, and keeps averages, by an optimizer without an operation
    of TensorFlow."""
    optimizer = keras.optimizers.Nadam(1e-2, global_clipnorm=0.1, use_ema=True)
    return classifier_of(dataset.image_shape, keras.layers.Flatten(), optimizer=optimizer)


def transformer(config: TrainConfig, dataset: Dataset, *, scaled: bool = False) -> keras.Model:
    """Takes the pixels for words. scaled: with loss scaling, of which the factor grows."""
    pixels = keras.Input(dataset.image_shape)
    words = keras.layers.Embedding(256, 4)(keras.layers.Flatten()(pixels))
    attended = words + keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(words, words)
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(attended))
    model = keras.Model(pixels, keras.layers.Dense(10)(mean))
    optimizer = keras.optimizers.Adam(1e-2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=1024.0, dynamic_growth_steps=3
        )
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("table", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("mlp", 4),
                ("embedding", 2),
                ("transformer", 2),
                ("scaled", 2),
                ("wgan_gp", 2),
            )
        ),
    ],
)
def test_on_several_replicas_a_step_is_cut_into_programs_and_agrees_with_one_replica(
    name: str, replicas: int
) -> None:
    """Killed there, and resumed on another number of replicas. Of a GAN the critic's gradients are
    a program."""
    flags = (*CUT[name], "--precision=float64")
    alone, _ = looped(1, (8,), *flags)
    then = [f"--replicas={replicas // 2}"]
    together, _ = looped(1, (3, 5), *flags, f"--replicas={replicas}", killed_at=3, then=then)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "flags",
    [LOOPED["masks"], ("--data=digits", "--image_size=8", "--model=tests.models:own_batch_norm")],
)
def test_a_step_that_sums_over_replicas_in_its_midst_is_not_cut(flags: Sequence[str]) -> None:
    """A loss that divides by a count of the global batch; batch norm over all rows."""
    setup = setup_of(*flags, "--replicas=2")
    with pytest.raises(Exception, match="it sums over replicas before its update") as caught:
        setup.step_runner(compiled=True)(setup.rows_from(0), 0, 1)
    assert "XLA fails" not in failure_of(caught.value)


def test_how_many_steps_a_program_runs_follows_from_the_step(monkeypatch: Patch) -> None:
    """On a CPU convolutions are never in a loop; a program is small enough, and of short steps."""
    setups = [setup_of("--data=digits", *FAMILIES[name]) for name in ("mlp", "cnn")]
    dense, convolutions = (
        (setup.step_runner(compiled=True), setup.rows_from(0)) for setup in setups
    )
    assert [steps_per_program(*dense, most) for most in (1, 7, 50, 1000)] == [1, 7, 50, 50]
    assert steps_per_program(*convolutions, 50) == 1
    text = setup_of(
        "--model=tests.own_data:bag_of_words",
        "--data=tests.own_data:sentences",
        "--global_batch_size=8",
    )
    assert steps_per_program(text.step_runner(compiled=True), text.rows_from(0), 50) == 1
    monkeypatch.setitem(MOST_BYTES, "CPU", 10 * dense[0].bytes_of_step)
    assert steps_per_program(*dense, 50) == 10
    for name in ("FLOPS_OF_START", "FLOPS_OF_BYTE"):
        monkeypatch.setattr(step_program, name, 0)
    assert steps_per_program(*dense, 50) == 1


def wide(config: TrainConfig, dataset: Dataset, *, units: int = 64) -> keras.Model:
    return classifier_of(dataset.image_shape, keras.layers.Flatten(), keras.layers.Dense(units))


def recurrent(config: TrainConfig, dataset: Dataset) -> keras.Model:
    rows = keras.layers.Reshape((8, 8))
    return classifier_of(dataset.image_shape, rows, keras.layers.GRU(16))


@pytest.mark.parametrize(
    ("model", "flags", "gains"),
    [
        ("mlp", ["--width=32"], True),
        (f"{__name__}:wide", [], True),
        # its products take longer than all else
        (f"{__name__}:wide", ["--units=20000", "--global_batch_size=512"], False),
        (f"{__name__}:recurrent", [], True),  # many kernels, in a loop of known length
        ("cnn", ["--image_size=24", "--width=4"], False),
    ],
)
def test_a_loop_of_xla_gains_where_starts_and_bytes_outweigh_products(
    model: str, flags: list[str], gains: bool
) -> None:
    common = ["--data=digits", "--image_size=8", "--global_batch_size=32"]
    setup = setup_of(f"--model={model}", *common, *flags)
    assert gains_by_loop(setup.step_runner(), setup.rows_from(0)) is gains


def embedded(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Takes the pixels for words of a large vocabulary, whose gradients have the rows of those that
    occur alone."""
    words = [
        keras.layers.Flatten(),
        keras.layers.Embedding(50_000, 4),
        keras.layers.GlobalAveragePooling1D(),
    ]
    return classifier_of(dataset.image_shape, *words)


class Mixing(keras.layers.Layer):
    """Draws in a way that XLA must not: `how` names one."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__(**options)
        self.how = how
        self.seed = keras.random.SeedGenerator(0)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "how": self.how}

    def call(self, values: Any) -> Any:
        if self.how == "in a loop":
            return tf.while_loop(lambda i, x: i < 2, self._looped, (0, values))[1]
        if self.how == "by TensorFlow":
            return (
                values
                + tf.random.normal(tf.shape(values))
                + tf.random.stateless_normal((1,), (1, 2))
            )
        return tf.unique_with_counts(tf.reshape(values, (-1,)))[0][0] + values

    def _looped(self, i: Any, values: Any) -> Any:
        return i + 1, values + keras.random.normal((1,), seed=self.seed)


def mixing(config: TrainConfig, dataset: Dataset, *, how: str = "in a loop") -> keras.Model:
    return classifier_of(dataset.image_shape, keras.layers.Flatten(), Mixing(how))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--how=in a loop"], "draws random numbers inside a loop"),
        (
            ["--how=by TensorFlow"],
            "its train_step draws random numbers by RandomStandardNormal, StatelessRandom",
        ),
        (["--how=without a kernel"], "XLA has no kernel for UniqueWithCounts"),
        (
            ["--model=tests.own_data:bag_of_words", "--data=tests.own_data:sentences"],
            "its data hold text, which XLA",
        ),
    ],
)
def test_what_xla_cannot_or_must_not_compile_runs_plain(flags: list[str], why: str) -> None:
    common = ["--data=digits", "--image_size=16", "--global_batch_size=8", "--jit_compile"]
    setup = setup_of(f"--model={__name__}:mixing", *common, *flags)
    before = weights(setup.model)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        setup.step_runner(compiled=True)(setup.rows_from(0), 0, 1)
    assert why in failure_of(caught.value)
    assert largest_difference(before, weights(setup.model)) == 0
    setup.step_runner()(setup.rows_from(0), 0, 1)


CPU = ("CPU:0",)
GPU = ("GPU:0",)
ONE_MILLION = 1_000_000


def chosen(
    config: TrainConfig | None = None,
    devices: tuple[str, ...] = GPU,
    steps: int = 1000,
    operations: int = 1000,
    earlier: XlaChoice | None = None,
    layer: keras.layers.Layer | None = None,
    gains: bool = False,
    **of_replicas: Any,
) -> XlaChoice:
    """Returns the choice for a model of one layer on devices that need not exist."""
    replicas = Replicas(tf.distribute.get_strategy(), devices, 8, 8, **of_replicas)
    model = keras.Sequential([keras.Input((8, 8, 2)), layer or keras.layers.Dense(1)])
    counts = (lambda: operations), (lambda: gains)
    return choose(config or TrainConfig(), model, replicas, steps, *counts, earlier)


TOLD = TrainConfig(jit_compile="true")
TWO_GPUS = ("GPU:0", "GPU:1")


@pytest.mark.parametrize(
    ("given", "compiled", "why"),
    [
        ({}, True, "on a GPU, in a run of 1,000 steps"),
        ({"devices": CPU}, True, "for which TensorFlow lacks oneDNN"),
        ({"steps": 499, "operations": ONE_MILLION}, False, "are too few"),
        ({"steps": 500, "operations": 1999}, False, "are too few"),
        ({"steps": 500, "operations": 2000}, True, "500 steps"),
        ({"steps": 10_000, "operations": 99}, False, "are too few"),
        ({"steps": 10_000, "operations": 100}, True, "10,000 steps"),
        ({"config": TrainConfig(deterministic=True)}, False, "deterministic"),
        (
            {"layer": keras.layers.Conv2D(2, 3), "devices": CPU},
            False,
            "often slower on CPUs for convolutions, as in conv2d",
        ),
        ({"layer": keras.layers.Conv2D(2, 3)}, True, "on a GPU"),
        (
            {"layer": keras.layers.SeparableConv2D(2, 3), "devices": CPU},
            False,
            "by groups or by depth, as in separable",
        ),
        (
            {"layer": keras.layers.Conv2D(2, 3, groups=2), "devices": CPU},
            False,
            "by groups or by depth, as in conv2d",
        ),
        ({"layer": keras.layers.Conv2D(2, 3, groups=2)}, True, "on a GPU"),
        (
            {"layer": keras.layers.Embedding(70_000, 4), "devices": CPU, "gains": True},
            False,
            "copies large tables on CPUs in each step, as that of embedding",
        ),
        ({"layer": keras.layers.Embedding(70_000, 4)}, True, "on a GPU"),
        ({"devices": CPU}, False, "oneDNN's kernels"),
        ({"devices": CPU, "gains": True}, True, "on this processor, with small kernels"),
        ({"devices": CPU, "gains": True, "steps": 499}, False, "499 steps are too few"),
        (
            {"config": TrainConfig(jit_compile="true", virtual_replicas=4)},
            False,
            "XLA would add the gradients of virtual_replicas=4 in another order",
        ),
    ],
)
def test_the_rule(given: dict[str, Any], compiled: bool, why: str, monkeypatch: Patch) -> None:
    """Of work, devices, settings and models; a processor is planted, with oneDNN where that is the
    reason."""
    monkeypatch.setattr(
        xla_choice, "uses_onednn", lambda: "gains" in given or why == "oneDNN's kernels"
    )
    choice = chosen(**given)
    assert choice.compiled is compiled
    assert why in choice.why


@pytest.mark.parametrize(
    ("devices", "of_replicas"),
    [
        (TWO_GPUS, {}),
        (("CPU:0", "CPU:1"), {}),
        (GPU, {"cluster": Cluster(("one:1", "other:1"), 1)}),
    ],
)
def test_several_replicas_are_compiled_with_sums_between_two_programs(
    devices: tuple[str, ...], of_replicas: dict[str, Any], monkeypatch: Patch
) -> None:
    """A train_step of the user's own may update weights before its end."""
    on_cpus = devices[0].startswith("CPU")
    choice = chosen(devices=devices, **of_replicas)
    assert choice.compiled is not on_cpus
    assert (
        "cost more than they save" if on_cpus else "sums over replicas between two programs"
    ) in choice.why
    assert chosen(TOLD, devices, **of_replicas).compiled
    monkeypatch.setattr(keras.Sequential, "train_step", lambda model, data: {})
    own = chosen(TOLD, devices, **of_replicas)
    assert (own.compiled, "its own train_step" in own.why) == (False, True)
    with monkeypatch.context() as patch:
        patch.setattr(keras.Sequential, "compiles_gradients", True, raising=False)
        gan = chosen(devices=devices, **of_replicas)
        assert (gan.compiled, "the gradients of its critic alone" in gan.why) == (
            not on_cpus,
            not on_cpus,
        )


def test_a_resumed_run_keeps_its_way_unless_told_otherwise() -> None:
    before = XlaChoice(True, "by rule")
    assert chosen(steps=10, earlier=before) == before
    assert chosen(earlier=XlaChoice(False, "too few")) == XlaChoice(False, "too few")
    assert chosen(TrainConfig(jit_compile="false"), earlier=before).compiled is False
    assert XlaChoice.read(json.loads(json.dumps(dataclasses.asdict(before)))) == before
    for damaged in ({}, {"compiled": "yes", "why": ""}, {"compiled": True}):
        assert XlaChoice.read(damaged) is None


@pytest.fixture
def without_onednn(monkeypatch: Patch) -> None:
    """Makes auto compile a short run, on every processor."""
    monkeypatch.setattr(xla_choice, "uses_onednn", lambda: False)
    monkeypatch.setattr(xla_rule, "FEWEST_STEPS", 1)
    monkeypatch.setattr(xla_rule, "FEWEST_OPERATIONS", 1)


def compilation(config: TrainConfig) -> dict[str, Any]:
    return json.loads((Path(config.job_dir) / "run.json").read_text())["compilation"]


def final(job_dir: Path) -> dict[str, Any]:
    """Returns all variables at the end of a run."""
    return read_checkpoint(checkpoint_folders(job_dir / "checkpoints")[-1])[1]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    "how", [pytest.param("in a loop", marks=pytest.mark.slow), "without a kernel"]
)
def test_a_run_whose_first_step_xla_cannot_compile_has_the_numbers_of_a_plain_one(
    how: str, small_config: Make, tmp_path: Path, caplog: Log
) -> None:
    """Tracing refuses the first; the second fails only when XLA compiles it, after its batch was
    taken."""
    for name, way in (("plain", "false"), ("auto", "auto")):
        flags = (
            f"--model={__name__}:mixing",
            f"--how={how}",
            f"--jit_compile={way}",
            f"--job_dir={tmp_path}/{name}",
        )
        run_job(config := small_config(*flags))
    assert compilation(config)["compiled"] is False
    assert largest_difference(final(tmp_path / "plain"), final(tmp_path / "auto")) == 0
    assert (f"jit_compile: the steps run plain: {compilation(config)['why']}" in caplog.text) is (
        how != "in a loop"
    )
