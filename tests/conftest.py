"""Four logical CPU devices for every test of this process, and settings small enough to run in
seconds."""

import gc
import os
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.packaging import packages
from tests.fixtures import Folders
from tests.trainer.base.storage.emulator import fake_gcs, find_binary
from trainer.base.errors import UserError
from trainer.base.log import log, warn_once
from trainer.base.settings.train_config import TrainConfig
from trainer.base.storage import gcs, staging
from trainer.base.storage.local_files import Address
from trainer.user_code.command import quiet_start

with quiet_start():  # or pytest-xdist prints TensorFlow's greeting after the closing line
    import keras
    import tensorflow as tf

    from trainer.run import export, job, rehearsal

# of all tests, made by the process that starts the others
_cache: list[tempfile.TemporaryDirectory[str]] = []


def pytest_configure() -> None:
    # the user's cache may hold what another version wrote
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _cache.append(tempfile.TemporaryDirectory())
        os.environ["XDG_CACHE_HOME"] = _cache[0].name
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    # tests/trainer/run/test_replica_check.py has the check before training
    os.environ.setdefault("TRAINER_SKIP_REPLICA_CHECK", "1")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    # starts TensorFlow: a run with fewer replicas cannot change it any more
    tf.config.list_logical_devices()
    gc.freeze()  # or each full collection walks through all that TensorFlow and Keras imported


def pytest_unconfigure() -> None:
    for folder in _cache:
        folder.cleanup()


@pytest.fixture(autouse=True)
def _float32_again() -> Iterator[None]:
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture(autouse=True)
def _keras_files_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports Keras's files alone, uncompared, but in tests marked `exports`: the rest is half of a
    small job."""
    if not request.node.get_closest_marker("exports"):
        monkeypatch.setattr(export, "_save_for_serving", lambda *parts: None)
        for module in (job, rehearsal):
            monkeypatch.setattr(
                module, "compare_saved", lambda *parts: "not compared: a test of something else"
            )


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Hears what this package logs, whatever a command of an earlier test made of its log; each
    warning comes anew."""
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level("INFO", log.name)
    warn_once.cache_clear()
    return caplog


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """The address of a stand-in for Cloud Storage."""
    try:
        find_binary()
    except UserError as missing:
        pytest.skip(str(missing))
    with fake_gcs() as url:
        yield url


@pytest.fixture
def bucket(gcs_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Yields a new, empty bucket of an emulated Cloud Storage; its local cache is in tmp_path."""
    monkeypatch.setattr(staging, "cache_home", lambda cache_dir="": tmp_path / "cache")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    gcs._connect.cache_clear()
    client = gcs.connect().client
    yield Address(client.create_bucket(f"b-{uuid.uuid4().hex}").name, "")
    gcs._connect.cache_clear()
    client.close()


@pytest.fixture(scope="session")
def _built(tmp_path_factory: Folders) -> Path:
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"


@pytest.fixture
def dist(_built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shares built packages between all tests, those of other workers of pytest-xdist too."""
    monkeypatch.setattr(packages, "DIST", _built)
    return _built


@pytest.fixture
def small_config(tmp_path: Path) -> Callable[..., TrainConfig]:
    """A classifier, or the model that flags name, that trains in a second:
    `small_config("--replicas=2")`."""

    def make(*flags: str) -> TrainConfig:
        from tests.support import tiny  # imports TensorFlow, not quietly

        if not any(flag.startswith(("--model", "--recipe")) for flag in flags):
            flags = ("--model=mlp", *flags)
        return tiny(f"--job_dir={tmp_path / 'job'}", *flags)

    return make
