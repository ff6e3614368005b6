"""Tests a study on Vertex AI against the emulator: what is sent, followed, found again, cancelled and shown."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1.types import HyperparameterTuningJob, StudySpec

from deploy.__main__ import main
from deploy.cli import cancel, jobs, tune, watch
from deploy.vertex.session import Session
from tests.deploy.conftest import WHERE, Capture, Command, FlyingClock, needs_gcloud
from tests.deploy.emulator import Emulator, Fault
from trainer.base.errors import UserError
from trainer.base.settings.resolution import Overrides

ASKED = [
    "l4x1", "--recipe=mlp_mnist", "--data=digits", "--epochs=3", "--on=vertex", "--project=my-proj", *WHERE,
    "--image=us-docker.pkg.dev/p/r/x:1", "--tune=learning_rate=1e-5..1e-2:log", "--tune=width=64,16,32",
    "--tune=dropout=0..0.5", "--tune=sync_batch_norm=true,false", "--tune=warmup_steps=0..100",
    "--metric=val_accuracy", "--trials=8", "--parallel=3", "--max_cost=16",
]  # fmt: skip
POSTS = "POST /v1/projects/my-proj/locations/us-central1/hyperparameterTuningJobs"
BACKENDS = [pytest.param("gcloud", marks=[needs_gcloud, pytest.mark.slow]), "sdk"]


def trial(number: int, state: str, width: float, accuracy: float | None, **more: Any) -> dict[str, Any]:
    values = {"learning_rate": 0.001, "width": width, "dropout": 0.1, "sync_batch_norm": "true", "warmup_steps": 10.0}
    found = {"metrics": [{"metricId": "val_accuracy", "value": accuracy}], "stepCount": "30"}
    return {
        "id": str(number), "state": state, "startTime": "2026-11-22T10:00:00Z", "endTime": "2026-11-22T11:00:00Z",
        "parameters": [{"parameterId": name, "value": value} for name, value in values.items()],
        **({"finalMeasurement": found} if accuracy is not None else {}), **more,
    }  # fmt: skip


def studies(google: Emulator, job: dict[str, Any]) -> None:
    """Runs trials with each end that the service knows."""
    google.begin(job)
    google.log(job, "trial 1 begins")
    job["trials"] = [
        trial(1, "SUCCEEDED", 16.0, 0.91), trial(2, "SUCCEEDED", 64.0, 0.97),
        trial(3, "INFEASIBLE", 32.0, 0.4, infeasibleReason="The replica exited with a non-zero status of 2."),
        trial(4, "STOPPING", 32.0, 0.5),
    ]  # fmt: skip
    google.end(job, "SUCCEEDED")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_request_is_the_sdk_s_type_and_its_trials_are_shown(
    backend: str, cloud: Emulator, session: Session, capsys: Capture
) -> None:
    cloud.run = studies
    assert tune.main([*ASKED, f"--backend={backend}"], session) == 0
    (body,) = cloud.bodies
    sent = HyperparameterTuningJob.from_json(json.dumps(body))
    kinds, scale = StudySpec.ParameterSpec, StudySpec.ParameterSpec.ScaleType
    assert sent.study_spec == StudySpec(
        metrics=[StudySpec.MetricSpec(metric_id="val_accuracy", goal=StudySpec.MetricSpec.GoalType.MAXIMIZE)],
        parameters=[
            kinds(parameter_id="learning_rate", scale_type=scale.UNIT_LOG_SCALE,
                  double_value_spec=kinds.DoubleValueSpec(min_value=1e-5, max_value=1e-2)),
            kinds(parameter_id="width", discrete_value_spec=kinds.DiscreteValueSpec(values=[16, 32, 64])),
            kinds(parameter_id="dropout", scale_type=scale.UNIT_LINEAR_SCALE,
                  double_value_spec=kinds.DoubleValueSpec(min_value=0, max_value=0.5)),
            kinds(parameter_id="sync_batch_norm",
                  categorical_value_spec=kinds.CategoricalValueSpec(values=["true", "false"])),
            kinds(parameter_id="warmup_steps", scale_type=scale.UNIT_LINEAR_SCALE,
                  integer_value_spec=kinds.IntegerValueSpec(min_value=0, max_value=100)),
        ],
        measurement_selection_type=StudySpec.MeasurementSelectionType.LAST_MEASUREMENT,
        median_automated_stopping_spec=StudySpec.MedianAutomatedStoppingSpec(use_elapsed_duration=False),
    )  # fmt: skip
    assert (sent.max_trial_count, sent.parallel_trial_count) == (8, 3)
    (pool,) = sent.trial_job_spec.worker_pool_specs
    assert pool.machine_spec.machine_type == "g2-standard-12"
    arguments = [*pool.container_spec.args]
    assert "--tuning_metric=val_accuracy" in arguments
    assert not [one for one in arguments if one.startswith(("--width", "--learning_rate"))]
    # What the service adds for a trial is what the trainer takes: whole numbers come as fractions.
    config: Any = Overrides.parse([*arguments, "--learning_rate=0.001", "--width=16.0", "--sync_batch_norm=true"])
    assert config.resolve().width == 16
    assert sent.trial_job_spec.base_output_directory.output_uri_prefix.startswith(
        "gs://my-bucket/jobs/mlp-mnist-study-"
    )
    shown = capsys.readouterr().out
    limit = sent.trial_job_spec.scheduling.timeout.total_seconds()
    price = float(shown.partition("each trial: ")[2].split()[0])
    assert limit * price / 3600 == pytest.approx(16 / 8, rel=0.01), "--max_cost is for all trials together"
    assert "all 8 trials together: 16.00 USD at most" in shown
    assert float(sent.labels["usd-at-most"].replace("-", ".")) == pytest.approx(16, rel=0.01), (
        "a month's budget counts it"
    )
    assert "trial 1 begins" in shown
    found = json.loads(Path("runs/tuning/table.json").read_text())
    assert [(one["trial"], one["state"], one["setting.width"]) for one in found["trials"]] == [
        (2, "complete", 64), (1, "complete", 16), (4, "pruned", 32), (3, "failed", 32),
    ]  # fmt: skip
    assert found["trials"][0]["usd"] == pytest.approx(price, rel=0.01)
    assert "non-zero status of 2" in found["trials"][3]["reason"]
    assert "deploy submit l4x1 --recipe=mlp_mnist" in found["best_command"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_study_is_followed_again_listed_and_cancelled(
    backend: str, cloud: Emulator, session: Session, flying: FlyingClock, capsys: Capture
) -> None:
    cloud.run = lambda google, job: google.begin(job)
    flying.asleep = flying.interrupt
    assert tune.main([*ASKED, f"--backend={backend}"], session) == 75
    name = next(job["name"] for job in cloud.jobs.values())
    shown = capsys.readouterr().out
    assert f"watch it: python -m deploy watch {name}" in shown
    assert "run the same command again to go on watching" in shown
    flying.asleep = lambda: None
    assert jobs.main(["--project=my-proj", "--region=us-central1", f"--backend={backend}"], session) == 0
    assert name in capsys.readouterr().out
    assert cancel.main([name, "--yes", f"--backend={backend}"], session) == 0
    assert f"{name}: CANCELLED" in capsys.readouterr().out
    cloud.jobs[name.rsplit("/", 1)[-1]]["trials"] = [trial(1, "SUCCEEDED", 16.0, 0.9), trial(2, "ACTIVE", 32.0, None)]
    assert tune.main([*ASKED, f"--backend={backend}"], session) == 75
    assert f"goes on with {name}" in capsys.readouterr().out
    states = [one["state"] for one in json.loads(Path("runs/tuning/table.json").read_text())["trials"]]
    assert states == ["complete", "killed"]
    assert cloud.requests.count(POSTS) == 1
    assert watch.main([name, f"--backend={backend}"], session) == 75


def test_a_lost_response_creates_no_second_study(cloud: Emulator, session: Session) -> None:
    cloud.run = studies
    cloud.faults = [Fault(f"{POSTS}$", 503, after=True)]
    assert tune.main([*ASKED, "--backend=sdk"], session) == 0
    assert len(cloud.jobs) == 1


def test_a_dry_run_prints_the_config_and_sends_nothing(capsys: Capture) -> None:
    assert main(["tune", *ASKED, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "gcloud ai hp-tuning-jobs create --project=my-proj --region=us-central1" in shown
    assert "--config=/dev/stdin <<'END'\nstudySpec:\n" in shown
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--repeats=2"], "--repeats is for studies on this machine"),
        (["--max_cost=0.5"], "max_cost=0.5 over 8 trials: max_cost=0.06"),
    ],
)
def test_what_a_study_there_cannot_do_is_refused(flags: list[str], reason: str, refused: Command) -> None:
    kept = [one for one in ASKED if not one.startswith("--max_cost")]
    assert reason in refused("tune", *kept, *flags)


def test_another_count_of_trials_is_refused_once_it_is_sent(cloud: Emulator, session: Session) -> None:
    cloud.run = studies
    assert tune.main([*ASKED, "--backend=sdk"], session) == 0
    more = ["--trials=9" if one == "--trials=8" else one for one in ASKED]
    with pytest.raises(UserError, match=r"holds another study \(trials: 8 stored, 9 given\)"):
        tune.main([*more, "--backend=sdk"], session)
