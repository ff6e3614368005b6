"""Trains models and data of users' own, one after the other: `python -m tests.own_runs FOLDER REPLICAS [--restart]`.

As one of several workers of TF_CONFIG, or alone. FOLDER gets NAME.npz of each: the weights and the means of the losses.
With --restart each run ends after half of its steps, and a new model goes on from its checkpoint.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.docs.commands import commands
from tests.docs.sources import ROOT
from tests.support import weights
from trainer.base.settings.request import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import read_cluster
from trainer.cluster.strategy import Replicas, make_replicas
from trainer.run.training_setup import build_setup
from trainer.training.checkpoint import Checkpoints

STEPS, MIDDLE, BATCH = 30, 14, 16
FILES = {
    path.stem: path for path in sorted((ROOT / "examples").glob("[!_]*.py")) if path.stem != "optuna_study"
}  # of problems
EXAMPLES = {name: path for name, path in FILES.items() if name != "keras_hub_lora"}  # which needs keras-hub
_OF_TESTS = [
    ("regression", "tf_examples"), ("two_outputs", "named_inputs"), ("masked_text", "next_tokens"),
    ("regularized", "weighted"), ("bag_of_words", "sentences"),
]  # fmt: skip
# A train_step of the user's own, layers that draw or normalise, and kinds of data. tests/test_examples.py has the other
# examples on two replicas, tests/trainer/data/test_user_data.py the rows of all kinds of data on two workers.
CASES = ["conditional_gan", "stock_layers", *(f"{model}-{data}" for model, data in _OF_TESTS)]


def arguments_of(example: str) -> list[str]:
    """Returns the arguments of the first command of the example's docstring, without its length in epochs."""
    return [word for word in next(commands(FILES[example])).arguments if not word.startswith("--epochs=")]


# A recipe that would download weights, and train in two parts, is made small.
_SMALL = {
    "efficientnet_photos": [
        "--image_size=32", "--variant=B0", "--weights=none", "--fine_tune_from=", "--fine_tune_after_steps=0",
        "--evaluation_fraction=0.1",
    ]
}  # fmt: skip


def settings(case: str, *flags: str) -> TrainConfig:
    """Returns the settings of an example's own command, or of models of the tests, for a short run in float64."""
    if case in EXAMPLES:
        words = arguments_of(case)
    elif case == "stock_layers":
        words = ["--model=tests.models:stock_layers", "--data=digits", "--image_size=16", "--learning_rate=1e-3"]
    else:
        model, data = case.split("-")
        words = [f"--model=tests.own_data:{model}", f"--data=tests.own_data:{data}", "--learning_rate=0.01"]
    short = [f"--steps={STEPS}", f"--global_batch_size={BATCH}", "--report_every_steps=15"]
    return resolve([*words, *short, "--evaluation_batch_size=512", "--precision=float64", *flags]).config


def main(folder: Path, replicas: int, restart: bool) -> None:
    """Trains each case on the same devices."""
    shared = None
    for case in CASES:
        config = settings(case, f"--replicas={replicas}")
        shared = shared or make_replicas(config, read_cluster())
        for calls in [[(0, MIDDLE)], [(MIDDLE, STEPS)]] if restart else [[(0, MIDDLE), (MIDDLE, STEPS)]]:
            found = _trained(config, shared, folder / case, calls)
        if shared.cluster.is_chief:
            np.savez(folder / f"{case}.npz", **found)  # type: ignore[arg-type]  # allow_pickle is no key of ours
        print(case, flush=True)


def _trained(
    config: TrainConfig, replicas: Replicas, folder: Path, calls: Sequence[tuple[int, int]]
) -> dict[str, np.ndarray]:
    """Returns the weights, and the losses of the last call; saves a checkpoint if more steps follow."""
    setup = build_setup(config, replicas)
    checkpoints = Checkpoints(setup.model, replicas, folder, keep=1)
    assert (checkpoints.restore() or (0, {})) == (calls[0][0], {})
    run, rows = setup.step_runner(), setup.rows_from(calls[0][0])
    logs = [run(rows, first, last - first) for first, last in calls][-1]
    if calls[-1][1] < STEPS:
        checkpoints.save(calls[-1][1], {})
        checkpoints.wait()
    return weights(setup.model) | {f"mean {name}": np.asarray(value) for name, value in logs.means().items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "--restart" in sys.argv)
