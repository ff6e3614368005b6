"""Tests that the study of the examples goes on where it was interrupted, and trains no trial
twice."""

from functools import partial

import optuna
from optuna.trial import FrozenTrial

from examples import optuna_study
from tests.deploy.conftest import FlyingClock, Job, error_of, output_of, put
from tests.deploy.emulator import Emulator
from tests.deploy.planted import plant
from tests.fixtures import Patch
from tests.vertex_trainer.test_functions import WHERE
from vertex_trainer import submit


def trials() -> list[FrozenTrial]:
    return optuna.load_study(study_name="study", storage="sqlite:///runs/study/study.db").trials


def test_the_same_call_goes_on_and_sends_no_trial_twice(
    cloud: Emulator, flying: FlyingClock, monkeypatch: Patch
) -> None:
    """Each trial is a job. The first call is interrupted; of three trials the second fails."""

    def trains(google: Emulator, job: Job) -> None:
        google.begin(job)
        number = output_of(job).name[-1]
        if number != "1":
            made = plant(f"trained-{number}", [0.1], val_accuracy=0.5 + int(number) / 10)
            put(made, output_of(job))
        google.end(job, "FAILED" if number == "1" else "SUCCEEDED")

    where = {key: value for key, value in WHERE.items() if key != "bucket"}
    sends = partial(submit, project="my-proj", **where)
    monkeypatch.setattr(optuna_study, "submit", sends)
    flying.asleep = flying.interrupt
    error = error_of(optuna_study.main, 1, optuna_study.in_the_cloud)
    assert "there is no result yet: wait for the end of the run" in error
    (proposed,) = trials()
    flying.asleep = lambda: None
    cloud.run = trains
    trains(cloud, cloud.job)
    for _ in range(2):
        optuna_study.main(3, optuna_study.in_the_cloud)
    assert [(trial.state.name, trial.value) for trial in trials()] == [
        ("COMPLETE", 0.5),
        ("FAIL", None),
        ("COMPLETE", 0.7),
    ]
    assert proposed.state.name == "RUNNING"
    assert trials()[0].params == proposed.params
    assert len(cloud.jobs) == 3
