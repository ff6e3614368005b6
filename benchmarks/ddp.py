"""WGAN-GP in PyTorch under DistributedDataParallel: the networks, batch and optimizer of trainer.models.wgan_gp."""

import json
import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZE, WIDTH, LATENT, CRITIC_STEPS = 32, 32, 128, 5


def generator() -> nn.Module:
    """(rows, 128) noise -> (rows, 1, 32, 32) images in [-1, 1]."""
    wide = WIDTH * 4
    return nn.Sequential(
        nn.Linear(LATENT, wide * 16, bias=False), nn.Unflatten(1, (wide, 4, 4)), nn.BatchNorm2d(wide), nn.ReLU(),
        nn.ConvTranspose2d(wide, wide // 2, 4, 2, 1, bias=False), nn.BatchNorm2d(wide // 2), nn.ReLU(),
        nn.ConvTranspose2d(wide // 2, wide // 4, 4, 2, 1, bias=False), nn.BatchNorm2d(wide // 4), nn.ReLU(),
        nn.ConvTranspose2d(wide // 4, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic() -> nn.Module:
    """(rows, 1, 32, 32) images -> (rows, 1) scores."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, WIDTH * 2, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH * 2, WIDTH * 4, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(WIDTH * 4 * 16, 1),
    )  # fmt: skip


def wgan_gp(batch: int, *, silent: bool) -> Callable[[int], None]:
    """Runs steps on half of `batch`; `silent`: without the other process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = batch // 2
    g, c = (network.to(memory_format=torch.channels_last) for network in (generator(), critic()))
    if not silent:
        task = json.loads(os.environ["TF_CONFIG"])
        address = f"tcp://{task['cluster']['worker'][0]}"
        torch.distributed.init_process_group("gloo", address, rank=task["task"]["index"], world_size=2)
        g, c = DistributedDataParallel(g), DistributedDataParallel(c)
    of_critic, of_generator = (torch.optim.Adam(network.parameters(), 1e-4, (0.0, 0.9)) for network in (c, g))
    reals = (torch.rand(rows, 1, SIZE, SIZE) * 2 - 1).contiguous(memory_format=torch.channels_last)

    def update_critic() -> None:
        with torch.no_grad():
            fakes = g(torch.randn(rows, LATENT))
        mixed = (fakes + torch.rand(rows, 1, 1, 1) * (reals - fakes)).requires_grad_()
        scores = c(torch.cat([fakes, reals, mixed]))
        gradient = torch.autograd.grad(scores[2 * rows :].sum(), mixed, create_graph=True)[0]
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        of_critic.zero_grad()
        (scores[:rows].mean() - scores[rows : 2 * rows].mean() + 10 * penalty).backward()
        of_critic.step()

    def update_generator() -> None:
        network: nn.Module = getattr(c, "module", c)  # its gradients are not used: they need not travel
        of_generator.zero_grad()
        (-network(g(torch.randn(rows, LATENT))).mean()).backward()
        of_generator.step()

    def run(steps: int) -> None:
        for _ in range(steps):
            for _ in range(CRITIC_STEPS):
                update_critic()
            update_generator()

    return run
