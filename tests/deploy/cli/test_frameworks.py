"""Tests that scripts of Keras and of PyTorch, which know nothing of this package, run as they are."""

import json
from pathlib import Path

import pytest

from tests.deploy.cli.test_script import local, result, script

KERAS = """
import keras
import numpy as np
from vertex_report import report


class Report(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        steps = self.params["steps"] * (epoch + 1)
        report(step=steps, examples=steps * 32, **logs)


keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
model.fit(x, x.sum(axis=1), batch_size=32, epochs=4, validation_split=0.25, callbacks=[Report()])
"""


@pytest.mark.slow
def test_a_script_with_fit_has_the_numbers_of_a_recipe() -> None:
    """As the examples of keras.io are written, with its progress bar."""
    script(KERAS)
    assert local("cpu") == 0
    lines = [json.loads(line) for line in Path("runs/a/stats.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [6, 12, 18, 24]
    assert [set(line["losses"]) for line in lines] == [{"loss", "val_loss"}] * 4
    assert lines[-1]["losses"]["loss"] < lines[0]["losses"]["loss"]
    assert lines[-1]["images_per_second"] == pytest.approx(32 / lines[-1]["step_seconds"])
    assert result()["final"]["metrics"].keys() == {"mae", "val_mae"}


TORCH = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from vertex_report import report

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4)[dist.get_rank() :: dist.get_world_size()]
for step in range(1, 21):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach())
    report(step=step, examples=64 * step, loss=loss)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_workers_of_pytorch_train_together() -> None:
    """By MASTER_ADDR, RANK and the others alone: DistributedDataParallel over gloo."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script(TORCH)
    assert local("cpu-2workers") == 0
    lines = [json.loads(line) for line in Path("runs/a/stats.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["losses"]["loss"] < 0.1 * lines[0]["losses"]["loss"]
