"""Tests whole jobs in this process: what they write, how they resume, what they do with models of
users."""

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import models
from tests.drill import lines, read
from tests.fixtures import SLOW, Log, Make, Patch, parametrize
from tests.support import Signals, largest_difference, prepared, refused, resolved, run_steps, slow
from tests.support import run_job as run
from trainer.base.errors import DONE, INTERRUPTED
from trainer.base.settings.model_settings import MODELS
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster import devices
from trainer.cluster.devices import cpu_info, fast_precision, half_precision
from trainer.cluster.strategy import make_replicas
from trainer.reporting.error_lines import is_out_of_memory, out_of_memory
from trainer.reporting.result import library_versions
from trainer.run import job, training_run
from trainer.run.start import StartedJob

# where the model does not matter: a GAN takes more than twice as long
MLP = ("--model=mlp", "--dropout=0.3")


@pytest.mark.exports
def test_a_run_leaves_what_the_contract_says(small_config: Make) -> None:
    every = ("--report_every_steps=2", "--sample_every_steps=3")
    config = small_config("--model=dcgan", "--replicas=2", "--steps=6", *every)
    folder = run(config)
    assert {path.name for path in folder.iterdir()} == {
        "run.json",
        "stats.jsonl",
        "result.json",
        "samples",
        "checkpoints",
        "logs",
        "model",
        ".lock",
    }
    assert {path.name for path in (folder / "samples").iterdir()} == {
        "step-00000003.png",
        "step-00000006.png",
    }
    assert {path.name for path in (folder / "model").iterdir()} == {
        "model.keras",
        "model.h5",
        "saved_model",
        "serving.json",
        "critic.keras",
        "generator_raw.keras",
    }

    described = {
        "batch": "global batch 8 = 2 replicas x 4",
        "devices": ["CPU:0", "CPU:1"],
        "gpus": [],
        "strategy": "MirroredStrategy",
        "collectives": "ring",
        "command": "python -m trainer.task '--x=a b'",
        "config": json.loads(json.dumps(dataclasses.asdict(config))),
        "versions": library_versions(),
    }
    assert {
        name: value for name, value in read(folder / "run.json").items() if name in described
    } == described

    reports = lines(folder, "report")
    assert [entry["step"] for entry in reports] == [2, 4, 6]
    last = reports[-1]
    assert (*last["losses"], *last["metrics"]) == MODELS["dcgan"].metrics
    assert last["images_per_second"] == pytest.approx(8 / last["step_seconds"], rel=1e-3)
    assert last["memory_gib"] > 0.05

    result = read(folder / "result.json")
    assert (result["state"], result["steps"], result["error"]) == ("done", 6, None)
    assert result["final"]["losses"] == reports[-1]["losses"]
    assert 0 < result["training_seconds"] <= result["wall_seconds"]


def test_the_same_command_resumes_until_the_run_is_done(small_config: Make, caplog: Log) -> None:
    """Covers a GAN in tests/e2e/test_task.py, and below on more replicas."""
    flags = (*MLP, "--precision=float64", "--report_every_steps=1")
    config = small_config(*flags, "--steps=5", "--checkpoint_every_steps=2")
    run(config)
    more = small_config(*flags, "--steps=9")
    folder = run(more)
    reports = lines(folder, "report")
    assert [entry["step"] for entry in reports] == list(range(1, 10))
    # each start traces the graph
    assert [entry["untimed_steps"] for entry in reports] == [1, 0, 0, 0, 0, 1, 0, 0, 0]
    undisturbed, logs = run_steps(more, 9)
    assert np.mean([entry["losses"]["loss"] for entry in reports]) == pytest.approx(
        logs.means()["loss"], rel=1e-12
    )
    assert largest_difference(undisturbed, prepared(more).setup.model) < 1e-12

    assert read(folder / "run.json")["versions_by_step"][0]["step"] == 0
    before = (folder / "result.json").read_text()
    run(more)
    assert (folder / "result.json").read_text() == before
    assert "finished already: 9 of 9 steps are done" in caplog.text
    run(small_config(*flags, "--steps=7"))
    assert (
        "finished already: 9 of 7 steps are done: use more than 9 steps to continue" in caplog.text
    )


@parametrize(
    "flags",
    [
        pytest.param(MLP, id="mlp"),
        slow(("--model=r3gan", "--diff_augment=color,translation,cutout"), id="r3gan"),
    ],
)
def test_more_replicas_resume_with_the_same_numbers(
    flags: tuple[str, ...], small_config: Make
) -> None:
    run(small_config("--steps=5", "--precision=float64", *flags))
    folder = run(small_config("--steps=9", "--precision=float64", "--replicas=2", *flags))
    _, logs = run_steps(small_config("--steps=9", "--precision=float64", *flags), 9)
    before, after = (entry["losses"] for entry in lines(folder, "report"))
    for name in before:
        assert (5 * before[name] + 4 * after[name]) / 9 == pytest.approx(
            logs.means()[name], rel=1e-10, abs=1e-10
        )


def test_the_last_line_of_values_has_the_evaluation_of_the_last_epoch(
    small_config: Make, caplog: Log
) -> None:
    run(small_config("--steps=5", "--global_batch_size=256", "--evaluation_fraction=0.2"))
    assert [" val_loss " in text for text in caplog.messages if text.startswith("last ")] == [True]


def test_versions_and_code_are_those_of_the_steps_that_count(
    small_config: Make, caplog: Log
) -> None:
    """A start that was killed before it saved leaves no step of its versions; equal bits take no
    other version."""
    now = {"tensorflow": tf.__version__, "keras": keras.__version__}
    first = {"step": 0, **now}
    killed = {"step": 4, "tensorflow": "2.20.0", "keras": "3.15.0"}
    before = {"versions": killed, "versions_by_step": [first, killed]}
    started = StartedJob.open(small_config(*MLP), [], 0.0)
    for step in (4, 0):
        assert started.versions_by_step(before, step) == [first]
    started = StartedJob.open(replace(started.config, model="tests.own_data:build"), [], 0.0)
    assert started.versions_by_step(before, 4) == [first]  # the functions before were built in
    (entry,) = started.versions_by_step({}, 0)
    assert started.versions_by_step({"versions_by_step": [entry]}, 4) == [entry]
    assert "a file of the packages" not in caplog.text
    edited = {**first, "code": "another"}
    assert started.versions_by_step({"versions_by_step": [edited]}, 4) == [
        edited,
        {**entry, "step": 4},
    ]
    assert (
        "a file of the packages of model, data or callbacks has changed: what was trained before"
        in caplog.text
    )
    started.versions_by_step(before, 6)
    assert "the versions have changed (tensorflow: '2.20.0' " in caplog.text
    for promise in ({"virtual_replicas": 2}, {"deterministic": True}):
        started.config = replace(small_config(*MLP), **promise)
        with refused("the versions have changed since this run began (tensorflow: '2.20.0' before"):
            started.versions_by_step(before, 6)


@SLOW
def test_what_later_commands_do_to_a_finished_run(small_config: Make) -> None:
    """Those with other settings are refused, one that was killed before its export exports, a
    failure is reported."""
    folder = run(small_config(*MLP, "--steps=40", "--global_batch_size=64"))
    assert [(entry["step"], entry["epoch"]) for entry in lines(folder, "epoch")] == [(28, 1.0)]
    result = read(folder / "result.json")
    assert result["epoch_seconds"] == []  # the first epoch held the tracing of the graph
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    same = (*MLP, "--global_batch_size=64")
    with refused("another run (seed: 0 before, 1 now; tf32: True before, False now)"):
        run(small_config(*same, "--seed=1", "--tf32=false"))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    shutil.rmtree(folder / "model")
    run(small_config(*same, "--steps=40"))
    assert (folder / "model" / "model.keras").is_file()
    assert read(folder / "result.json")["final"] == result["final"]

    with refused("no accelerators are visible"):
        run(small_config(*same, "--expect_devices=1"))
    assert read(folder / "result.json")["state"] == "done"  # it did not come to train
    # The rules of a named model would refuse it.
    with refused("this run reports"):
        run(replace(small_config(*same, "--steps=42"), tuning_metric="nothing"))
    result = read(folder / "result.json")
    assert (result["state"], result["steps"]) == ("failed", 41)


@pytest.mark.exports
def test_a_subclassed_model_is_saved_as_far_as_keras_can(small_config: Make) -> None:
    folder = run(small_config("--model=tests.models:subclassed", "--global_batch_size=64"))
    assert {path.name for path in (folder / "model").iterdir()} == {
        "model.keras",
        "saved_model",
        "serving.json",
    }
    served = tf.saved_model.load(str(folder / "model" / "saved_model"))
    assert served.serve(tf.zeros((3, 16, 16, 1))).shape == (3, 10)


def test_a_failed_run_leaves_its_state(small_config: Make) -> None:
    config = small_config(
        "--model=tests.models:diverging",
        "--learning_rate=0.1",
        "--report_every_steps=2",
        "--checkpoint_every_steps=2",
    )
    with refused("step 3: loss is NaN or infinite"):
        run(config)
    result = read(Path(config.job_dir) / "result.json")
    assert (result["state"], result["error"].partition(" or ")[0]) == (
        "failed",
        "step 3: loss is NaN",
    )
    assert result["final"]["losses"] == {"loss": pytest.approx(0.1)}
    assert [entry["step"] for entry in lines(Path(config.job_dir), "report")] == [2]
    assert [path.name for path in (Path(config.job_dir) / "checkpoints").iterdir()] == [
        "step-00000002"
    ]


@SLOW  # TensorFlow waits ten seconds for memory before it gives up
def test_out_of_memory_reports_what_to_lower(small_config: Make) -> None:
    config = small_config("--model=tests.models:hungry", "--replicas=1", "--global_batch_size=16")
    with refused(
        "out of memory with global batch 16 = 1 replica x 16, image_size=16: use --micro_batches=2,"
        " lower"
    ):
        run(config)
    assert read(Path(config.job_dir) / "result.json")["state"] == "failed"


@parametrize(
    "settings, advice",
    [
        (
            {},
            (
                "= 1 replica x 64, image_size=32: use --micro_batches=2, lower global_batch_size or"
                " image_size"
            ),
        ),
        ({}, "try --precision=mixed_bfloat16; `python -m deploy plan` says what fits"),
        ({"precision": "mixed_float16"}, "image_size; `python -m deploy plan` says what fits"),
        (
            {
                "global_batch_size": 12,
                "micro_batches": 2,
            },  # 6 rows each; with 3 micro-batches 4 still
            "= 1 replica x 2 micro-batches x 6, image_size=32: use --micro_batches=4, lower",
        ),
    ],
)
def test_out_of_memory_names_settings_that_save_memory(
    settings: dict[str, Any], advice: str
) -> None:
    config = TrainConfig(**settings)
    assert advice in str(out_of_memory(config, make_replicas(config)))


def test_memory_that_ran_out_on_another_device_and_old_cards_are_known(monkeypatch: Patch) -> None:
    """The first error may come from a device that waited for the one that failed, and quotes it."""
    for cause, expected in (("OOM when allocating tensor", True), ("something else", False)):
        error = tf.errors.InternalError(None, None, f"Collective ops is aborted by: {cause}")
        assert is_out_of_memory(error) is expected
    assert half_precision() == "mixed_bfloat16"
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": (7, 5)}
    )
    assert half_precision() == fast_precision(on_gpus=True) == "mixed_float16"
    monkeypatch.setattr(
        tf.config.experimental, "get_device_details", lambda gpu: {"compute_capability": (6, 0)}
    )
    assert fast_precision(on_gpus=True) == ""


@pytest.mark.parametrize(
    ("units", "onednn", "fast"),
    [
        ("fpu avx512_bf16", True, "mixed_bfloat16"),
        ("amx_bf16", True, "mixed_bfloat16"),
        ("amx_bf16", False, ""),
        ("avx512f", True, ""),
    ],
)
def test_a_processor_with_units_for_bfloat16_is_known(
    units: str, onednn: bool, fast: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name\t: one of 2026\nflags\t\t: fpu {units}\nbugs\t\t: none\n")
    monkeypatch.setattr(devices, "CPU_INFO", file)
    monkeypatch.setattr(devices, "uses_onednn", lambda: onednn)
    assert fast_precision(on_gpus=False) == fast
    assert (cpu_info("model name"), cpu_info("none")) == ("one of 2026", "")


@pytest.mark.parametrize(
    ("least", "named", "long_s", "lines"),
    [(0, (), 0, 1), (0, ("precision",), 0, 0), (99, (), 0, 0), (0, (), 99, 0)],
)
def test_long_steps_name_the_precision_that_may_be_faster_once(
    least: float,
    named: Sequence[str],
    long_s: float,
    lines: int,
    small_config: Make,
    monkeypatch: Patch,
    caplog: Log,
) -> None:
    monkeypatch.setattr(training_run, "SLOW_STEP_S", least)
    monkeypatch.setattr(training_run, "LONG_RUN_S", long_s)
    monkeypatch.setattr(training_run, "fast_precision", lambda on_gpus: "mixed_bfloat16")
    monkeypatch.setattr(training_run, "TIMED_STEPS", 2)
    config = small_config(*MLP, "--steps=5", "--steps_per_loop=1")
    assert job.run(config, [], time.monotonic(), named=named) == DONE
    assert caplog.text.count("--precision=mixed_bfloat16 may make these steps") == lines


def test_a_callback_can_stop_the_run_and_a_fault_is_kept_in_the_result(
    small_config: Make, monkeypatch: Patch
) -> None:
    flags = ("--callbacks=tests.models:stop_at_3", "--steps=50", "--steps_per_loop=1")
    folder = run(small_config(*flags))
    result = read(folder / "result.json")
    assert (result["state"], result["steps"]) == ("done", 3)
    shutil.rmtree(folder)
    # int() takes no folder: an exception without a frame of the user's
    monkeypatch.setattr(job, "export", int)
    with pytest.raises(TypeError) as raised:
        run(small_config(*flags))
    result = read(folder / "result.json")
    assert (result["state"], result["error"]) == ("failed", f"TypeError: {raised.value}")


@parametrize(
    "flag, line",
    [
        (
            "--callbacks=tests.models:not_callbacks",
            "it must return a list of keras.callbacks.Callback",
        ),
        ("--callbacks=tests.models", "write it as package.module:function"),
        (
            "--model=wgan_gp --callbacks=tests.models:by_schedule",
            "LearningRateScheduler changes model.optimizer",
        ),
        (
            "--model=tests.models:not_a_model",
            "the function returned str: it must return a keras.Model",
        ),
        ("--model=tests.models:nothing", "tests.models has no function nothing"),
    ],
)
def test_what_does_not_fit_is_refused(small_config: Make, flag: str, line: str) -> None:
    with refused(line):
        run(small_config(*flag.split()))


@SLOW
def test_a_file_that_draws_at_its_import_does_so_after_the_seed_in_every_start(
    tmp_path: Path,
) -> None:
    """Its callbacks are imported first, and a resumed run refuses other rows."""

    starts = []
    drawn = "--callbacks=tests.drawing:callbacks"
    for name, *flags in (
        ("run", drawn, "--steps=2"),
        ("run", drawn, "--steps=4"),
        ("other", "--steps=4"),
    ):
        sys.modules.pop("tests.drawing", None)
        np.random.seed()  # as in a new process
        own = ["--model=tests.drawing:build", "--data=tests.drawing:data", "--global_batch_size=8"]
        folder = run(
            resolved(*own, f"--job_dir={tmp_path / name}", "--report_every_steps=2", *flags)
        )
        starts.append(
            (
                read(folder / "result.json")["final"]["losses"],
                read(folder / "run.json")["data"]["content"],
            )
        )
    assert starts[1] == starts[2]


@SLOW
def test_what_a_callback_does_in_the_end_changes_no_checkpoint(
    small_config: Make, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A signal is no end of training; a run that has ended and gets more steps goes on from its
    last weights."""
    same = [
        "--model=tests.models:classifier",
        "--callbacks=tests.models:first_weights",
        "--global_batch_size=512",
    ]

    def start(name: str, *flags: str) -> tuple[int, Any]:
        config = small_config(*same, "--learning_rate=0.01", f"--job_dir={tmp_path / name}", *flags)
        models.HEARD.clear()
        code = job.run(config, ["python", "-m", "trainer.task"], 0.0)
        return code, read(tmp_path / name / "result.json").get("history")

    whole = start("whole", "--steps=8")
    assert (whole[0], len(models.HEARD)) == (DONE, 1)
    start("more", "--steps=4")
    assert start("more", "--steps=8") == whole
    signals = Signals(monkeypatch)
    monkeypatch.setattr(models.FirstWeights, "after_epoch", lambda self, epoch: signals.come())
    assert start("signalled", "--steps=8")[0] == INTERRUPTED
    assert models.HEARD == []
    monkeypatch.undo()
    assert start("signalled", "--steps=8") == whole
