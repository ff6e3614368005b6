"""Tests that a fingerprint changes with the data and with nothing else, and what a resumed run does
about a change."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.drill import read
from tests.fixtures import Make, parametrize
from tests.support import refused
from tests.support import run_job as run
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.rendezvous import arithmetic_switches
from trainer.data.dataset import Arrays, Dataset, NestedArrays
from trainer.data.examples import InSequence, Subset
from trainer.data.fingerprint import content_of, files_of


def known(path: Path) -> dict[str, Any]:
    return files_of(TrainConfig(data=str(path)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(200):
        file = tmp_path / "photos" / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([number]) * 1000)
    return tmp_path / "photos"


def test_names_sizes_and_content_of_files_count_and_times_and_hidden_files_do_not(
    folder: Path,
) -> None:
    before = known(folder)
    assert (before["files of data"], before["bytes of data"]) == (200, 200_000)
    (folder / ".fid-inception.npz").write_bytes(b"1")
    for file in folder.rglob("*.png"):
        os.utime(file, (1, 1))
    assert known(folder) == before
    (folder / "class0" / "0.png").rename(folder / "class0" / "1000.png")
    renamed = known(folder)
    assert [name for name in renamed if renamed[name] != before[name]] == ["sample of data"]
    for file in folder.rglob("*.png"):
        file.write_bytes(b"x" * 1000)
    assert known(folder) != renamed
    (folder / "class1" / "1.png").unlink()
    assert known(folder)["files of data"] == 199


@parametrize("at", [0, 999_999, 550_000, 123_456])
def test_one_file_is_sampled_at_several_places(tmp_path: Path, at: int) -> None:
    file = tmp_path / "data.npz"
    file.write_bytes(bytes(1_000_000))
    before = known(file)
    with open(file, "r+b") as opened:
        opened.seek(at)
        opened.write(b"1")
    assert known(file) != before


def test_of_prepared_data_the_index_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "pieces.json").write_text("{}")
    (tmp_path / "train-00000.x.npy").write_bytes(b"1")
    assert known(tmp_path)["files of data"] == 1


def test_names_and_functions_have_no_files_and_a_missing_path_is_left_to_the_loader(
    tmp_path: Path,
) -> None:
    assert files_of(TrainConfig()) == {}
    assert files_of(TrainConfig(data="tests.models:data_of_worker")) == {}
    assert files_of(TrainConfig(data=str(tmp_path / "none"))) == {}


def dataset(change: Any = None, count: int = 5000) -> Dataset:
    images = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(count, 2, 2, 1).copy()
    if change is not None:
        images[change] += 1
    return Dataset("own", Arrays(images))


def test_rows_are_compared_where_no_files_are_known() -> None:
    same = content_of(dataset(), rows=True)
    assert content_of(dataset(), rows=True) == same
    assert content_of(dataset(0), rows=True) != same
    assert content_of(dataset(2345), rows=True) != same
    assert content_of(dataset(slice(1000, None)), rows=False) == content_of(dataset(), rows=False)
    assert content_of(dataset(count=4999), rows=False)["training examples"] == 4999


def test_a_tf_dataset_and_a_part_held_back_are_compared_beyond_their_first_rows() -> None:
    x = np.arange(100.0)
    rows = NestedArrays(x)
    changed = NestedArrays(np.where(x < 8, x, x + 5))
    halves = [Subset(examples, 0, 0, 50).fingerprint() for examples in (rows, rows, changed)]
    sets = [
        tf.data.Dataset.from_tensor_slices(examples.arrays[0]) for examples in (rows, rows, changed)
    ]
    read = [InSequence(source, "data", 0).fingerprint() for source in sets]
    for same, again, different in (halves, read):
        assert same == again != different


class Known(NestedArrays):
    def fingerprint(self) -> str:
        return "generation 7"


def test_a_source_may_supply_its_fingerprint_and_examples_may_be_any_nest() -> None:
    x = {"x": (np.arange(3.0), np.array(["a", "bc", ""])), "y": np.arange(3)}
    found = content_of(Dataset("own", Known(x), NestedArrays(x)), rows=True)
    assert (found["training digest"], len(found["evaluation digest"])) == ("generation 7", 32)


def test_changed_data_end_a_resumed_run(small_config: Make, tmp_path: Path) -> None:
    file = tmp_path / "data.npz"
    flags = ["--image_size=8", "--model=mlp", f"--data={file}", "--data_memory_mib=1"]

    def write(count: int, level: int) -> None:
        np.savez(file, images=np.full((count, 8, 8), level, np.uint8), labels=np.arange(count) % 2)

    write(32, level=1)
    run(small_config(*flags))
    assert read(tmp_path / "job" / "run.json")["data"]["files"]["files of data"] == 1
    write(32, level=2)
    with refused("have changed since this run began (sample of data: "):
        run(small_config(*flags, "--steps=6"))


def test_what_a_worker_computes_with() -> None:
    given = {
        "TF_CONFIG": "{}",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "2",
    }
    found = arithmetic_switches(
        {**given, "NVIDIA_TF32_OVERRIDE": "0", "XLA_FLAGS": "--x", "HOME": "/"}
    )
    switches = {name: value for name, value in found.items() if "keras" not in name}
    assert switches == {
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "NVIDIA_TF32_OVERRIDE": "0",
        "XLA_FLAGS": "--x",
    }
    assert found["keras.json epsilon"] == "1e-07"
