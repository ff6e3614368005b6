"""Tests the phrase about TensorFlow, CUDA and driver, with a driver's library built here."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from trainer.base.errors import UserError
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster import gpu_software
from trainer.cluster.cluster_spec import Cluster
from trainer.cluster.strategy import local_devices

VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: 12\n"


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the file that a loaded driver shows."""
    (tmp_path / "version").write_text(VERSION)
    monkeypatch.setattr(gpu_software, "_LOADED", tmp_path / "version")


def test_missing_gpus_are_reported_with_the_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_software, "_LOADED", Path("/nowhere"))
    monkeypatch.setattr(gpu_software, "_DRIVER", "libno-such-driver.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")
    with pytest.raises(UserError) as caught:
        local_devices(TrainConfig(expect_devices=4), Cluster())
    line = str(caught.value)
    assert f"no accelerators are visible (TensorFlow {tf.__version__}, built " in line
    found = "no driver in /proc/driver/nvidia, and libno-such-driver.so.1 is not found"
    assert f"; {found} (LD_LIBRARY_PATH: /usr/local/nvidia/lib64)): check the machine's GPU count" in line


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        ({"is_cuda_build": True, "cuda_version": "12.5.1"}, "built for CUDA 12.5.1"),
        ({"is_cuda_build": False}, "built without CUDA"),
    ],
)
@pytest.mark.usefixtures("loaded")
def test_the_build_is_named(build: dict[str, object], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    assert f", {shown}; driver 535.129.03" in gpu_software.gpu_software()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
@pytest.mark.parametrize(("code", "shown"), [(0, "for CUDA up to 12.2"), (3, "libcuda.so.1 does not answer")])
@pytest.mark.usefixtures("loaded")
def test_the_driver_is_asked(code: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "driver.c"
    source.write_text(f"int cuDriverGetVersion(int *version) {{ *version = 12020; return {code}; }}\n")
    library = tmp_path / "libdriver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    opened = ctypes.CDLL(str(library))
    monkeypatch.setattr("ctypes.CDLL", lambda name: opened)
    assert gpu_software._driver().startswith("driver 535.129.03, ")
    assert gpu_software._driver().endswith(shown)
