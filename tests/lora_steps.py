"""Trains examples/keras_hub_lora.py and checks what comes out: `python -m tests.lora_steps FOLDER`.

tests/test_keras_hub.py runs it where keras-hub is installed.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np

from tests.drill import last_state
from tests.own_runs import arguments_of
from tests.support import largest_difference, resolved, run_job, run_steps, saved_model
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.strategy import make_replicas
from trainer.training.checkpoint import checkpoint_folders, read_checkpoint, snapshot, variables_of

STEPS = 4


def settings(*flags: str) -> TrainConfig:
    """Returns the settings of the example's own command, in float64."""
    short = ["--precision=float64", "--global_batch_size=8", f"--steps={STEPS}"]
    return resolved(*arguments_of("keras_hub_lora"), *short, *flags)


def check_resumed_on_two_replicas(folder: Path) -> None:
    """Compares a job that is resumed once with the same steps on one replica, without
    micro-batches."""
    make_replicas(settings("--replicas=2"))  # TensorFlow makes devices once
    alone, _ = run_steps(settings("--micro_batches=1", "--replicas=1"), STEPS)
    for steps in (STEPS // 2, STEPS):
        run_job(
            settings(f"--job_dir={folder}", "--replicas=2", "--micro_batches=2", f"--steps={steps}")
        )
    manifest, _ = read_checkpoint(checkpoint_folders(folder / "checkpoints")[-1])
    values = last_state(folder)
    assert largest_difference(snapshot(variables_of(alone)), values, smallest_norm=1e-2) < 1e-10
    saved = saved_model(folder)
    assert (len(saved.weights), len(alone.weights)) == (36, 44)  # with four pairs of matrices
    tokens = np.arange(64, dtype="int32")[None]
    x = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    assert np.abs(saved(x) - alone(x)).max() < 1e-10
    weights = ("bias", "lora_kernel_a", "lora_kernel_b")
    trained = [
        f"transformer_layer_{layer}/self_attention/{name}/{weight}"
        for layer, name, weight in product((0, 1), ("query", "value"), weights)
    ]
    assert [*manifest["trained"].values()] == trained
    slots = [
        value.shape for name, value in values.items() if name.endswith(("momentum", "velocity"))
    ]
    assert len(slots) == 2 * len(trained)
    assert max(map(max, slots)) == 64  # those of the vectors of tokens have 256


if __name__ == "__main__":
    check_resumed_on_two_replicas(Path(sys.argv[1]) / "job")
