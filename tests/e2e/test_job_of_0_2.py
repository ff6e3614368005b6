"""Tests that a job directory which 0.2.0 wrote is still evaluated, predicted by, resumed and reported.

job_of_0_2/ is of its last state, the commit 78655661, by the command in its run.json; model.h5 and saved_model/
are left out, and so are most of the packages that were installed.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from deploy.__main__ import main as deploy
from tests.support import run_job
from trainer import evaluate, predict
from trainer.base.settings.resolution import resolve

FLAGS = [
    "--model=mlp", "--data=digits", "--width=4", "--global_batch_size=64", "--image_size=4",
    "--evaluation_fraction=0.1", "--report_every_steps=2", "--tensorboard=false",
]  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return Path(shutil.copytree(Path(__file__).parent / "job_of_0_2", tmp_path / "job"))


def test_it_is_evaluated_and_predicted_by(job: Path, tmp_path: Path) -> None:
    final = json.loads((job / "result.json").read_text())["final"]
    final = {**final["losses"], **final["metrics"]}
    for checkpoint in ("", "newest"):
        assert evaluate.main([str(job), f"--checkpoint={checkpoint}", f"--out={tmp_path / 'values.json'}"]) == 0
        found = json.loads((tmp_path / "values.json").read_text())
        assert found["values"] == pytest.approx({name: final[f"val_{name}"] for name in found["values"]}, rel=1e-5)
        assert predict.main([str(job), f"--checkpoint={checkpoint}", f"--out={tmp_path / 'x.npz'}"]) == 0
        with np.load(tmp_path / "x.npz") as arrays:
            assert arrays["predictions"].shape == (found["examples"], 10)


def test_it_goes_on_and_is_reported(job: Path, tmp_path: Path) -> None:
    identity = json.loads((job / "run.json").read_text())["id"]
    run_job(resolve([*FLAGS, "--steps=8", f"--job_dir={job}"]).config)
    steps = [json.loads(line)["step"] for line in (job / "stats.jsonl").read_text().splitlines()]
    assert sorted({*steps}) == [2, 4, 6, 8]
    info, result = (json.loads((job / f"{name}.json").read_text()) for name in ("run", "result"))
    assert (info["id"], result["steps"], result["state"]) == (identity, 8, "done")
    assert deploy(["report", str(job), f"--out={tmp_path / 'report'}"]) == 0
    assert "job" in json.loads((tmp_path / "report" / "table.json").read_text())["tiers"][0]["tier"]
