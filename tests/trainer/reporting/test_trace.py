"""Tests how a profile is divided: spans with known parts, and profiles of a CPU and of GPUs made by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from trainer.base.run_files.breakdown import (
    ALL_REDUCE,
    CALL,
    DISPATCH,
    INPUT,
    MATRIX,
    MEMORY,
    TIME_SHARES,
    advice,
    divide,
    in_words,
    tried_by,
)
from trainer.reporting.trace import shares_of

MICROSECOND = 1_000_000  # in picoseconds
Lines = Mapping[str, Sequence[tuple[str, int, int]]]  # name of a thread or stream: (event, start, end) in microseconds


def write(file: Path, planes: Mapping[str, Lines], operations: Mapping[str, str] | None = None) -> Path:
    """Writes a profile; `operations`: what started a kernel, as TensorFlow (with a colon) or XLA names it."""
    space = xplane_pb2.XSpace()
    for name, lines in planes.items():
        plane = space.planes.add(name=name)
        plane.stat_metadata[1].name, plane.stat_metadata[2].name = "tf_op", "hlo_op"
        numbers: dict[str, int] = {}
        for line_name, events in lines.items():
            line = plane.lines.add(name=line_name, timestamp_ns=1_000)
            for event, start, end in events:
                number = numbers.setdefault(event, len(numbers) + 1)
                plane.event_metadata[number].name = event
                added = line.events.add(metadata_id=number, offset_ps=start * MICROSECOND)
                added.duration_ps = (end - start) * MICROSECOND
                if operation := (operations or {}).get(event):
                    added.stats.add(metadata_id=1 if ":" in operation else 2, str_value=operation)
    file.write_bytes(space.SerializeToString())
    return file


def known(**shares: float) -> Any:
    return pytest.approx({**dict.fromkeys(TIME_SHARES, 0.0), **shares})


def test_each_instant_belongs_to_what_runs_then() -> None:
    spans = [
        (0, 100, CALL), (200, 300, CALL),
        (0, 40, MATRIX), (20, 40, MEMORY), (20, 30, MEMORY),  # 20, then 10 of three, then 10 of two
        (30, 60, ALL_REDUCE),  # alone for 20
        (50, 70, INPUT),  # alone for 10
        (90, 210, MATRIX),  # only what lies in calls: 20
        (250, 250, MEMORY),
    ]  # fmt: skip
    found = divide(spans)
    assert found == known(matrix=(20 + 10 / 3 + 5 + 20) / 200, memory=(20 / 3 + 5) / 200, all_reduce=0.1, input=0.05,
                          dispatch=(200 - 40 - 20 - 10 - 20) / 200)  # fmt: skip
    assert sum(found.values()) == pytest.approx(1)
    assert divide([(0, 5, MATRIX)]) == divide([]) == {}


def test_a_profile_of_a_cpu(tmp_path: Path) -> None:
    """Threads that make batches do not count, nor operations of a few microseconds, nor those that only call others."""
    body = "while/body/_1/while"
    file = write(tmp_path / "x", {"/host:CPU": {
        "python": [("train", 0, 1000), ("_run_steps", 0, 1000), ("EagerExecute: x", 0, 1000)],
        "tf_data_iterator_get_next/1": [("IteratorGetNextOp::DoCompute", 0, 200)],
        "tf_data_private_threadpool/1": [("GatherV2:GatherV2", 0, 900)],
        "tf_Compute/1": [
            (f"{body}/dense-1/MatMul:_MklNativeFusedMatMul", 200, 500), (f"{body}/add.2:AddV2", 500, 509),
            (f"{body}/call:StatefulPartitionedCall", 200, 1000), ("Iterator::Root::Prefetch", 0, 1000),
        ],
        "tf_Compute/2": [(f"{body}/Tanh:Tanh", 600, 700)],
        "collective_ops/1": [(f"{body}/CollectiveReduceV2_1:CollectiveReduceV2", 650, 800)],
    }})  # fmt: skip
    assert shares_of(file) == known(matrix=0.3, memory=0.1, all_reduce=0.1, input=0.2, dispatch=0.3)


def test_steps_that_xla_compiled_for_a_cpu_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "x", {"/host:CPU": {"python": [("train", 0, 1000)]}})
    with pytest.raises(ValueError, match="too little of what XLA computes on CPUs: use --jit_compile=false"):
        shares_of(file, compiled=True)


def test_a_profile_of_two_gpus(tmp_path: Path) -> None:
    """The mean over the GPUs; what the host computes does not count, and it waits while a GPU works at no cost."""
    first = {"Stream #7(Compute)": [
        ("ampere_sgemm_64x64_nn", 100, 400), ("kernel_of_matmul", 400, 500), ("EigenMetaKernel<Exp>", 500, 600),
        ("loop_convert_fusion", 600, 700), ("MemcpyH2D", 700, 800),
    ], "TensorFlow Ops": [("while/x:MatMul", 0, 1000)]}  # fmt: skip
    second = {"Stream #7(Compute)": [("sm80_xmma_fprop_implicit", 0, 500)], "Stream #9(Nccl)": [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400, 700)
    ]}  # fmt: skip
    host = {"python": [("train", 0, 1000)], "tf_data": [("IteratorGetNextOp::DoCompute", 450, 900)],
            "tf_Compute/1": [("while/y/MatMul:MatMul", 0, 1000)]}  # fmt: skip
    planes = {"/host:CPU": host, "/device:GPU:0": first, "/device:GPU:1": second, "/device:GPU:2": {}}
    file = write(tmp_path / "x", planes, {"kernel_of_matmul": "while/body/_1/while/MatMul:MatMul"})
    assert shares_of(file) == known(matrix=0.45, memory=0.15, all_reduce=0.1, input=0.15, dispatch=0.15)


def test_a_profile_without_a_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it has no steps"):
        shares_of(write(tmp_path / "x", {"/host:CPU": {"python": [("x:MatMul", 0, 100)]}}))


@pytest.mark.parametrize(("shares", "words", "first"), [
    ({INPUT: 0.41, MATRIX: 0.585, DISPATCH: 0.004}, "58 % matrix work, 41 % waiting for input",
     "waiting for input 41 %"),
    ({DISPATCH: 0.55, ALL_REDUCE: 0.3, MEMORY: 0.15}, "55 % dispatch, 30 % all-reduce, 15 % memory-bound work",
     "dispatch 55 %: use a larger batch per replica, or use --jit_compile"),
    ({MATRIX: 0.7, DISPATCH: 0.19, MEMORY: 0.11}, "70 % matrix work, 19 % dispatch, 11 % memory-bound work",
     "matrix work 70 %"),
])  # fmt: skip
def test_words_and_advice(shares: dict[str, float], words: str, first: str) -> None:
    assert in_words(shares) == words
    assert advice(shares)[0].startswith(first)
    assert len(advice(shares)) == (2 if ALL_REDUCE in shares else 1)
    assert advice({}) == []


@pytest.mark.parametrize(("config", "compilation", "memory", "dispatch"), [
    ({"jit_compile": "auto", "precision": "float32"}, {"compiled": False},
     "use --jit_compile, or use --precision=mixed_bfloat16, or use devices", "batch per replica, or use --jit_compile"),
    ({"jit_compile": "auto", "precision": "mixed_float16"}, {"compiled": True}, "use devices", "batch per replica"),
    ({"jit_compile": "auto"}, {"compiled_step_seconds": 0.2}, "use --precision=", "batch per replica"),
    ({"jit_compile": "true"}, {}, "use --precision=mixed_bfloat16, or use devices", "batch per replica"),
])  # fmt: skip
def test_what_a_run_uses_or_has_measured_is_not_advised(
    config: dict[str, str], compilation: dict[str, Any], memory: str, dispatch: str
) -> None:
    found = [advice({kind: 0.9}, tried_by(config, compilation))[0] for kind in (MEMORY, DISPATCH)]
    assert found[0].startswith(f"memory-bound work 90 %: {memory}")
    assert found[1].endswith(dispatch)
