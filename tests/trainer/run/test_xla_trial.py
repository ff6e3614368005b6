"""Compiled steps on several GPUs are tried in a process of their own, which is ended where it hangs."""

import dataclasses
import time
from pathlib import Path

import pytest

from tests.fixtures import Log, Patch
from trainer.base.run_files.records import read_run_info
from trainer.base.settings.resolution import resolve
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import ONE_MACHINE
from trainer.run import job, trial_steps
from trainer.run.trial_steps import failure_of_trial, why_plain

MODEL = ["--model=mlp", "--data=digits", "--image_size=16", "--width=4", "--global_batch_size=16", "--steps=2"]
GPUS = ("GPU:0", "GPU:1")


@pytest.fixture
def trials(monkeypatch: Patch) -> list[float]:
    """Counts the trials of runs on two GPUs, each of which fails; no process starts."""
    made: list[float] = []

    def failed(arguments: list[str], seconds: float) -> str:
        made.append(seconds)
        return "NCCL hangs"

    monkeypatch.setattr(trial_steps, "local_devices", lambda config, cluster: GPUS)
    monkeypatch.setattr(trial_steps, "failure_of_trial", failed)
    return made


def test_only_what_is_asked_for_on_several_gpus_of_one_machine_is_tried(
    trials: list[float], monkeypatch: Patch
) -> None:
    asked = resolve([*MODEL, "--jit_compile=true"]).config
    assert why_plain(asked, MODEL, ONE_MACHINE) == "NCCL hangs"
    assert trials == [900.0]
    assert not why_plain(dataclasses.replace(asked, jit_compile="auto"), MODEL, ONE_MACHINE)
    assert not why_plain(dataclasses.replace(asked, micro_batches=2), MODEL, ONE_MACHINE)  # runs plain in any case
    assert not why_plain(asked, MODEL, Cluster(("one:1", "other:1"), 0))
    for devices in (GPUS[:1], ("CPU:0", "CPU:1")):
        monkeypatch.setattr(trial_steps, "local_devices", lambda config, cluster, devices=devices: devices)
        assert not why_plain(asked, MODEL, ONE_MACHINE)
    assert trials == [900.0]


def test_a_run_whose_trial_failed_trains_plain_steps(trials: list[float], tmp_path: Path, caplog: Log) -> None:
    flags = [*MODEL, "--jit_compile=true", f"--job_dir={tmp_path}"]  # on a CPU, where its steps could be compiled
    assert job.run(resolve(flags).config, ["python", "-m", "trainer.task", *flags], time.monotonic()) == 0
    compilation = read_run_info(tmp_path)[0]["compilation"]
    assert (compilation["compiled"], compilation["why"], trials) == (False, "NCCL hangs", [900.0])
    assert "tries a step on 2 GPUs in a process of its own, 15 min at most" in caplog.text


def test_a_trial_that_hangs_is_ended() -> None:
    why = failure_of_trial(MODEL, seconds=0.2)
    assert why == "a compiled step, tried in a process of its own, did not end within 0.2 s"


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "start"), [
    ([], ""),
    (["--replicas=2"], "tried in a process of its own: XLA "),  # cannot sum over CPUs
    (["--widht=1"], "tried in a process of its own: unknown"),
], ids=["one device", "two CPUs", "a mistake"])  # fmt: skip
def test_a_trial_tells_why_it_failed(flags: list[str], start: str) -> None:
    failure = failure_of_trial([*MODEL, *flags], seconds=600)
    assert failure.startswith(start)
    assert bool(failure) is bool(start)
