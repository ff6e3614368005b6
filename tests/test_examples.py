"""Tests that each example runs by its own command, with the same numbers on one and on two
replicas."""

from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.testing import assert_array_equal

from examples import table
from tests.fixtures import SLOW, parametrize
from tests.own_runs import EXAMPLES, arguments_of
from tests.support import (
    largest_difference,
    real_data,
    resolved,
    run_job,
    run_steps,
    saved_model,
    slow,
    weights,
)
from trainer.base.run_files.job_files import read_stats
from trainer.base.settings.train_config import TrainConfig
from trainer.data.sources import load_dataset
from trainer.user_code.interface import ModelInterface

STEPS = 4
SHORT = ["--global_batch_size=8", "--report_every_steps=2", "--evaluation_batch_size=512"]
LOSSES = {"conditional_gan": {"generator_loss", "discriminator_loss"}}
# Its batch norm of maps of one pixel magnifies rounding some tenfold a step: it is not compared.
LARGE = "fine_tuning"
LONGER = {
    "image_and_metadata",
    "text",
    "segmentation",
    "multi_label",
    "pytorch_style",
    "conditional_gan",
}  # such models: tests/trainer/data/test_user_data.py


def settings(name: str, *more: str) -> TrainConfig:
    """Returns the settings of the example's own command, but with a few steps and small batches."""
    return resolved(*arguments_of(name), *SHORT, *more)


@parametrize(
    "name", [slow(name) if name in LONGER else name for name in sorted(EXAMPLES.keys() - {LARGE})]
)
def test_an_example_runs_by_its_own_command_with_the_same_numbers_on_two_replicas(
    name: str, tmp_path: Path
) -> None:
    config = settings(
        name, f"--job_dir={tmp_path}", "--precision=float64", "--replicas=2", f"--steps={STEPS}"
    )
    job_dir = run_job(config)
    *_, entry = (entry for entry in read_stats(job_dir)[0] if entry["kind"] == "report")
    assert entry["step"] == STEPS
    assert LOSSES.get(name, {"loss"}) <= entry["losses"].keys()
    assert len([*job_dir.glob("samples/*.png")]) == (name == "conditional_gan")
    saved = saved_model(job_dir)
    alone, _ = run_steps(settings(name, "--precision=float64", f"--steps={STEPS}"), STEPS)
    expected = weights(ModelInterface.of(alone).templates()["model"])
    # Adam moves a weight without effect, as the bias of an attention's keys, by rounding alone.
    assert largest_difference(expected, weights(saved), smallest_norm=config.learning_rate) < 1e-10


@SLOW
def test_the_large_example_runs_by_its_own_command(tmp_path: Path) -> None:
    job_dir = run_job(settings(LARGE, f"--job_dir={tmp_path}", "--steps=2"))
    assert saved_model(job_dir).output_shape == (None, 10)


@parametrize(
    "name, flag, file, rows",
    [
        ("table", "csv", "wine-quality/winequality-red.csv", 1599),
        ("text", "messages", "sms-spam/SMSSpamCollection", 5574),
    ],
)
def test_an_example_reads_a_real_file(name: str, flag: str, file: str, rows: int) -> None:
    data = load_dataset(
        settings(name, f"--{flag}={real_data(file)}", "--evaluation_fraction=0")
    ).train
    parts, y = data.gather(tf.range(data.count))
    (x,) = tf.nest.flatten(parts)
    assert len(x) == len(y) == rows
    assert all(map(len, x.numpy())) if x.dtype == tf.string else np.isfinite(x).all()


@parametrize("header, name, missing", [("n,colour,y\n", "colour", ""), ("", "column 1", " NA")])
def test_a_table_may_have_a_header_missing_cells_and_text(
    header: str, name: str, missing: str, tmp_path: Path
) -> None:
    (tmp_path / "table.csv").write_text(
        f'{header}1,red,2\r\n{missing},"light, blue",3\r\n', "utf-8-sig"
    )
    x, y = table.data(TrainConfig(), csv=str(tmp_path / "table.csv"))
    assert_array_equal(x["numbers"], [[1], [np.nan]])
    assert x["categories"].tolist() == [[f"{name}=red"], [f"{name}=light, blue"]]
    assert y.tolist() == [2, 3]
