"""Tests which variables for GPUs are set before TensorFlow starts, and that those of the user stay."""

from pathlib import Path

import pytest

from trainer.cluster.gpu_environment import gpu_environment, set_gpu_environment

SET = {"TF_GPU_THREAD_MODE": "gpu_private", "CUDA_CACHE_MAXSIZE": "4294967296"}


@pytest.mark.parametrize(("given", "kept"), [
    ({}, {**SET, "CUDA_CACHE_PATH": "cache/cuda"}),
    ({"TF_GPU_THREAD_MODE": "global"}, {**SET, "TF_GPU_THREAD_MODE": "global", "CUDA_CACHE_PATH": "cache/cuda"}),
    ({"CUDA_CACHE_PATH": "mine"}, {**SET, "CUDA_CACHE_PATH": "mine"}),
    ({"CUDA_CACHE_DISABLE": "1"}, {"TF_GPU_THREAD_MODE": "gpu_private", "CUDA_CACHE_DISABLE": "1"}),
])  # fmt: skip
def test_a_variable_of_the_users_stays(
    given: dict[str, str], kept: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    environment = {"HOME": "x", **given}
    set_gpu_environment(Path("cache/cuda"), environment)
    assert gpu_environment(environment) == kept
    assert Path("cache/cuda").is_dir() == (kept.get("CUDA_CACHE_PATH") == "cache/cuda")


def test_a_cache_that_cannot_be_made_is_left_to_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    environment: dict[str, str] = {}
    set_gpu_environment(tmp_path / "nvidia-smi" / "cuda", environment)
    assert environment == SET
