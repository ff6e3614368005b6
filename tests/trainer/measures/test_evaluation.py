"""Tests that evaluation gives the numbers of `model.evaluate` on one device, on any number of
replicas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras import optimizers

from tests.drill import read
from tests.fixtures import Log, parametrize
from tests.own_data import regression
from tests.support import refused, run_job, saved_model, slow
from tests.trainer.data.test_user_data import settings
from trainer.base.run_files.job_files import read_stats
from trainer.cluster.strategy import make_replicas
from trainer.measures.evaluation import Evaluation, evaluation
from trainer.run.training_setup import TrainingSetup, build_setup
from trainer.user_code.interface import numbers_of

CASES: list[Any] = [
    ("regression", "weighted_pair"),
    *(
        slow(*case)
        for case in [
            ("two_outputs", "named_pair"),
            ("multi_label", "several_labels"),
            ("by_weight", "weighted_pair"),
            ("regression", "tf_batches"),
            ("smoothed", "pair"),
            ("summed", "weighted_pair"),
            ("segmenter", "masks"),
            ("classifier", "classes"),
            ("regularized", "weighted_pair"),
        ]
    ),
]


def setup_of(model: str, data: str, *flags: str) -> tuple[TrainingSetup, Evaluation]:
    config = settings(data, model, "--evaluation_batch_size=6", *flags)
    setup = build_setup(config, make_replicas(config))
    found = evaluation(setup.model, setup.replicas, setup.dataset, config.evaluation_batch)
    assert found
    return setup, found


def by_keras(setup: TrainingSetup, evaluate: Evaluation) -> dict[str, float]:
    batches = evaluate._part(1, 0).map(lambda *parts: setup.dataset.step_data(parts))
    found = setup.model.evaluate(batches, steps=evaluate._batches, return_dict=True, verbose=0)
    return {f"val_{name}": value for name, value in numbers_of(found).items()}


@parametrize("model, data", CASES)
def test_values_are_those_of_keras_with_a_remainder_and_on_more_replicas(
    model: str, data: str
) -> None:
    """The evaluation part has 21 rows, so the batch of 6 leaves 3; four replicas take one batch
    each, two take two."""
    setup, evaluate = setup_of(model, data)
    expected = by_keras(setup, evaluate)
    replicas = 4 if (model, data) == CASES[0] else 2
    for found in (evaluate(), setup_of(model, data, f"--replicas={replicas}")[1]()):
        assert found == pytest.approx(expected, rel=1e-10)
    assert sorted(evaluate.names) == sorted(expected)


def test_each_number_of_a_metric_with_several_has_a_name(tmp_path: Path) -> None:
    folder = run_job(settings("several_labels", "multi_label", f"--job_dir={tmp_path}"))
    history = read(folder / "result.json")["history"]
    assert {
        f"{part}f1_score_{number}" for part in ("", "val_") for number in range(4)
    } < history.keys()


def test_a_test_step_of_the_models_own_gives_means_over_rows() -> None:
    for replicas in (1, 2):
        setup, evaluate = setup_of(
            "autoencoder", "inputs_alone", "--evaluation_fraction=0.42", f"--replicas={replicas}"
        )
        rows = [np.asarray(x) for (x,) in evaluate._part(1, 0)]
        errors = [np.square(setup.model(x).numpy() - x) for x in rows]
        expected = {
            "val_loss": np.mean(np.concatenate(errors)),
            "val_largest": np.average(
                [each.max() for each in errors], weights=[len(x) for x in rows]
            ),
        }
        assert evaluate() == pytest.approx(expected, rel=1e-10)


def test_a_metric_that_does_not_add_up_is_computed_on_one_replica(caplog: Log) -> None:
    values = []
    for replicas in (1, 2):
        _, evaluate = setup_of("largest_error", "pair", f"--replicas={replicas}")
        values.append(evaluate())
    assert values[0] == pytest.approx(values[1], rel=1e-12)
    assert (
        "evaluates on one replica: the variables of a metric do not add up over batches"
        in caplog.text
    )


def run(job_dir: Path, data: str, *flags: str) -> tuple[list[Any], dict[str, Any]]:
    """Returns the lines of stats.jsonl and result.json of a whole run."""
    run_job(settings(data, "regression", f"--job_dir={job_dir}", "--report_every_steps=1", *flags))
    return read_stats(job_dir)[0], read(job_dir / "result.json")


def test_training_counts_are_not_touched(tmp_path: Path) -> None:
    """Evaluation uses the same metric objects as training."""
    found = [run(tmp_path / data, data)[0] for data in ("pair", "arrays")]
    one, other = (
        [e["losses"] | e["metrics"] for e in entries if e["kind"] == "report"] for entries in found
    )
    assert len(one) == 8
    assert one == other


@parametrize("flag", ["early_stopping=val_mape", "best_metric=val_mae"])
def test_values_of_evaluation_need_data_for_it(flag: str, tmp_path: Path) -> None:
    with refused(f"{flag}: nothing is evaluated"):
        run(tmp_path, "arrays", f"--{flag}")


def test_any_value_of_evaluation_stops_early_and_chooses_the_best(tmp_path: Path) -> None:
    flags = (
        "--steps=60",
        "--learning_rate=0.3",
        "--early_stopping=val_mape",
        "--patience=2",
        "--best_metric=val_mae",
    )
    entries, result = run(tmp_path, "pair", *flags)
    assert result["steps"] < 60
    values = {
        e["step"]: {**e["losses"], **e["metrics"]}["val_mae"]
        for e in entries
        if e["kind"] == "evaluation"
    }
    assert (tmp_path / "checkpoints" / f"step-{min(values, key=values.__getitem__):08}").is_dir()


def averaging(config: Any, dataset: Any) -> Any:
    model = regression(config, dataset)
    model.compile(optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9), "mse", metrics=["mae"])
    return model


def test_the_weights_are_evaluated_and_their_averages_exported(tmp_path: Path, caplog: Log) -> None:
    own = f"--model={__name__}:averaging"
    config = settings("pair", "regression", own, f"--job_dir={tmp_path / 'run'}")
    setup = build_setup(config, make_replicas(config))
    final = read(run_job(config) / "result.json")["final"]
    assert "sets the weights to their moving averages (use_ema)" in caplog.text
    model = saved_model(tmp_path / "run")
    setup.model.set_weights(model.get_weights())
    evaluate = evaluation(setup.model, setup.replicas, setup.dataset, config.evaluation_batch)
    assert evaluate
    assert by_keras(setup, evaluate)["val_loss"] != pytest.approx(
        final["losses"]["val_loss"], rel=1e-3
    )
