"""Tests candidates that start and that fail, and what is printed about them."""

import sys
from functools import partial

import pytest

from benchmarks import input_pipeline, startup
from benchmarks.processes import Candidate, ProcessError, digits_file, seconds_until, started


def test_a_peer_that_fails_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with started({"PyTorch": partial(Candidate, "nothing", [], 1)}, 0.1) as candidates:
        assert candidates == {}
    assert capsys.readouterr().out == "PyTorch: left out: ModuleNotFoundError: No module named 'benchmarks.nothing'\n"


def test_ours_must_not_fail() -> None:
    with pytest.raises(ProcessError, match="nothing"), started({"ours": partial(Candidate, "nothing", [], 1)}, 0.1):
        pass


@pytest.mark.parametrize(("program", "reason"), [
    ("import sys; print('step 1', flush=True); sys.exit('the disk is full')", "the disk is full"),
    ("import sys; print('no such line'); print('why', file=sys.stderr)", "why"),
    ("pass", "no reason was given"),
])  # fmt: skip
def test_a_process_without_the_expected_line_is_an_error_with_its_last_line(program: str, reason: str) -> None:
    with pytest.raises(ProcessError, match=f"^{reason}$"):
        seconds_until("step 1", [sys.executable, "-c", program])


@pytest.mark.slow  # a process with TensorFlow
def test_a_step_is_traced_without_a_job() -> None:
    assert startup.alone() > 0


@pytest.mark.parametrize("model", ["mlp", "wgan_gp"])
def test_an_input_pipeline_reads_the_images_of_its_steps(model: str) -> None:
    flags = [f"--model={model}", "--image_size=16", "--global_batch_size=8", "--replicas=1"]
    flags += ["--critic_steps=3"] if model == "wgan_gp" else []
    with digits_file(flags) as (config, _):
        run, _ = input_pipeline.make_candidate(config)
        assert run(70) > 0  # it counts the images itself
