"""Tests the commands with data in a bucket."""

from pathlib import Path

import numpy as np

from tests.drill import read
from tests.fixtures import Capture, parametrize
from tests.support import run_job
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.data.test_user_data import settings
from tests.workers import python
from trainer import evaluate, predict

SMALL = [
    "--recipe=wgan_gp_digits",
    "--width=4",
    "--latent_dim=8",
    "--global_batch_size=8",
    "--critic_steps=2",
    "--steps=2",
    "--image_size=16",
]


@parametrize(
    "flag, line",
    [
        ("--data=npz:gs://BUCKET/none", "data=gs://BUCKET/none: no objects found"),
        ("--fid_features=gs:///x/model.keras", "fid_features=gs:///x/model.keras: not an address"),
    ],
)
def test_a_mistake_is_exit_2_and_one_line_before_anything_slow(
    bucket: Bucket, tmp_path: Path, flag: str, line: str
) -> None:
    slow = tmp_path / "slow" / "tensorflow" / "__init__.py"
    slow.parent.mkdir(parents=True)
    slow.write_text("raise SystemExit('tensorflow was imported')")  # found before the real one
    flags = [
        *SMALL,
        flag.replace("BUCKET", bucket.name),
        f"--job_dir={tmp_path}",
        "--fid_every_steps=9",
    ]
    words = ("-W", "error::UserWarning", "-m", "trainer.task", *flags)
    done = python(*words, code=2, PYTHONPATH=str(tmp_path / "slow"))
    assert done.stderr.startswith("error: " + line.replace("BUCKET", bucket.name))
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


def test_a_run_in_a_bucket_is_evaluated_and_predicts(
    bucket: Bucket, tmp_path: Path, capsys: Capture
) -> None:
    job_dir = run_job(
        settings("pair", "regression", f"--job_dir={tmp_path / 'run'}", "--tensorboard=false")
    )
    bucket.put_folder(job_dir, "runs/1")
    here = [f"--cache_dir={tmp_path / 'cache'}"]
    found = []
    for run, more in ((str(job_dir), []), (bucket.url("runs/1"), here)):
        assert predict.main([run, f"--out={tmp_path / 'x.npz'}", *more]) == 0
        assert (
            evaluate.main([run, f"--out={tmp_path / 'x.json'}", "--checkpoint=newest", *more]) == 0
        )
        with np.load(tmp_path / "x.npz") as arrays:
            found.append((arrays["predictions"].tolist(), read(tmp_path / "x.json")["values"]))
    assert found[0] == found[1]
    assert not [*(tmp_path / "cache").rglob("saved_model.pb")], "only what is needed is downloaded"
    capsys.readouterr()
    bucket.put("runs/1/model/model.keras", b"damaged")
    for run, line in (
        (bucket.url("runs/1"), "Keras cannot load it"),
        (bucket.url("no"), "no objects found"),
    ):
        assert predict.main([run, *here]) == 2
        *_, shown = capsys.readouterr().err.splitlines()
        assert run in shown
        assert line in shown
