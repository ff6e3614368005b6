"""python -m examples.optuna_study 20

Tries settings of a recipe in 20 trials and prints the best ones. Needs the package optuna, which
keeps the study: its trials are in runs/study/study.db, which Optuna's figures and dashboard read.
Each trial trains in a job directory of its own. The same command again goes on, and a larger number
adds trials: one that was interrupted resumes from its checkpoint, and none is trained twice. The
number of a trial seeds its proposal, so an interruption changes none of them. One process at a
time.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from vertex_trainer import PlatformFault, RunResult, submit, train

SPACE = {
    "learning_rate": FloatDistribution(1e-5, 1e-2, log=True),
    "width": CategoricalDistribution([16, 32, 64, 128]),
}
SETTINGS = {
    "data": "digits",
    "image_size": 16,
    "steps": 500,
    "report_every_steps": 100,
    "evaluation_fraction": 0.2,
}
METRIC = "val_accuracy"
DIRECTION = "maximize"


def here(settings: dict[str, Any], name: str) -> RunResult:
    """Trains on this machine; the same call again resumes."""
    return train(recipe="mlp_mnist", settings=settings, job_dir=f"runs/study/{name}")


def in_the_cloud(settings: dict[str, Any], name: str) -> RunResult:
    """Trains as a job of Vertex AI, for 2 USD at most; the same call again follows that job."""
    settings = {**settings, "job_dir": f"gs://bucket/study/{name}"}
    job = submit("l4x1", recipe="mlp_mnist", bucket="gs://bucket", max_cost=2, settings=settings)
    if (status := job.wait()).state == "FAILED":
        raise PlatformFault(status.error)
    return job.result


def main(trials: int, run: Callable[[dict[str, Any], str], RunResult] = here) -> None:
    """Goes on with the study until it has so many trials."""
    Path("runs/study").mkdir(parents=True, exist_ok=True)
    storage = "sqlite:///runs/study/study.db"
    study = optuna.create_study(
        storage=storage, study_name="study", direction=DIRECTION, load_if_exists=True
    )
    for number in range(trials):
        if number == len(study.trials):
            study.sampler = optuna.samplers.TPESampler(seed=number)
            study.ask(SPACE)
        trial = study.trials[number]
        # killed while it was proposed
        if trial.state == TrialState.RUNNING and trial.params.keys() != SPACE.keys():
            study.tell(number, state=TrialState.FAIL)
        # proposed now, or by a command that was interrupted
        elif trial.state == TrialState.RUNNING:
            try:
                study.tell(
                    number, run({**SETTINGS, **trial.params}, f"trial-{number}").metrics[METRIC]
                )
            except PlatformFault as fault:
                if fault.exit_code != 1:  # it was interrupted, or its job may go on
                    raise
                print(fault)
                study.tell(number, state=TrialState.FAIL)
        print(f"trial {number}: {study.trials[number].value} with {trial.params}", flush=True)
    print(f"best: trial {study.best_trial.number} with {study.best_params}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
