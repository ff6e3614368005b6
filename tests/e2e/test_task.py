"""Runs the commands of a user, each in a separate process."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.drill import last_state, read
from tests.fixtures import SLOW, parametrize
from tests.support import resolved, run_job, run_steps, slow
from trainer.training.checkpoint import variables_of

ROOT = Path(__file__).parents[2]
SMALL = [
    "--recipe=wgan_gp_digits",
    "--width=4",
    "--latent_dim=8",
    "--global_batch_size=8",
    "--critic_steps=1",
    "--steps=6",
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TF_CPP")}
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", "trainer.task", *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


MLP = ["--model=mlp", "--data=digits", "--image_size=16", "--width=8", "--global_batch_size=8"]
AFTER_A_GAN = [r"pictures  .*/samples", r"next      python -m trainer.generate .*"]


@parametrize(
    "flags, loss, ends",
    [
        ([*MLP, "--steps=6"], "loss", [r"next      python -m trainer.serve .*"]),
        slow(SMALL, "critic_loss", AFTER_A_GAN),
    ],
    ids=["mlp", "wgan_gp"],
)
def test_a_run_on_two_replicas_prints_its_decisions(
    flags: list[str], loss: str, ends: list[str], tmp_path: Path
) -> None:
    done = run(*flags, f"--job_dir={tmp_path}", "--replicas=2", "--report_every_steps=3")
    assert (done.returncode, done.stderr) == (0, "")
    patterns = [
        r"loads TensorFlow …",
        r"global batch 8 = 2 replicas x 4 on CPU:0, CPU:1",
        r"trains \w+ on 1,797 examples of digits, 16x16x1",
        r"starts from scratch",
        (
            r"each epoch trains on whole batches and leaves out 5 rows \(fit has a last, smaller"
            r" batch\)"
        ),
        r"builds the training step: .*",
        rf"step 3/6  {loss} .* left",
        rf"step 6/6  {loss} .*",
        r"done: 6 steps in \d+:\d\d, of which training \d+:\d\d, .* images/s",
        rf"last      {loss} .*",
        r"model     .*/model",
        *ends,
    ]
    lines = done.stdout.splitlines()
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), line


@SLOW
@pytest.mark.processor
def test_on_vertex_every_line_is_json(tmp_path: Path) -> None:
    """Runs with an NVIDIA driver in sight: what is set for GPUs is one of the lines, and kept.

    TensorFlow counts memory here as on a GPU, whatever the processor.
    """
    metrics = tmp_path / "hypertune" / "output.metrics"
    tool = tmp_path / "nvidia-smi"
    tool.touch(0o755)
    done = run(
        *SMALL,
        "--tuning_metric=critic_loss",
        f"--cache_dir={tmp_path}/cache",
        CLOUD_ML_JOB_ID="1",
        AIP_MODEL_DIR=f"{tmp_path}/base/model/",
        CLOUD_ML_HP_METRIC_FILE=str(metrics),
        PATH=f"{tool.parent}:{os.environ['PATH']}",
        CUDA_CACHE_MAXSIZE="7",
        TF_CPU_ALLOCATOR_USE_BFC="1",
    )
    assert done.returncode == 0
    logged = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["severity"] for line in logged} == {"INFO"}
    variables = {
        "TF_GPU_THREAD_MODE": "gpu_private",
        "CUDA_CACHE_PATH": f"{tmp_path}/cache/cuda",
        "CUDA_CACHE_MAXSIZE": "7",
    }
    shown = ", ".join(f"{name}={value}" for name, value in variables.items())
    assert logged[0]["message"] == f"GPU settings: {shown} (a variable that you set stays as it is)"
    assert read(tmp_path / "base" / "run.json")["gpu_environment"] == variables
    (peak,) = read(tmp_path / "base" / "result.json")["peak_device_memory_gib"]
    report = json.loads((tmp_path / "base" / "stats.jsonl").read_text().splitlines()[0])
    assert 0 < report["peak_device_memory_gib"][0] <= peak
    assert (tmp_path / "base" / "model" / "model.keras").is_file()
    assert read(metrics)["global_step"] == "6"


@SLOW
def test_ctrl_c_saves_and_the_same_command_gives_the_undisturbed_numbers(tmp_path: Path) -> None:
    """Calls are as long as they get: the signal arrives within one. The drills send SIGTERM."""
    # jit_compile=auto would compile, to measure, for a run of so many steps.
    flags = [
        *SMALL,
        "--precision=float64",
        "--report_every_steps=5",
        "--jit_compile=false",
        f"--job_dir={tmp_path}",
    ]
    command = [sys.executable, "-m", "trainer.task", *flags, "--steps=100000", "--verbose"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 40/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 75
    result = read(tmp_path / "result.json")
    assert result["state"] == "interrupted"
    assert f"state saved at step {result['steps']:,};" in rest
    steps = result["steps"] + 2
    run_job(resolved(*flags, f"--steps={steps}"))
    undisturbed, _ = run_steps(resolved(*flags, f"--steps={steps}"), steps)
    undisturbed.averaged_generator()  # as sampling does: it takes over the batch statistics
    ended = last_state(tmp_path)
    expected = variables_of(undisturbed)
    assert ended.keys() == expected.keys()
    assert all(
        np.allclose(value, expected[name], rtol=1e-9, atol=1e-12) for name, value in ended.items()
    )


@parametrize("program", ["trainer.task", "trainer.evaluate", "deploy"])
def test_a_python_without_the_packages_is_told_what_to_activate(program: str) -> None:
    command = [sys.executable, "-S", "-m", program]  # -S: as if nothing were installed
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "")
    assert line.startswith(f"error: {sys.executable} has no PyYAML")
    assert "source .venv/bin/activate" in line
