"""Tests, from TensorFlow's registry of kernels, that the host need not wait for a GPU within the
loop over steps."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tensorflow as tf
from keras import Input, Model, Sequential, layers

from benchmarks.trainer_loop import setup_of, traced_steps
from tests.fixtures import Capture, Patch, parametrize
from tests.gpu_graph import GpuStep, optimised
from tests.models import compiled
from tests.support import slow
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset

PAGE = Path(__file__).parents[3] / "docs" / "scaling.md"
RECIPES = {path.stem for path in Path(__file__).parents[3].glob("trainer/recipes/*.yaml")}
# the trace of DEEP on two replicas takes minutes
QUICK = {"mlp_mnist"}
DEEP = {"efficientnet_photos"}

# Copies from a device to the host that have to be in mixed_float16, as patterns of `producer ->
# consumer`, and why.
ALLOWED = {
    r"All \S+ -> Switch": (
        "whether gradients overflowed decides, on the host, whether LossScaleOptimizer updates"
    ),
    r"Equal \S+ -> Switch": "whether 2,000 updates were made decides whether it doubles the scale",
}
CLASSIFIER = f"--model={__name__}:classifier"


def classifier(config: TrainConfig, dataset: Dataset) -> Model:
    """Returns what most users would write."""
    parts = layers
    model = Sequential(
        [
            Input(dataset.image_shape),
            parts.Rescaling(1 / 255),
            parts.Conv2D(4, 3, activation="relu"),
            parts.BatchNormalization(),
            parts.MaxPooling2D(),
            parts.Flatten(),
            parts.Dropout(0.5),
            parts.Dense(10),
        ]
    )
    return compiled(model, metrics=["accuracy"])


def step_on_gpus(monkeypatch: Patch, *flags: str) -> GpuStep:
    """Returns the loop over steps that the flags describe; CPU:1 and CPU:2 stand for the GPUs of
    two replicas."""
    monkeypatch.setattr(
        "trainer.cluster.strategy.local_devices",
        lambda config, cluster: tuple(f"CPU:{i + 1}" for i in range(max(1, config.replicas))),
    )
    monkeypatch.setattr("trainer.models.image_layers._planned", [None])
    return GpuStep(optimised(traced_steps(setup_of(*flags))))


def check(step: GpuStep, allowed: Iterable[str] = ()) -> None:
    assert len(step.loop) > 100
    assert [
        wait for wait in step.waits() if not any(re.match(pattern, wait) for pattern in allowed)
    ] == []
    assert all(any(re.match(pattern, wait) for wait in step.waits()) for pattern in allowed)
    assert step.without_kernel() == []


@parametrize("recipe", [*sorted(QUICK), *map(slow, sorted(RECIPES - QUICK - DEEP))])
def test_no_recipe_makes_the_host_wait_and_each_keeps_to_its_budget(
    recipe: str, monkeypatch: Patch, capsys: Capture
) -> None:
    """Counts on each of two replicas. docs/scaling.md has the budget: the page's row, and 5 % more
    operations."""
    # The width changes no count.
    step = step_on_gpus(
        monkeypatch, f"--recipe={recipe}", "--data=digits", "--replicas=2", "--width=8"
    )
    check(step)
    found = step.counts(0)
    with capsys.disabled():
        print(f"\n| `{recipe}` | {' | '.join(f'{value:,}' for value in found.values())} |")
    line = re.search(
        rf"^\| `{recipe}` \| ([\d,]+) \| (\d+) \| (\d+) \|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert line, f"docs/scaling.md has no row for {recipe}: add the one above"
    operations, all_reduces, updates = (int(number.replace(",", "")) for number in line.groups())
    assert found["operations"] <= 1.05 * operations
    assert (found["all-reduces"], found["updates"]) == (all_reduces, updates)


EFFICIENTNET = (  # all blocks of B0 train
    "--recipe=efficientnet_photos",
    "--weights=none",
    "--fine_tune_from=",
    "--fine_tune_after_steps=0",
    "--evaluation_fraction=0.1",
    "--variant=B0",
    "--image_size=32",
    "--global_batch_size=8",
)


@parametrize(
    "flags",
    [
        (CLASSIFIER, "--augment=flip,crop", "--micro_batches=2"),
        (CLASSIFIER, "--replicas=2", "--precision=mixed_bfloat16", "--class_weight=0:1,1:2"),
        (CLASSIFIER, "--precision=mixed_float16"),
        slow(("--replicas=2", "--critic_steps=1", "--jit_compile", "--width=8")),
        slow(("--model=dcgan", "--width=8")),
        slow(
            (
                "--replicas=2",
                "--model=r3gan",
                "--width=8",
                "--diff_augment=color,translation,cutout",
            )
        ),
        slow(EFFICIENTNET),
    ],
)
def test_other_steps_do_not_make_it_wait_either(flags: tuple[str, ...], monkeypatch: Patch) -> None:
    """A user's compiled classifier, and GANs."""
    allowed = ALLOWED if "--precision=mixed_float16" in flags else {}
    step = step_on_gpus(monkeypatch, "--data=digits", "--image_size=16", "--replicas=1", *flags)
    check(step, allowed)


def loop_over(body: Any, counter: Any = tf.int32) -> GpuStep:
    """Returns a loop that applies `body` to numbers on a device."""

    def run(count: Any, values: Any) -> Any:
        for _ in tf.range(count):
            with tf.device("CPU:1"):
                values = tf.autograph.experimental.do_not_convert(body)(values)
        return values

    arguments = (tf.TensorSpec([], counter), tf.TensorSpec([8], tf.float32))
    return GpuStep(optimised(tf.function(run).get_concrete_function(*arguments)))


def test_known_waits_are_found() -> None:
    """Plants those that were in this package, and an operation that no GPU has."""
    assert (loop_over(tf.square).waits(), loop_over(tf.square).without_kernel()) == ([], [])
    planted = {
        r"Less \S+ -> LoopCond": loop_over(tf.square, tf.int64),
        # Gathers by offsets that were computed as int32.
        r"Cast \S+ -> AddV2": loop_over(
            lambda x: tf.gather(x, tf.cast(x[:1], tf.int32) + tf.range(8))
        ),
    }
    for pattern, step in planted.items():
        assert any(re.match(pattern, wait) for wait in step.waits()), (pattern, step.waits())
    lacking = loop_over(lambda values: values + tf.raw_ops.NthElement(input=values, n=2))
    assert [name.split()[0] for name in lacking.without_kernel()] == ["NthElement"]
