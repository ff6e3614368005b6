"""Tests that every kind of data from a bucket yields the examples and weights of local files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras import applications

from tests.fixtures import Patch, parametrize
from tests.support import refused, small
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import Proxy
from tests.trainer.data.test_sources import levels, png, write_idx, write_tfrecord
from trainer.base.errors import UserError
from trainer.base.settings.train_config import DATA_KINDS, TrainConfig, split_kind
from trainer.cluster.strategy import make_replicas
from trainer.data.fingerprint import files_of
from trainer.data.prepare import source_of, write_shards
from trainer.data.sources import load_dataset
from trainer.measures.fid import Fid
from trainer.run.training_setup import build_setup


def config(data: str | Path, cache: Path, **given: Any) -> TrainConfig:
    settings = {
        "image_size": 16,
        "global_batch_size": 1,
        "cache_dir": str(cache),
        **given,
    }
    return TrainConfig(data=str(data), **settings)


def idx_folder(folder: Path) -> str:
    write_idx(folder / "train-images-idx3-ubyte", levels(20, 16))
    write_idx(folder / "train-labels-idx1-ubyte", np.arange(20, dtype=np.uint8) % 4)
    return ""


def npz_file(folder: Path) -> str:
    np.savez(folder / "x.npz", images=levels(20, 16), labels=np.arange(20) % 4)
    return "x.npz"


def image_folder(folder: Path) -> str:
    for level in range(20):
        name = folder / f"class {level % 4}" / f"{level:02d}.png"
        name.parent.mkdir(exist_ok=True)
        name.write_bytes(png(level))
    return ""


def tfrecords(folder: Path) -> str:
    for part in range(5):
        records = [
            {"image": png(level), "label": level % 4} for level in range(part * 4, part * 4 + 4)
        ]
        write_tfrecord(folder / f"part-{part}.tfrecord", records)
    return ""


def prepared(folder: Path) -> str:
    (source := folder.parent / "source").mkdir()
    image_folder(source)
    write_shards(config(source, folder, evaluation_fraction=0.25, seed=3), folder)
    return ""


KINDS = {
    "idx": idx_folder,
    "npz": npz_file,
    "folder": image_folder,
    "tfrecord": tfrecords,
    "shards": prepared,
}


def content(part: Any) -> list[Any]:
    if part is None:
        return []
    return [found.numpy().tolist() for found in part.gather(np.arange(part.count, dtype=np.int32))]


def filled(bucket: Bucket, folder: Path, kind: str) -> tuple[Path, str]:
    """Writes data of this kind to a folder and to the bucket."""
    folder.mkdir()
    name = KINDS[kind](folder)
    bucket.put_folder(folder, "d")
    return folder / name, bucket.url(f"d/{name}")


@parametrize("kind", DATA_KINDS)
def test_the_same_examples_and_shards_as_from_local_files(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, kind: str
) -> None:
    local, remote = filled(bucket, tmp_path / "d", kind)
    here, there = (load_dataset(config(path, tmp_path / "cache")) for path in (local, remote))
    assert content(there.train) == content(here.train)
    assert content(there.evaluation) == content(here.evaluation)
    assert there.class_names == here.class_names
    reads = proxy.count("GET", "alt=media")
    said = load_dataset(config(f"{kind}:{remote}", tmp_path / "cache"))
    assert content(said.train) == content(here.train)
    assert proxy.count("GET", "alt=media") == reads
    shards = []
    for folder, data in ((tmp_path / "here", local), (tmp_path / "there", remote)):
        write_shards(config(data, tmp_path / "cache"), folder)
        shards.append({file.name: file.read_bytes() for file in folder.glob("*.npy")})
    assert shards[0] == shards[1]
    assert shards[0]


@parametrize("name", ["network", "weights.h5"])
def test_what_fid_looks_with_is_kept_in_cache_dir(
    name: str, bucket: Bucket, tmp_path: Path, monkeypatch: Patch
) -> None:
    def refused(**given: object) -> None:
        raise OSError("no weights")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(applications, "InceptionV3", refused)
    bucket.put(f"c/{name}", b"no network")
    flags = [
        f"--fid_features={bucket.url(f'c/{name}')}",
        f"--cache_dir={tmp_path / 'cache'}",
        "--fid_every_steps=9",
    ]
    settings = small(*flags)
    replicas = make_replicas(settings)
    with pytest.raises(UserError):
        setup = build_setup(settings, replicas)
        train: Any = setup.dataset.train
        Fid(settings, setup.model, train, replicas)
    assert [file.read_bytes() for file in tmp_path.rglob(name) if file.is_file()] == [b"no network"]
    assert not (tmp_path / "home").exists()


def test_errors_about_files_name_their_address(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("d/a/1.png", b"1")
    bucket.put("d/2.png", b"1")
    for load in (load_dataset, lambda given: source_of(given, 10)):
        with refused(f"data={bucket.url('d')}: images beside class folders (a)"):
            load(config(bucket.url("d"), tmp_path))
    bucket.put("e/x.npz", b"no archive")
    with refused(f"{bucket.url('e/x.npz')}"):
        load_dataset(config(bucket.url("e/x.npz"), tmp_path))


def test_what_is_compared_is_what_is_staged(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    given = config(filled(bucket, tmp_path / "local", "npz")[1], tmp_path / "cache")
    before = files_of(given)
    assert before
    listings = proxy.count("GET", "/o?")
    load_dataset(given)
    assert proxy.count("GET", "/o?") == listings
    assert files_of(given) == before
    bucket.put(split_kind(given.data)[1].removeprefix(f"gs://{bucket.name}/"), b"other")
    assert files_of(given) != before
