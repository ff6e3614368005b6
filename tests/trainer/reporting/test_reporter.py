"""Tests what people read of a run and what programs read."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fixtures import Capture, Log, Patch
from tests.support import read_lines
from tests.workers import until
from trainer.base.log import log, start_logging
from trainer.base.run_files.job_directory import JobDir
from trainer.base.run_files.job_files import append_stats, drop_stats_after
from trainer.base.settings.train_config import TrainConfig
from trainer.data.image_arrays import to_uint8
from trainer.data.sample_grids import encode_png, grid
from trainer.reporting.progress import Progress, RunningMeans, StepLogs
from trainer.reporting.reporter import EventFiles, Reporter, TuningMetric, fitting_line, status_line
from trainer.reporting.resources import Gpus


def test_tensorboard_gets_scalars_and_images(tmp_path: Path) -> None:
    picture = np.arange(12, dtype=np.uint8).reshape(4, 3, 1)
    for first_step in (1, 21):
        files = EventFiles(tmp_path, first_step)
        if first_step == 1:
            files.scalars(3, {"critic_loss": -1.5})
            files.image(5, "samples", picture)
        files.close()
    records = tf.data.TFRecordDataset(list(map(str, tmp_path.iterdir())))
    events = [tf.compat.v1.Event.FromString(record.numpy()) for record in records]
    starts = [
        event.step for event in events if event.session_log.status == tf.compat.v1.SessionLog.START
    ]
    assert sorted(starts) == [1, 21]
    (scalar_step, scalar), (image_step, image) = [
        (event.step, value) for event in events for value in event.summary.value
    ]
    assert (scalar_step, scalar.tag, tf.make_ndarray(scalar.tensor)) == (3, "critic_loss", -1.5)
    assert scalar.metadata.plugin_data.plugin_name == "scalars"
    width, height, png = tf.make_ndarray(image.tensor)
    assert (image_step, image.tag, width, height) == (5, "samples", b"3", b"4")
    assert image.metadata.plugin_data.plugin_name == "images"
    assert np.array_equal(tf.io.decode_png(png), picture)


def test_stats_after_the_resumed_step_and_damaged_lines_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    for step in (10, 20, 30):
        append_stats(tmp_path, {"kind": "report", "step": step, "losses": {"loss": float("nan")}})
    file.write_text(
        file.read_text() + '[1]\n{"step": "x"}\n\x00\n{"kind": "report", "step": 40, "lo'
    )
    drop_stats_after(tmp_path, 20)
    append_stats(tmp_path, {"kind": "report", "step": 30, "losses": {"loss": 1.0}})
    found = read_lines(file)
    assert [(entry["step"], entry["losses"]["loss"]) for entry in found] == [
        (10, None),
        (20, None),
        (30, 1.0),
    ]


def test_the_tuning_file_has_the_format_of_vertex_ai(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "output.metrics"
    metric = TuningMetric(
        "critic_loss", {"CLOUD_ML_HP_METRIC_FILE": str(file), "CLOUD_ML_TRIAL_ID": "7"}
    )
    for step in range(150):
        metric.report(step, step / 2, "ckpt-1" if step else None)
    lines = read_lines(file)
    assert len(lines) == 100
    assert lines[-1].pop("timestamp")
    assert lines[-1] == {
        "trial": "7",
        "critic_loss": "74.5",
        "global_step": "149",
        "checkpoint_path": "ckpt-1",
    }


def test_lines_are_json_with_a_severity_on_vertex(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("CLOUD_ML_JOB_ID", "123")
    for text in ("two\nlines", "plain"):
        start_logging()
        log.info(text)
        log.error("bad")
        monkeypatch.delenv("CLOUD_ML_JOB_ID", raising=False)
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        '{"severity": "INFO", "message": "two\\nlines"}',
        '{"severity": "ERROR", "message": "bad"}',
        "plain",
    ]
    assert output.err == "error: bad\n"
    logging.getLogger("trainer").handlers.clear()


def test_a_status_line_is_complete() -> None:
    progress = Progress(500, 1000, steps_per_epoch=40, examples_per_step=64)
    logs = StepLogs(("loss",), np.full((10, 1), 2.0), {})
    progress.whole.add(logs, 5.0, timed=True)
    entry: Any = {
        "losses": {"loss": 2.0},
        "metrics": {"accuracy": 0.5},
        "images_per_second": 1280.4,
        "step_seconds": 0.5,
        "memory_gib": 1.0,
        "gpus": [{"memory_gib": 3.0, "utilization_percent": 87.0}],
    }
    assert (
        status_line(entry, progress)
        == "step 500/1,000  epoch 12.5  loss 2  accuracy 0.5  1,280 images/s  0.5 s/step  1.00 GiB "
        " GPU 3.0 GiB 87 %  4:10 left"
    )
    entry["gpus"] = [{"memory_gib": 3.0, "utilization_percent": None}] + [
        dict.fromkeys(entry["gpus"][0])
    ] * 2
    assert "1.00 GiB  GPU 3.0 GiB  4:10 left" in status_line(entry, progress)
    progress.flops = 6_170_000_000_000
    for peak, shown in ((0, ""), (2 * 494, " (MFU 1.2 %)")):
        progress.peak_tflops = peak
        entry |= progress.speeds(progress.whole)
        assert f"12.3 TFLOP/s{shown}  1.00 GiB" in status_line(entry, progress)


def test_a_line_for_people_has_the_same_columns_and_a_value_beside_its_evaluation() -> None:
    values = {
        "loss": 0.5,
        "accuracy": 1 / 3,
        "val_loss": -1.23456e-5,
        "val_accuracy": 1.0,
        "val_new": 2.0,
    }
    ends = ["9,742 examples/s", "waits for input 45 %", "0:01 left"]
    line = fitting_line("epoch  1/10", values, ends)
    columns = "epoch  1/10  loss 0.5       val_loss -1.23e-05  accuracy 0.3333    val_accuracy 1"
    assert line == f"{columns}         val_new 2"
    del values["val_new"]
    assert fitting_line("epoch  1/10", values, ends) == f"{columns}         0:01 left"
    values |= {"auc": 0.75, "val_auc": 0.75}
    kept = fitting_line("epoch  1/10", values, ends, {"val_auc"})
    assert kept.endswith("accuracy 0.3333    val_auc 0.75      0:01 left")
    assert len(kept) <= 100
    shown = fitting_line("step 1/2", {"loss": 1.0}, ["7 images/s", "", "0:01 left"])
    assert shown == "step 1/2  loss 1         7 images/s  0:01 left"


def test_the_bar_on_a_terminal_shows_losses_speed_and_time_left(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    progress = Progress(0, 20, steps_per_epoch=4, examples_per_step=8)
    reporter = Reporter(
        TrainConfig(tensorboard=False),
        JobDir(tmp_path, tmp_path / "checkpoints", tmp_path / "logs", tmp_path / "model"),
        progress,
        lambda: None,
    )
    reporter.begin()
    for _ in range(2):
        logs = StepLogs(("[/loss]",), np.full((5, 1), 1.25), {})
        progress.advance(logs, 1.0)
        reporter.on_call(progress, logs)
    reporter.close()
    assert "10/20 40 images/s  0:02 left  [/loss] 1.25" in re.sub(
        r"\x1b\[[\d;?]*\w", "", capsys.readouterr().err
    )


def test_a_run_without_a_terminal_shows_a_line_a_minute(
    tmp_path: Path, monkeypatch: Patch, caplog: Log
) -> None:
    clock = [1e6]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    caplog.set_level("INFO", "trainer")
    progress = Progress(0, 1000, steps_per_epoch=1000, examples_per_step=8)
    reporter = Reporter(
        TrainConfig(tensorboard=False, epochs=1),
        JobDir(tmp_path, tmp_path / "checkpoints", tmp_path / "logs", tmp_path / "model"),
        progress,
        lambda: None,
    )
    reporter.begin()
    logs = StepLogs(("loss",), np.full((1, 1), 1.25), {})
    for _ in range(13):  # 130 seconds
        clock[0] += 10
        progress.advance(logs, 1.0)
        reporter.on_call(progress, logs)
    reporter.close()
    steps = [line.split()[1] for line in caplog.messages]
    assert steps == ["6/1,000", "12/1,000"]


def test_the_call_that_traces_is_not_timed() -> None:
    running = RunningMeans(examples_per_step=10)
    running.add(StepLogs(("loss",), np.array([[4.0]]), {}), 60.0, timed=False)
    assert (running.step_seconds, running.images_per_second) == (None, None)
    running.add(StepLogs(("loss",), np.array([[1.0], [1.0]]), {}), 1.0, timed=True)
    assert (running.means(), running.step_seconds, running.images_per_second) == (
        {"loss": 2.0},
        0.5,
        20.0,
    )
    logs = StepLogs(("accuracy", "loss"), np.array([[0.1, 3.0], [0.3, 1.0]]), {"accuracy": 0.9})
    assert logs.means() == {"accuracy": 0.9, "loss": 2.0}, (
        "a Keras metric replaces the scalar of its name"
    )


def test_training_never_waits_for_nvidia_smi(tmp_path: Path, monkeypatch: Patch) -> None:
    """Holds the tool back until the first report is out; it is then asked for the GPUs of this
    process only."""
    answers = tmp_path / "answers"
    tool = tmp_path / "nvidia-smi"
    os.mkfifo(answers)
    tool.write_text(
        f'#!/bin/sh\necho "$3" >> {tmp_path}/calls\nread line < {answers}\necho "$line"\necho "9,'
        ' 9"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    gpus = Gpus(1)
    assert gpus.readings == []
    answer = os.open(answers, os.O_RDWR)  # which never waits for a reader
    os.write(answer, b"2048, 87\n")
    until(lambda: gpus.readings)
    gpus.close()
    os.close(answer)
    assert gpus.readings == [{"memory_gib": 2.0, "utilization_percent": 87.0}]
    assert (tmp_path / "calls").read_text() == "--id=2,3\n"


def test_a_grid_holds_every_image_in_order() -> None:
    images = np.stack([np.full((64, 64, 3), 40 * index, np.uint8) for index in range(5)])
    picture = grid(images)
    assert picture.shape == (2 * 66 + 2, 3 * 66 + 2, 3)
    centres = picture[[34, 100]][:, [34, 100, 166], 0]
    assert centres.tolist() == [[0, 40, 80], [120, 160, 255]]
    assert tf.io.decode_png(encode_png(picture)).shape == picture.shape
    # small images are enlarged
    assert grid(np.zeros((4, 16, 16, 1), np.uint8)).shape == (134, 134, 1)
    values = tf.constant([-2.0, -1.0, 0.0, 0.999, 1.0, 3.0])
    assert to_uint8(values).numpy().tolist() == [0, 0, 128, 255, 255, 255]
