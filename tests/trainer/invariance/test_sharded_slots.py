"""Tests that sharded optimizers give the same numbers, hold their part alone, and are saved whole."""

import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from deploy.platform.local import free_addresses
from tests import workers
from tests.support import largest_difference, refused, run_job, run_steps, small
from tests.workers import until
from trainer.base.errors import DONE
from trainer.base.settings.train_config import TrainConfig
from trainer.data.dataset import Dataset
from trainer.invariance.internals import averages_of
from trainer.training.checkpoint import checkpoint_folders, read_checkpoint, snapshot, variables_of

SLOW = pytest.mark.slow
SHARDED, PLAIN = "--shard_optimizer", "--shard_optimizer=false"
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: keras.optimizers.AdamW(
        1e-2, weight_decay=0.1, global_clipnorm=0.5, use_ema=True, ema_momentum=0.7
    ),
    "nesterov": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True, clipnorm=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3, momentum=0.5, use_ema=True, ema_momentum=0.7),
    **{name: getattr(keras.optimizers, name) for name in ("Adadelta", "Ftrl", "Lamb")},
    "Mine": lambda: type("Mine", (keras.optimizers.Adam,), {})(1e-2),
}


def odd(config: TrainConfig, dataset: Dataset, *, optimizer: str = "adamw") -> keras.Model:
    """Has a kernel of 5,063 elements, which no number of replicas divides, and small biases."""
    layers = [
        keras.layers.Flatten(),
        keras.layers.Rescaling(1 / 255),
        *(keras.layers.Dense(width, "tanh") for width in (83, 61)),
    ]
    constrained = keras.layers.Dense(10, "softmax", kernel_constraint=keras.constraints.MaxNorm(0.5))
    model = keras.Sequential([keras.Input(dataset.image_shape), *layers, constrained])
    model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


ODD = f"--model={__name__}:odd"


def slot_bytes(model: keras.Model) -> int:
    """Returns the bytes that the first replica has of the optimizer's variables, without averages of weights."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    averages = {id(average) for average in averages_of(optimizer)}
    held = [slot.value for slot in optimizer.variables if id(slot) not in averages]
    return sum(slot.distribute_strategy.experimental_local_results(slot)[0].numpy().nbytes for slot in held)


@pytest.mark.parametrize("flags", [
    pytest.param((ODD, "--replicas=2"), id="adamw"),
    pytest.param((ODD, "--replicas=4", "--optimizer=nesterov", "--micro_batches=2"), id="nesterov", marks=SLOW),
    pytest.param((ODD, "--replicas=2", "--precision=mixed_float16"), id="scaled loss", marks=SLOW),
    pytest.param((ODD, "--replicas=2", "--virtual_replicas=4", "--precision=float32"), id="virtual", marks=SLOW),
    *(
        pytest.param((ODD, "--replicas=2", f"--optimizer={name}"), id=name, marks=SLOW)
        for name in ("Adadelta", "Ftrl")
    ),
    pytest.param(("--model=dcgan", "--width=16", "--replicas=2"), id="dcgan", marks=SLOW),
])  # fmt: skip
def test_all_variables_are_those_of_whole_slots_and_a_replica_holds_its_part(flags: tuple[str, ...]) -> None:
    configs = [small("--precision=float64", *flags, way) for way in (SHARDED, PLAIN)]
    models = [run_steps(config, 4)[0] for config in configs]
    sharded, plain = (snapshot(variables_of(model)) for model in models)
    assert sharded.keys() == plain.keys()
    assert [name for name in plain if not np.array_equal(plain[name], sharded[name])] == []
    if ODD in flags:  # 3 % of its weights are in small ones, whose slots stay whole
        assert slot_bytes(models[0]) < (1 / configs[0].replicas + 0.03) * slot_bytes(models[1])


@pytest.mark.slow
def test_a_resumed_run_may_change_it_and_the_number_of_replicas(tmp_path: Path) -> None:
    """The saved model has whole slots too, and the averages as weights."""
    flags = [ODD, "--precision=float64", "--evaluation_fraction=0.2", "--save_optimizer", "--global_batch_size=480"]
    saved = list[dict[str, Any]]()
    stretches = {"straight": [(2, PLAIN, 6)], "resumed": [(4, SHARDED, 2), (1, PLAIN, 4), (2, SHARDED, 6)]}
    for name in stretches:
        for replicas, way, steps in stretches[name]:
            own = [f"--replicas={replicas}", f"--steps={steps}", f"--job_dir={tmp_path / name}"]
            job_dir = run_job(small(*flags, way, *own))
        model = keras.saving.load_model(job_dir / "model" / "model.keras")
        _, state = read_checkpoint(checkpoint_folders(job_dir / "checkpoints")[-1])
        variables = enumerate([*model.weights, *model.optimizer.variables])
        saved.append(state | {f"saved {index}": variable.numpy() for index, variable in variables})
    assert largest_difference(saved[0], saved[1], 1e-3) < 1e-10


@pytest.mark.slow
def test_workers_that_were_killed_are_resumed_without_it_on_one_machine(tmp_path: Path) -> None:
    flags = [ODD, "--data=digits", "--image_size=16", "--precision=float64", "--global_batch_size=16", "--steps=30"]
    flags += ["--save_optimizer", "--steps_per_loop=1", "--checkpoint_every_steps=5"]
    killed, addresses = tmp_path / "killed", free_addresses(2)
    of_killed = [*flags, f"--job_dir={killed}", SHARDED]
    processes = [workers.start(addresses, index, of_killed, tmp_path / f"log.{index}") for index in range(2)]
    until(lambda: checkpoint_folders(killed / "checkpoints") or any(map(subprocess.Popen.poll, processes)), 120)
    for process in processes:
        process.kill()
    workers.end(processes)
    (_, before), *_ = map(read_checkpoint, checkpoint_folders(killed / "checkpoints"))
    assert all(np.any(value.ravel()[value.size // 2 :]) for value in before.values())  # the other worker's parts too
    run_job(small(*flags, PLAIN, "--replicas=4", f"--job_dir={killed}"))
    straight = tmp_path / "straight"
    assert workers.run(2, [*flags, SHARDED, f"--job_dir={straight}"], tmp_path / "other.log") == [DONE] * 2
    states = [read_checkpoint(checkpoint_folders(run / "checkpoints")[-1])[1] for run in (killed, straight)]
    assert largest_difference(states[0], states[1], 1e-3) < 1e-10


@pytest.mark.parametrize("optimizer", ["Lamb", "Mine"])
def test_other_optimizers_are_refused_on_one_replica_too(optimizer: str) -> None:
    with refused(f"shard_optimizer: {optimizer} is not known to update each element of a weight by itself: use Adam,"):
        run_steps(small(ODD, f"--optimizer={optimizer}", SHARDED), 1)
