"""Tests that TF_CONFIG becomes a cluster, or an error of one line, which variables for GPUs are
set, and that freed memory is kept."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from tests.fixtures import Patch, parametrize
from tests.fuzz import examples, json_like, one_line
from tests.support import refused
from trainer.cluster.cluster_spec import Cluster, gpu_environment, read_cluster, set_gpu_environment

CHIEF = "training-workerpool0-ab-0:2222"
ONE = "training-workerpool1-ab-0:2222"
TWO = "training-workerpool1-ab-1:2222"


def tf_config(cluster: Any, kind: str = "chief", index: Any = 0) -> dict[str, str]:
    return {
        "TF_CONFIG": json.dumps(
            {"cluster": cluster, "task": {"type": kind, "index": index}, "job": {}}
        )
    }


@parametrize(
    "environment",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        tf_config({}),
        tf_config({"chief": [CHIEF]}),
        tf_config({"worker": [ONE]}, "worker"),
    ],
)
def test_none_and_a_chief_alone_are_one_machine(environment: dict[str, str]) -> None:
    cluster = read_cluster(environment)
    assert (cluster.workers, cluster.several, cluster.is_chief) == (1, False, True)


def test_a_worker_writes_on_a_disk_of_its_own() -> None:
    hosts = ("one:1", "one:2", "other:1")
    for path, writers in (("log.csv", [0, 2]), ("gs://b/log.csv", [0]), ("/gcs/b/log.csv", [0])):
        assert [index for index in range(3) if Cluster(hosts, index).writes(path)] == writers
    assert Cluster().writes("gs://b/log.csv")


@parametrize(
    "cluster, tasks",
    [
        ({"chief": [CHIEF], "worker": [ONE, TWO]}, [("chief", 0), ("worker", 0), ("worker", 1)]),
        # worker 0 is the chief
        ({"worker": [CHIEF, ONE, TWO]}, [("worker", 0), ("worker", 1), ("worker", 2)]),
    ],
)
def test_the_chief_comes_first_and_alone_writes(cluster: Any, tasks: list[tuple[str, int]]) -> None:
    for index, task in enumerate(tasks):
        worker = read_cluster(tf_config(cluster, *task))
        assert worker == Cluster((CHIEF, ONE, TWO), index)
        assert (worker.is_chief, worker.name(2)) == (index == 0, f"worker 2 ({TWO})")


@parametrize(
    "environment, message",
    [
        ({"TF_CONFIG": "{"}, "not valid JSON"),
        ({"TF_CONFIG": "3"}, "the variable must be a JSON object"),
        (tf_config(3), "cluster must be a JSON object"),
        (tf_config({"chief": CHIEF}), "cluster.chief must be a list of host:port"),
        (tf_config({"chief": ["host:99999"]}), "cluster.chief must be a list of host:port"),
        (tf_config({"chief": [CHIEF], "worker": [CHIEF]}), "appears more than once"),
        (
            tf_config({"chief": [CHIEF], "worker": [ONE]}, "worker", 1),
            "task.index is 1, but the cluster has 1 of worker",
        ),
        (
            tf_config({"chief": [CHIEF], "worker": [ONE]}, "worker", True),
            "task.index is True, but the cluster has 1 of",
        ),
        (
            tf_config({"master": [CHIEF], "worker": [ONE]}, "worker", 0),
            "this trainer has no tasks of role 'master'",
        ),
        (
            tf_config({"worker": [ONE, TWO]}, "chief"),
            "task.index is 0, but the cluster has 0 of chief",
        ),
        (
            tf_config({"chief": [CHIEF], "ps": [ONE]}),
            "this trainer has no tasks of role 'ps': supported are",
        ),
    ],
)
def test_what_is_malformed_is_one_line(environment: dict[str, str], message: str) -> None:
    with refused(message):
        read_cluster(environment)


WHOLE = {
    "cluster": {"chief": [CHIEF], "worker": [ONE, TWO]},
    "task": {"type": "worker", "index": 1},
}


@examples(100)
@given(json_like(WHOLE))
def test_no_text_makes_a_traceback(text: bytes) -> None:
    cluster = one_line(lambda: read_cluster({"TF_CONFIG": text.decode(errors="replace")}))
    assert cluster is None or 0 <= cluster.index < cluster.workers


MODE = {"TF_GPU_THREAD_MODE": "gpu_private"}
SCRATCH = {"TF_CUDNN_WORKSPACE_LIMIT_IN_MB": "1024"}
SET = {**MODE, "CUDA_CACHE_MAXSIZE": "4294967296"}


@parametrize(
    "mib, given, kept",
    [
        (15360, {}, {**SET, **SCRATCH, "CUDA_CACHE_PATH": "cache/cuda"}),
        (
            81559,
            {"TF_GPU_THREAD_MODE": "x"},
            {**SET, "TF_GPU_THREAD_MODE": "x", "CUDA_CACHE_PATH": "cache/cuda"},
        ),
        (81559, {"CUDA_CACHE_PATH": "mine"}, {**SET, "CUDA_CACHE_PATH": "mine"}),
        (
            15360,
            {**SCRATCH, "CUDA_CACHE_DISABLE": "1"},
            {**MODE, **SCRATCH, "CUDA_CACHE_DISABLE": "1"},
        ),
        (0, {}, SET),  # a folder that cannot be made: it is left to CUDA
    ],
)
def test_a_variable_of_the_users_stays(
    mib: int, given: dict[str, str], kept: dict[str, str], tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {mib or '[N/A]'}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    environment = {"HOME": "x", **given}
    set_gpu_environment("cache" if mib else "nvidia-smi", environment)
    assert gpu_environment(environment) == kept
    assert Path("cache/cuda").is_dir() == (kept.get("CUDA_CACHE_PATH") == "cache/cuda")


LARGE_ARRAY = """
import numpy, pathlib
from trainer.cluster.cluster_spec import keep_freed_memory
keep_freed_memory()
address = numpy.ones(2**23).ctypes.data  # 64 MiB
heap = next(x for x in pathlib.Path("/proc/self/maps").read_text().splitlines() if "[heap]" in x)
begin, end = (int(bound, 16) for bound in heap.split()[0].split("-"))
print(begin < address < end)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries are left alone")
@parametrize(("variables", "kept"), [({}, True), ({"MALLOC_MMAP_MAX_": "9"}, False)])
def test_large_arrays_are_made_of_memory_that_was_freed_before(
    variables: dict[str, str], kept: bool
) -> None:
    command = [sys.executable, "-c", LARGE_ARRAY]
    result = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(kept)
