"""Tests that prepare reads from and writes to a bucket shard by shard, with the same shards as for a folder."""

import json
from pathlib import Path

import pytest

from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import FOREVER, Fault, Proxy
from tests.trainer.base.storage.test_remote_sources import KINDS, config, content, filled
from trainer.data import prepare as prepare_module
from trainer.data.pieces import source_of
from trainer.data.prepare import JOURNAL, main
from trainer.data.sources import load_dataset


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "source_of", lambda config, per_shard: source_of(config, 4))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_same_shards(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    local, remote = filled(bucket, tmp_path / "d", kind)
    flags = ["--image_size=16", f"--cache_dir={tmp_path / 'cache'}"]
    assert main([str(local), str(tmp_path / "here"), *flags]) == 0
    assert main([remote, bucket.url("there"), *flags]) == 0
    here = json.loads((tmp_path / "here" / "index.json").read_text())
    there = json.loads(bucket.content("there/index.json"))
    for key in ("splits", "class_names", "image_shape"):
        assert there[key] == here[key]
    assert f"there/{JOURNAL}" not in bucket.names()
    found = [load_dataset(config(path, tmp_path / "cache")) for path in (bucket.url("there"), tmp_path / "here")]
    assert content(found[0].train) == content(found[1].train)
    assert main([remote, bucket.url("there"), *flags]) == 0  # finished already


def test_an_interrupted_prepare_goes_on_elsewhere(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, remote = filled(bucket, tmp_path / "d", "folder")
    proxy.faults.append(Fault(503, "POST", "train-00003", times=FOREVER))
    command = [remote, bucket.url("there"), "--image_size=16"]
    assert main([*command, f"--cache_dir={tmp_path}/one"]) == 1
    assert "the same command resumes after the last complete shard" in capsys.readouterr().err
    proxy.heal()
    assert "there/index.json" not in bucket.names()
    before = len(proxy.requests)
    assert main([*command, f"--cache_dir={tmp_path}/another machine"]) == 0
    sent = [request for request in proxy.requests[before:] if "/upload/" in request and "train-" in request]
    assert ["train-00003" in sent[0], "train-00004" in sent[1], len(sent)] == [True, True, 2]
    assert len(json.loads(bucket.content("there/index.json"))["splits"]["train"]) == 5
