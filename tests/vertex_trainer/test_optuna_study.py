"""Tests that the study of the examples goes on where it was interrupted, and trains no trial twice."""

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from deploy.platform.gcloud_and_sdk import Session
from examples import optuna_study
from tests.deploy.conftest import ROOT, Job, output_of, put
from tests.deploy.emulator import Emulator
from tests.deploy.planted import plant
from trainer.base.run_files.job_files import read_result, read_stats
from vertex_trainer import submit

# SIGINT is ignored in processes of a shell's background, of which tests may be one.
PROGRAM = """import signal, sys
from examples import optuna_study
signal.signal(signal.SIGINT, signal.default_int_handler)
optuna_study.SETTINGS |= {"image_size": 8, "global_batch_size": 8, "steps": 1000}
optuna_study.main(int(sys.argv[1]))"""


def start(trials: int) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", PROGRAM, str(trials)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def found() -> list[FrozenTrial]:
    return optuna.load_study(study_name="study", storage="sqlite:///runs/study/study.db").trials


@pytest.mark.slow
def test_the_same_command_goes_on_and_trains_no_trial_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    first, second = (Path("runs/study") / name for name in ("trial-0", "trial-1"))
    with start(1) as command:
        while not read_stats(first)[0]:
            assert command.poll() is None, command.communicate()
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        shown, _ = command.communicate()
    assert "KeyboardInterrupt" in shown
    (proposed,) = found()
    assert (proposed.state, read_result(first)[0]["state"]) == (TrialState.RUNNING, "interrupted")
    for _ in range(2):
        with start(2) as command:
            shown, _ = command.communicate()
        assert command.returncode == 0, shown
        results = [read_result(folder)[0] for folder in (first, second)]
        assert [(result["state"], result["restarts"]) for result in results] == [("done", 1), ("done", 0)]
        assert [trial.value for trial in found()] == [result["final"]["metrics"]["val_accuracy"] for result in results]
    assert found()[0].params == proposed.params != found()[1].params


def test_each_trial_is_a_job_in_the_cloud_and_one_that_fails_is_not_sent_again(
    cloud: Emulator, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trains(google: Emulator, job: Job) -> None:
        google.begin(job)
        number = output_of(job).name[-1]
        if number != "1":
            put(plant(tmp_path / f"trained-{number}", [0.1], val_accuracy=0.5 + int(number) / 10), output_of(job))
        google.end(job, "FAILED" if number == "1" else "SUCCEEDED")

    cloud.run = trains
    place: Any = {"project": "my-proj", "region": "us-central1", "image": "us-docker.pkg.dev/p/r/x:1"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(optuna_study, "submit", partial(submit, session=session, backend="sdk", **place))
    for _ in range(2):
        optuna_study.main(3, optuna_study.in_the_cloud)
    assert [(trial.state.name, trial.value) for trial in found()] == [
        ("COMPLETE", 0.5), ("FAIL", None), ("COMPLETE", 0.7),
    ]  # fmt: skip
    assert len(cloud.jobs) == 3
