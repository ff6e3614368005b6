"""Runs PyTorch's peer on given weights and rows: `python -m tests.benchmarks.pytorch_losses GIVEN.npz FLAGS`.

Prints its work as JSON and, for each network, its loss and the sorted norms of the gradients.
"""

import json
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.pytorch import PEERS
from trainer.base.settings.resolution import resolve


def main() -> None:
    config = resolve(sys.argv[2:]).config
    peer = PEERS[config.model](config)
    peer.prepare(config.global_batch_size, "eager")
    with np.load(sys.argv[1]) as content:
        given = {name: torch.tensor(content[name]) for name in content.files}
    for which, network in enumerate(peer.networks):
        weights = [value for name, value in given.items() if name.startswith(f"{which} ")]
        for parameter, value in zip(network.parameters(), weights, strict=True):
            assert parameter.shape == value.shape
            parameter.data.copy_(value)
    images, *others = (value for name, value in given.items() if name.startswith("input"))
    images = images.float().permute(0, 3, 1, 2)
    if hasattr(peer, "critic_loss"):
        losses = [lambda: peer.generator_loss(others[0]), lambda: peer.critic_loss(images, *others)]
    else:
        losses = [lambda: peer.loss(images, others[0].long())]
    found = [value_and_norms(loss(), peer.networks[which]) for which, loss in enumerate(losses)]
    print(json.dumps({"work": peer.work(), "losses and norms": found}))


def value_and_norms(loss: Any, network: Any) -> tuple[float, list[float]]:
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    return float(loss.detach()), sorted(float(each.norm()) for each in gradients)


if __name__ == "__main__":
    main()
