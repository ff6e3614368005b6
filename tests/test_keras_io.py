"""Tests that the published examples of keras.io train on two replicas with the numbers of one, or why they cannot."""

import importlib
import re
from pathlib import Path

import pytest

from tests.docs.sources import ROOT
from tests.fixtures import Patch
from tests.support import refused, run_job
from trainer.base.run_files.records import read_stats
from trainer.base.settings.resolution import resolve
from trainer.base.settings.train_config import TrainConfig
from trainer.run import replica_check

FILES = {path.stem: path for path in sorted(Path(__file__).with_name("keras_io").glob("[!_]*.py"))}
MOST_GLUE = 15
OF_A_BATCH = "what is computed from a whole batch (a correlation, pairs within the batch, the root of a mean)"
# On two replicas they give other numbers, or fail; with the line that says why.
DEPENDENT = {
    "wgan_gp": "the step draws by tf.random.normal",
    "dcgan_overriding_train_step": "the step draws by tf.random.uniform",
    "collaborative_filtering_movielens": OF_A_BATCH,
}  # fmt: skip
REFUSED = {
    "mlp_image_classification": "does not have in float64: use --precision=float32",  # its top-5 accuracy
    "supervised_contrastive_learning": "does not have in float64: use --precision=float32",  # its RandomRotation
    "reptile": "a loop of your own over such values runs as a script, on the same machines (docs/any_script.md)",
}
SLOW = {  # more than five seconds each; vae is one of those that are left
    "timeseries_classification_from_scratch", "siamese_network_contrastive",
    "oxford_pets_image_segmentation", "conditional_gan", "text_classification_with_transformer",
    "wide_deep_cross_networks", "timeseries_anomaly_detection", "timeseries_classification_transformer",
    "addition_rnn", "bidirectional_lstm_imdb", "vq_vae", "lstm_character_level_text_generation", "siamese_network",
    *DEPENDENT,
}  # fmt: skip
ALL = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in FILES]


def settings(name: str, *more: str) -> TrainConfig:
    """Returns the settings of an example's few steps of a small batch."""
    module = f"tests.keras_io.{name}"
    flags = [f"--model={module}:build", f"--data={module}:data", "--global_batch_size=4", "--steps=2"]
    return resolve([*flags, *getattr(importlib.import_module(module), "FLAGS", ()), *more]).config


def glue(name: str) -> int:
    """Returns the number of lines below `# Glue` that are not empty."""
    return sum(1 for line in FILES[name].read_text(encoding="utf-8").split("\n# Glue\n")[1].splitlines() if line)


def test_there_are_twice_twelve_with_little_glue_and_the_page_says_how_much() -> None:
    page = (ROOT / "docs" / "keras_io.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\w+)\]\(.*?\) \| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert [(name, int(lines)) for name, lines, _ in rows] == [(name, glue(name)) for name in FILES]
    assert len(FILES) == 24
    assert max(glue(name) for name in FILES) <= MOST_GLUE
    assert {name for name, _, result in rows if "same numbers" not in result} == {*DEPENDENT, *REFUSED}


@pytest.mark.parametrize("name", ALL)
def test_an_example_trains_on_two_replicas_with_the_numbers_of_one(
    name: str, monkeypatch: Patch, separate_steps: None
) -> None:
    monkeypatch.setattr(replica_check, "COMPARED_STEPS", 1 if name in DEPENDENT else 2)
    if name in REFUSED:
        with refused(REFUSED[name]):
            replica_check.compare(settings(name))
        return
    problems, _ = replica_check.compare(settings(name))
    assert bool(problems) is (name in DEPENDENT)
    assert all("twice as large" not in line for line in problems)
    if problems:
        assert DEPENDENT[name] in problems[-1]


# A subclassed model, callbacks, a metric without float64, no get_config; tests/test_examples.py has a GAN.
@pytest.mark.parametrize("name", [
    "vae", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "timeseries_classification_from_scratch", "mlp_image_classification", "collaborative_filtering_movielens",
    )),
])  # fmt: skip
def test_a_whole_job_runs_and_saves_its_model(name: str, tmp_path: Path) -> None:
    more = ["--callbacks=tests.keras_io.timeseries_classification_from_scratch:callbacks"] * name.startswith("time")
    job_dir = run_job(settings(name, f"--job_dir={tmp_path}", "--replicas=2", *more))
    (*_, entry) = (entry for entry in read_stats(job_dir)[0] if entry["kind"] == "report")
    assert entry["step"] == 2
    assert "loss" in entry["losses"]
    assert (job_dir / "model" / "saved_model").is_dir()
