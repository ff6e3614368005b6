"""Runs the peer PyTorch: the same networks, losses, batches and optimizers, alone or, with
TF_CONFIG, as a worker of
DistributedDataParallel over gloo. Imports no TensorFlow.
"""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.processes import Run, Work, timed
from trainer.base.settings.train_config import TrainConfig
from trainer.cluster.cluster_spec import read_cluster

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_batch_norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.1)


def make_candidate(config: TrainConfig, option: str = "eager") -> tuple[Run, Work]:
    """Returns the loop with `option`: eager, channels_last, or compile (with channels_last)."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_default_device(DEVICE)
    # as TensorFlow; cuDNN's products have it by default
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    cluster = read_cluster()
    peer = PEERS[config.model](config)
    torch.manual_seed(cluster.index)
    if cluster.several:
        address = f"tcp://{cluster.addresses[0]}"
        torch.distributed.init_process_group(
            "gloo", address, rank=cluster.index, world_size=cluster.workers
        )
    peer.prepare(config.rows_per_replica(cluster.workers), option)
    bfloat16 = torch.autocast(DEVICE, torch.bfloat16, enabled=config.precision == "mixed_bfloat16")
    return timed(lambda steps: _run(peer, steps, bfloat16)), peer.work()


def _run(peer: Any, steps: int, precision: Any) -> None:
    """Trains so many steps, and waits for a GPU to be done with them."""
    for _ in range(steps):
        with precision:
            peer.step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def generator(config: Any) -> nn.Module:
    """Maps (rows, latent_dim) noise to (rows, channels, image_size, image_size) in [-1, 1]."""
    filters = _filters(config)
    base = config.image_size // 2 ** len(filters)
    layers = [nn.Linear(config.latent_dim, filters[-1] * base * base, bias=False)]
    layers += [nn.Unflatten(1, (filters[-1], base, base)), _batch_norm(filters[-1]), nn.ReLU()]
    for wide, narrow in zip(filters[:0:-1], filters[-2::-1], strict=True):
        layers += [
            nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False),
            _batch_norm(narrow),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers, nn.ConvTranspose2d(filters[0], config.channels, 4, 2, 1), nn.Tanh()
    )


def critic(config: TrainConfig) -> nn.Module:
    """Maps (rows, channels, image_size, image_size) to (rows, 1) scores; with batch norm for
    dcgan."""
    filters = _filters(config)
    layers: list[nn.Module] = []
    for before, width in zip([config.channels, *filters], filters, strict=False):
        normed = config.model == "dcgan" and len(layers) > 0
        layers.append(nn.Conv2d(before, width, 4, 2, 1, bias=not normed))
        layers += [_batch_norm(width)] if normed else []
        layers.append(nn.LeakyReLU(0.2))
    base = config.image_size // 2 ** len(filters)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(filters[-1] * base * base, 1))


def classifier(config: Any) -> nn.Module:
    """Maps (rows, channels, image_size, image_size) in [0, 1] to (rows, 10) logits."""
    layers = []
    size = config.image_size
    before = config.channels
    for count in (2, 3) if config.model == "cnn" else ():
        for _ in range(count):
            layers += [nn.Conv2d(before, config.width, 3), nn.ReLU()]
            before = config.width
        layers.append(nn.MaxPool2d(2))
        size = (size - 2 * count) // 2
    layers.append(nn.Flatten())
    before *= size * size
    for width in (128,) if config.model == "cnn" else (config.width, config.width):
        layers += [
            nn.Linear(before, width),
            nn.ReLU(),
            *([nn.Dropout(config.dropout)] if config.dropout else []),
        ]
        before = width
    return nn.Sequential(*layers, nn.Linear(before, 10))


class Peer:
    """Trains networks on the rows of the .npz file `config.data`; a subclass has step()."""

    betas = (0.9, 0.999)

    def __init__(self, config: Any, *networks: nn.Module) -> None:
        self.config = config
        self.networks = list(networks)

    def prepare(self, rows: int, option: str) -> None:
        """Lays out, wraps and compiles the networks; `rows` of each batch belong to this
        process."""
        self.rows = rows
        if option != "eager":
            self.networks = [
                network.to(memory_format=torch.channels_last) for network in self.networks
            ]
        self.optimizers = [self._optimizer(network) for network in self.networks]
        self.bare = self.networks  # for a second derivative
        if option == "compile":
            self.networks = [torch.compile(network) for network in self.networks]
        self.unsent = self.networks  # where no gradient by the weights is needed
        # batch norm's averages stay local to a worker: the fastest setting
        if torch.distributed.is_initialized():
            self.networks = [
                DistributedDataParallel(each, broadcast_buffers=False) for each in self.networks
            ]
        self.batches = self._batches(channels_last=option != "eager")

    def work(self) -> Work:
        """Returns the trainable numbers of each network and the settings of each optimizer."""
        names = {"lr": "learning_rate", "alpha": "rho", "eps": "epsilon"}
        settings = []
        for optimizer in self.optimizers:
            group = optimizer.param_groups[0]
            found = {ours: group[theirs] for theirs, ours in names.items() if theirs in group}
            settings.append(
                {**found, **dict(zip(("beta_1", "beta_2"), group.get("betas", ()), strict=False))}
            )
        numbers = [sum(each.numel() for each in network.parameters()) for network in self.bare]
        return {"trainable": numbers, "optimizers": settings}

    def _optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """Returns RMSprop for cnn, else Adam, with Keras's rho and epsilon."""
        if self.config.model == "cnn":
            return torch.optim.RMSprop(
                network.parameters(), self.config.learning_rate, alpha=0.9, eps=1e-7
            )
        return torch.optim.Adam(
            network.parameters(), self.config.learning_rate, self.betas, eps=1e-7, fused=True
        )

    def _batches(self, *, channels_last: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields shuffled (rows, channels, height, width) grey levels as float32 and (rows,)
        labels."""
        with np.load(self.config.data) as content:
            arrays = (torch.from_numpy(content[name]).to(DEVICE) for name in ("images", "labels"))
            images = next(arrays)
            labels = next(arrays).long()
        images = images if channels_last else images.permute(0, 3, 1, 2).contiguous()
        while True:
            for rows in torch.randperm(len(images)).split(self.rows):
                if len(rows) == self.rows:
                    batch = images[rows].float()
                    yield batch.permute(0, 3, 1, 2) if channels_last else batch, labels[rows]


class GAN(Peer):
    """Trains a WGAN-GP (betas as Gulrajani et al. 2017) or a DCGAN (betas as Radford et al.
    2016)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, generator(config), critic(config))
        self.dcgan = config.model == "dcgan"
        self.betas = (0.5, 0.999) if self.dcgan else (0.0, 0.9)
        self.critic_steps = 1 if self.dcgan else config.critic_steps

    def critic_loss(
        self, reals: torch.Tensor, noise: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """Takes reals (rows, channels, height, width) in [-1, 1], noise (rows, latent_dim), mix
        (rows, 1, 1, 1)."""
        with torch.no_grad():
            fakes = self.networks[0](noise)
        if self.dcgan:
            on_reals = self.networks[1](reals)
            on_fakes = self.networks[1](fakes)
            return entropy(on_reals, torch.ones_like(on_reals)) + entropy(
                on_fakes, torch.zeros_like(on_fakes)
            )
        mixed = (mix * reals + (1 - mix) * fakes).requires_grad_()
        scores = self.networks[1](torch.cat([fakes, reals]))
        # This pass is not compiled: torch.compile does not support second derivatives.
        gradient = torch.autograd.grad(self.bare[1](mixed).sum(), mixed, create_graph=True)[0]
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return (
            scores[: len(reals)].mean()
            - scores[len(reals) :].mean()
            + self.config.gradient_penalty_weight * penalty
        )

    def generator_loss(self, noise: torch.Tensor) -> torch.Tensor:
        """Takes noise (rows, latent_dim)."""
        scores = self.unsent[1](self.networks[0](noise))
        return entropy(scores, torch.ones_like(scores)) if self.dcgan else -scores.mean()

    def step(self) -> None:
        """Runs critic_steps critic updates, then one generator update."""
        of_generator, of_critic = self.optimizers
        for _ in range(self.critic_steps):
            reals = next(self.batches)[0] / 127.5 - 1
            of_critic.zero_grad()
            self.critic_loss(reals, self._noise(), torch.rand(self.rows, 1, 1, 1)).backward()
            of_critic.step()
        of_generator.zero_grad()
        self.bare[1].requires_grad_(False)
        self.generator_loss(self._noise()).backward()
        self.bare[1].requires_grad_(True)
        of_generator.step()

    def _noise(self) -> torch.Tensor:
        return torch.randn(self.rows, self.config.latent_dim)


class Classifier(Peer):
    """Trains one network by cross-entropy."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config, classifier(config))

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Takes images (rows, channels, height, width) in [0, 255]; computes the accuracy too, as
        ours does."""
        scores = self.networks[0](images / 255)
        self.right = (scores.argmax(1) == labels).sum()
        return cross_entropy(scores, labels)

    def step(self) -> None:
        """Reads one batch."""
        self.optimizers[0].zero_grad()
        self.loss(*next(self.batches)).backward()
        self.optimizers[0].step()


PEERS: dict[str, Any] = {"wgan_gp": GAN, "dcgan": GAN, "cnn": Classifier, "mlp": Classifier}


def _filters(config: Any) -> list[int]:
    """Returns those of trainer.models.gan, which needs TensorFlow; the comparison of Work proves
    them equal."""
    size = config.image_size
    result = list[int]()
    while size % 2 == 0 and size > 4:
        size //= 2
        result.append(config.width * min(2 ** len(result), 8))
    return result
