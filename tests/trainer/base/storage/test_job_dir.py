"""Tests that a job directory in a bucket is trained, killed, resumed and exported like a local
one."""

import json
import os
import re
import signal
import time
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from keras import callbacks

from tests.fixtures import SLOW, Log, Patch, parametrize
from tests.support import refused, resolved
from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.fault_proxy import FOREVER, Fault, Proxy
from trainer import generate
from trainer.base.errors import DONE, INTERRUPTED, UserError
from trainer.base.run_files import mirror as mirror_module
from trainer.base.run_files.job_directory import open_job_dir, outputs
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage.staging import preflight
from trainer.run import job

FLAGS = [
    "--model=mlp",
    "--width=8",
    "--image_size=8",
    "--global_batch_size=16",
    "--precision=float64",
    "--checkpoint_every_steps=10",
    "--report_every_steps=5",
    "--keep_checkpoints=2",
    "--replicas=1",
    "--jit_compile=false",  # auto may choose differently for runs of other lengths
]
KILLED = ["--steps=1000000", "--steps_per_loop=4", f"--callbacks={__name__}:killing"]


def killing() -> list[callbacks.Callback]:
    """Sends this process a SIGTERM after step 13."""
    return [
        callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: (
                os.kill(os.getpid(), signal.SIGTERM) if batch == 12 else None
            )
        )
    ]


def config_of(bucket: Bucket, cache: Path, *flags: str) -> TrainConfig:
    return resolved(*FLAGS, f"--job_dir={bucket.url('runs/7')}", f"--cache_dir={cache}", *flags)


def run(config: TrainConfig) -> int:
    return job.run(config, ["test"], time.monotonic())


def result(bucket: Bucket, at: str = "runs/7/result.json") -> dict[str, Any]:
    return json.loads(bucket.content(at))


def steps_kept(bucket: Bucket, below: str = "runs/7/checkpoints/") -> list[str]:
    """Returns the folders of the checkpoints with a manifest."""
    names = [name.removeprefix(below) for name in bucket.names() if name.startswith(below)]
    return [name.split("/")[0] for name in names if name.endswith("/manifest.json")]


def reported(bucket: Bucket) -> list[int]:
    lines = map(json.loads, bucket.content("runs/7/stats.jsonl").splitlines())
    return [line["step"] for line in lines if line["kind"] == "report"]


@pytest.mark.exports
def test_trained_gone_on_with_and_exported(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    assert run(config_of(bucket, tmp_path / "one", "--steps=30")) == DONE
    assert steps_kept(bucket) == ["step-00000020", "step-00000030"]
    assert result(bucket)["state"] == "done"
    uploads = [request for request in proxy.requests if "/upload/" in request]
    assert "result.json" in uploads[-1]
    assert any("model.keras" in request for request in uploads)

    assert run(config_of(bucket, tmp_path / "another machine", "--steps=40")) == DONE
    # the older ones existed in this bucket only
    assert steps_kept(bucket) == ["step-00000030", "step-00000040"]
    assert not any("step-00000010" in name or "step-00000020" in name for name in bucket.names())
    assert reported(bucket) == [5, 10, 15, 20, 25, 30, 35, 40]
    # each start says so in one more
    assert len([name for name in bucket.names() if "/logs/events" in name]) == 4
    for name in ("run.json", "model/model.h5", "model/saved_model/saved_model.pb"):
        assert f"runs/7/{name}" in bucket.names()

    before = len(proxy.requests)
    assert run(config_of(bucket, tmp_path / "third", "--steps=40")) == DONE  # finished already
    assert not [r for r in proxy.requests[before:] if "/upload/" in r]
    with pytest.raises(
        UserError,
        match=rf"job_dir={bucket.url('runs/7')} contains another run \(seed: 0 before, 2 now",
    ):
        open_job_dir(config_of(bucket, tmp_path / "third", "--seed=2", "--steps=40"))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    bucket: Bucket, tmp_path: Path, caplog: Log
) -> None:
    assert run(config_of(bucket, tmp_path / "one", "--steps=20")) == DONE
    newest = "runs/7/checkpoints/step-00000020/variables.data-00000-of-00001"
    bucket.put(newest, bytes(len(bucket.content(newest))))
    bucket.put("runs/7/checkpoints/step-00000030/variables.index", b"its manifest was never sent")
    with caplog.at_level("INFO", "trainer"):
        assert run(config_of(bucket, tmp_path / "two", "--steps=25")) == DONE
    assert "step-00000020 is damaged" in caplog.text
    assert (
        f"resumes at step 10 from {bucket.url('runs/7/checkpoints/step-00000010')}" in caplog.text
    )
    assert steps_kept(bucket)[-2:] == ["step-00000020", "step-00000025"]
    assert not any("step-00000030" in name for name in bucket.names())


def test_sigterm_saves_and_sends(bucket: Bucket, tmp_path: Path) -> None:
    assert run(config_of(bucket, tmp_path, *KILLED)) == INTERRUPTED
    found = result(bucket)
    assert found["state"] == "interrupted"
    assert steps_kept(bucket)[-1] == f"step-{found['steps']:08d}"
    assert reported(bucket)[-1] <= found["steps"]
    sent = {
        PurePosixPath(name).name: bucket.content(name)
        for name in bucket.names()
        if "/logs/events" in name
    }
    assert sent == {file.name: file.read_bytes() for file in tmp_path.glob("*/run/logs/events*")}
    assert sent


def test_sigterm_while_the_service_is_silent_leaves_in_time_and_names_what_was_not_sent(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, caplog: Log, monkeypatch: Patch
) -> None:
    assert mirror_module.LEAVING_SECONDS < 15
    monkeypatch.setattr(mirror_module, "LEAVING_SECONDS", 0.5)
    proxy.faults.append(Fault("stall", "POST", "/checkpoints/step-", times=FOREVER, after=3))
    assert run(config_of(bucket, tmp_path, *KILLED)) == INTERRUPTED
    assert re.search(
        r"not uploaded within 0\.5 seconds: gs://\S+/runs/7/checkpoints/step-000000\d\d",
        caplog.text,
    )
    assert steps_kept(bucket) == ["step-00000010"]


def test_a_refusal_half_way_stops_the_run(bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    proxy.faults.append(Fault(403, "POST", "/upload/", times=FOREVER, after=8))
    with refused("no permission to write it (roles/storage.objectUser)"):
        run(config_of(bucket, tmp_path, "--steps=1000000", "--steps_per_loop=5"))
    assert result(bucket)["state"] == "running"


def test_the_folders_that_vertex_names(bucket: Bucket, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("AIP_MODEL_DIR", bucket.url("base/model/"))
    monkeypatch.setenv("AIP_CHECKPOINT_DIR", f"/gcs/{bucket.name}/base/checkpoints/")
    monkeypatch.setenv("AIP_TENSORBOARD_LOG_DIR", bucket.url("board/logs/"))
    config = resolved(*FLAGS, "--steps=10", f"--cache_dir={tmp_path / 'one'}")
    assert list(outputs(config)) == [
        "AIP_MODEL_DIR",
        "AIP_CHECKPOINT_DIR",
        "AIP_TENSORBOARD_LOG_DIR",
    ]
    preflight({}, outputs(config))
    assert bucket.names() == []
    assert run(config) == DONE
    assert steps_kept(bucket, "base/checkpoints/") == ["step-00000010"]
    names = bucket.names()
    assert {
        "base/run.json",
        "base/result.json",
        "base/stats.jsonl",
        "base/model/model.keras",
    } <= set(names)
    assert {name.rpartition("/")[0] for name in names if "events" in name} == {"board/logs"}
    assert run(resolved(*FLAGS, "--steps=15", f"--cache_dir={tmp_path / 'two'}")) == DONE
    assert result(bucket, "base/result.json")["steps"] == 15


@SLOW
@pytest.mark.exports
def test_one_run_begins_from_another(bucket: Bucket, tmp_path: Path, caplog: Log) -> None:
    gan = [
        "--model=dcgan",
        "--width=4",
        "--latent_dim=8",
        "--image_size=16",
        "--global_batch_size=8",
        "--replicas=1",
        f"--cache_dir={tmp_path / 'cache'}",
    ]
    assert run(resolved(*gan, "--steps=2", f"--job_dir={bucket.url('runs/gan')}")) == DONE
    trained = {name: bucket.content(name) for name in bucket.names()}
    for flag in ("initial_checkpoint=runs/gan", "initial_model=runs/gan/model/model.keras"):
        name, _, below = flag.partition("=")
        local = tmp_path / name
        assert (
            run(resolved(*gan, "--steps=1", f"--{name}={bucket.url(below)}", f"--job_dir={local}"))
            == DONE
        )
    assert {name: bucket.content(name) for name in bucket.names()} == trained
    fetched = [file.name for file in (tmp_path / "cache").rglob("local/**/*")]
    assert {"model.keras", "critic.keras", "manifest.json"} < set(fetched)
    assert "saved_model" not in fetched
    out = tmp_path / "grid.png"
    assert generate.main([bucket.url("runs/gan"), f"--out={out}", "--count=4"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert generate.main([bucket.url("runs/gan"), f"--out={bucket.url('x.png')}"]) == 2
    assert generate.main([bucket.url("runs/none")]) == 2


def test_a_worker_that_is_not_the_chief_asks_for_nothing(
    bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    before = len(proxy.requests)
    job_dir = open_job_dir(config_of(bucket, tmp_path / "cache"), make=False)
    job_dir.mirror.begin(job_dir.logs)
    job_dir.mirror.finish()
    assert len(proxy.requests) == before
    assert not (tmp_path / "cache").exists()


@parametrize("folder", ["model", "checkpoints", "samples"])
@parametrize("remote", [True, False])
def test_folders_of_someone_else_are_left_alone(
    bucket: Bucket, tmp_path: Path, folder: str, remote: bool
) -> None:
    root = bucket.url("runs/7") if remote else str(tmp_path / "run")
    config = TrainConfig(job_dir=root, cache_dir=str(tmp_path / "cache"))
    (tmp_path / "run" / folder).mkdir(parents=True)
    for name in (".probe-of-a-killed-process", "my_code.py"):
        open_job_dir(config)
        (tmp_path / "run" / folder / name).write_bytes(b"")
        bucket.put(f"runs/7/{folder}/{name}", b"")
    with refused(f"{root}/{folder} exists and is not from a run"):
        open_job_dir(config)
    assert (tmp_path / "run" / folder / "my_code.py").exists()


def test_a_damaged_result_is_named_by_its_address_and_markers_of_folders_are_no_run(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.put("runs/7/model/", b"")
    open_job_dir(config_of(bucket, tmp_path)).mirror.close()
    for content, line in ((b"{", " cannot be read"), (b'{"steps": "x"}', ": steps='x' is damaged")):
        bucket.put("runs/7/result.json", content)
        job_dir = open_job_dir(config_of(bucket, tmp_path))
        with closing(job_dir.mirror), refused(f"{bucket.url('runs/7/result.json')}{line}"):
            job_dir.read_result()
