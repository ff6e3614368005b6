"""Tests the config of a tuning job that docs/vertex.md shows: it is of the SDK's type, and its
trials start."""

import json
import re
import textwrap
from typing import Any

import yaml
from google.cloud.aiplatform_v1.types import HyperparameterTuningJob

from deploy.__main__ import main
from tests.deploy.conftest import Capture
from tests.docs.sources import ROOT
from trainer.base.settings.request import Overrides


def test_the_config_is_of_the_sdk_s_type_and_the_trainer_takes_what_the_service_adds(
    capsys: Capture,
) -> None:
    page = (ROOT / "docs" / "vertex.md").read_text(encoding="utf-8")
    shown = re.search(
        r"<<'END'\n(.*?)END\npython -m deploy (submit .*?) --out=trial.yaml", page, re.DOTALL
    )
    assert shown
    where = ["--project=my-proj", "--region=us-central1", "--image=us-docker.pkg.dev/p/r/x:1"]
    assert main([*shown[2].split(), *where, "--spec"]) == 0
    config = yaml.safe_load(shown[1] + textwrap.indent(capsys.readouterr().out, "  "))
    job = HyperparameterTuningJob.from_json(json.dumps({"displayName": "mlp", **config}))
    (pool,) = job.trial_job_spec.worker_pool_specs
    arguments = [*pool.container_spec.args]
    metrics = [metric.metric_id for metric in job.study_spec.metrics]
    assert [f"--tuning_metric={name}" for name in metrics] == [
        one for one in arguments if "tuning_metric" in one
    ]
    names = {parameter.parameter_id for parameter in job.study_spec.parameters}
    assert not names & {one.partition("=")[0].removeprefix("--") for one in arguments}
    # Whole numbers come as fractions.
    added = {
        "learning_rate": 0.001,
        "warmup_steps": "10.0",
        "width": "16.0",
        "precision": "mixed_bfloat16",
    }
    assert added.keys() == names
    config_of_trial: Any = Overrides.parse(
        [*arguments, *(f"--{name}={value}" for name, value in added.items())]
    )
    assert config_of_trial.config.width == 16
    assert job.trial_job_spec.base_output_directory.output_uri_prefix.startswith(
        "gs://bucket/jobs/"
    )
    assert job.trial_job_spec.scheduling.timeout.total_seconds() > 0
