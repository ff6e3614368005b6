"""Tests that TensorFlow's own gs:// reads uploaded models, checkpoints and events."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from tests.trainer.base.storage.conftest import Bucket
from tests.trainer.base.storage.tls_gateway import tls_gateway
from trainer.base.storage.uploader import Uploader
from trainer.reporting.tensorboard import EventFiles

READ = """
import sys
import numpy as np
import tensorflow as tf
import keras
at = sys.argv[1]
print(tf.train.load_checkpoint(at + "/checkpoints/step-5/state").get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE"))
saved = tf.saved_model.load(at + "/model/saved_model")
print(float(saved.serve(tf.ones((1, 2)))[0, 0]))
print(float(keras.models.load_model(at + "/model/model.keras")(np.ones((1, 2)))[0, 0]))
(file,) = tf.io.gfile.glob(at + "/logs/events*")
events = [tf.compat.v1.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(file)]
print([value.tag for event in events for value in event.summary.value])
"""


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_model_checkpoint_and_events(bucket: Bucket, server: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    (root / "model").mkdir(parents=True)
    model.save(root / "model" / "model.keras")
    model.save(root / "model" / "model.h5")
    model.export(str(root / "model" / "saved_model"), verbose=False)
    tf.train.Checkpoint(weight=tf.Variable(7.0)).write(str(root / "checkpoints" / "step-5" / "state"))
    events = EventFiles(root / "logs")
    events.scalars(1, {"loss": 0.5})
    events.close()
    sender = Uploader({root: bucket.address("runs/7")}, "manifest.json")
    for folder in ("model", "checkpoints/step-5"):
        sender.put(root / folder)
    sender.follow(root / "logs", 3600)
    assert sender.join(20) == []
    assert bucket.content("runs/7/model/model.h5") == (root / "model" / "model.h5").read_bytes()
    with tls_gateway(server, tmp_path) as environment:
        done = subprocess.run(
            [sys.executable, "-c", READ, bucket.url("runs/7")],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["7.0", "2.0", "2.0", "['loss']"]
