"""The peer: the same networks, losses, batches and optimizers in PyTorch, alone or, given TF_CONFIG, in
DistributedDataParallel over gloo. Imports no TensorFlow.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as entropy
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.turns import Run, Work, timed
from trainer.config.train_config import TrainConfig
from trainer.distribution.cluster import read_cluster


def contender(config: TrainConfig, option: str = "eager") -> tuple[Run, Work]:
    """`option`: eager, channels_last or compile (which is channels_last too)."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cluster, peer = read_cluster(), PEERS[config.model](config)
    torch.manual_seed(cluster.index)
    if cluster.several:
        address = f"tcp://{cluster.addresses[0]}"
        torch.distributed.init_process_group("gloo", address, rank=cluster.index, world_size=cluster.workers)
    peer.prepare(config.rows_per_replica(cluster.workers), option)
    return timed(peer.run), peer.work()


def generator(config: TrainConfig) -> nn.Module:
    """(rows, latent_dim) noise -> (rows, channels, image_size, image_size) in [-1, 1]."""
    filters = _filters(config)
    base = config.image_size // 2 ** len(filters)
    layers = [nn.Linear(config.latent_dim, filters[-1] * base * base, bias=False)]
    layers += [nn.Unflatten(1, (filters[-1], base, base)), _batch_norm(filters[-1]), nn.ReLU()]
    for wide, narrow in zip(filters[:0:-1], filters[-2::-1], strict=True):
        layers += [nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False), _batch_norm(narrow), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(filters[0], config.channels, 4, 2, 1), nn.Tanh())


def critic(config: TrainConfig) -> nn.Module:
    """(rows, channels, image_size, image_size) -> (rows, 1) scores; with batch norm for dcgan."""
    filters = _filters(config)
    layers: list[nn.Module] = []
    for depth, (before, width) in enumerate(zip([config.channels, *filters], filters, strict=False)):
        normed = config.model == "dcgan" and depth > 0
        layers.append(nn.Conv2d(before, width, 4, 2, 1, bias=not normed))
        layers += [_batch_norm(width)] if normed else []
        layers.append(nn.LeakyReLU(0.2))
    base = config.image_size // 2 ** len(filters)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(filters[-1] * base * base, 1))


def cnn(config: TrainConfig) -> nn.Module:
    """(rows, channels, image_size, image_size) in [0, 1] -> (rows, 10) logits."""
    layers: list[nn.Module] = []
    size, before = config.image_size, config.channels
    for count in (2, 3):
        for _ in range(count):
            layers += [nn.Conv2d(before, config.width, 3), nn.ReLU()]
            before = config.width
        layers.append(nn.MaxPool2d(2))
        size = (size - 2 * count) // 2
    dense = [nn.Flatten(), nn.Linear(before * size * size, 128), nn.ReLU(), *_dropout(config), nn.Linear(128, 10)]
    return nn.Sequential(*layers, *dense)


def mlp(config: TrainConfig) -> nn.Module:
    """(rows, channels, image_size, image_size) in [0, 1] -> (rows, 10) logits."""
    layers: list[nn.Module] = [nn.Flatten()]
    before = config.channels * config.image_size**2
    for _ in range(2):
        layers += [nn.Linear(before, config.width), nn.ReLU(), *_dropout(config)]
        before = config.width
    return nn.Sequential(*layers, nn.Linear(before, 10))


class Peer(ABC):
    """Networks that train on the rows of the .npz file `config.data`."""

    batches_per_step = 1

    def __init__(self, config: TrainConfig, *networks: nn.Module) -> None:
        self.config, self.networks = config, list(networks)

    def prepare(self, rows: int, option: str) -> None:
        """Lays out, wraps and compiles the networks as `option` says; `rows` of each batch are this process's."""
        self.rows = rows
        last = option != "eager"
        if last:
            self.networks = [network.to(memory_format=torch.channels_last) for network in self.networks]
        self.optimizers = [self.optimizer(network) for network in self.networks]
        self.bare = self.networks  # where a gradient is taken twice
        if option == "compile":
            self.networks = [torch.compile(network) for network in self.networks]
        self.unsent = self.networks  # where no gradient of the weights is wanted
        if torch.distributed.is_initialized():  # batch norm's averages stay each worker's own: the fastest setting
            self.networks = [DistributedDataParallel(each, broadcast_buffers=False) for each in self.networks]
        self.batches = self._batches(last)

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """With Keras's epsilon."""
        return torch.optim.Adam(network.parameters(), self.config.learning_rate, self.betas(), eps=1e-7, fused=True)

    def betas(self) -> tuple[float, float]:
        """Of Adam."""
        return 0.9, 0.999

    def run(self, steps: int) -> None:
        """Trains."""
        for _ in range(steps):
            self.step()

    @abstractmethod
    def step(self) -> None:
        """One step, as trainer counts them."""

    def work(self) -> Work:
        """Trainable numbers of each network, settings of each optimizer."""
        names = {"lr": "learning_rate", "alpha": "rho", "eps": "epsilon"}
        settings = []
        for optimizer in self.optimizers:
            group = optimizer.param_groups[0]
            found = {ours: group[theirs] for theirs, ours in names.items() if theirs in group}
            settings.append({**found, **dict(zip(("beta_1", "beta_2"), group.get("betas", ()), strict=False))})
        numbers = [sum(each.numel() for each in network.parameters()) for network in self.bare]
        return {"trainable": numbers, "optimizers": settings}

    def _batches(self, channels_last: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(rows, channels, height, width) grey levels as float32 and (rows,) labels: gathered by index, shuffled."""
        with np.load(self.config.data) as content:
            images, labels = torch.from_numpy(content["images"]), torch.from_numpy(content["labels"]).long()
        images = images if channels_last else images.permute(0, 3, 1, 2).contiguous()
        while True:
            for rows in torch.randperm(len(images)).split(self.rows):
                if len(rows) == self.rows:
                    batch = images[rows].float()
                    yield batch.permute(0, 3, 1, 2) if channels_last else batch, labels[rows]


class WGANGP(Peer):
    """critic_steps critic updates, then one generator update."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config, generator(config), critic(config))
        self.batches_per_step = config.critic_steps

    def betas(self) -> tuple[float, float]:
        """As Gulrajani et al. 2017."""
        return 0.0, 0.9

    def critic_loss(self, reals: torch.Tensor, noise: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """reals: (rows, channels, height, width) in [-1, 1]; mix: (rows, 1, 1, 1). torch.compile cannot be
        differentiated twice, so the penalty's pass is not compiled."""
        with torch.no_grad():
            fakes = self.networks[0](noise)
        mixed = (mix * reals + (1 - mix) * fakes).requires_grad_()
        scores = self.networks[1](torch.cat([fakes, reals]))
        gradient = torch.autograd.grad(self.bare[1](mixed).sum(), mixed, create_graph=True)[0]
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        return scores[: len(reals)].mean() - scores[len(reals) :].mean() + self.config.gradient_penalty_weight * penalty

    def generator_loss(self, noise: torch.Tensor) -> torch.Tensor:
        """noise: (rows, latent_dim)"""
        return -self.unsent[1](self.networks[0](noise)).mean()

    def step(self) -> None:
        """Reads batches_per_step batches."""
        of_generator, of_critic = self.optimizers
        for _ in range(self.batches_per_step):
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


class DCGAN(WGANGP):
    """The same with cross-entropy between real and generated images, and one critic update a step."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.batches_per_step = 1

    def betas(self) -> tuple[float, float]:
        """As Radford et al. 2016."""
        return 0.5, 0.999

    def critic_loss(self, reals: torch.Tensor, noise: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """`mix` is not used."""
        with torch.no_grad():
            fakes = self.networks[0](noise)
        on_reals, on_fakes = self.networks[1](reals), self.networks[1](fakes)
        return entropy(on_reals, torch.ones_like(on_reals)) + entropy(on_fakes, torch.zeros_like(on_fakes))

    def generator_loss(self, noise: torch.Tensor) -> torch.Tensor:
        """noise: (rows, latent_dim)"""
        scores = self.unsent[1](self.networks[0](noise))
        return entropy(scores, torch.ones_like(scores))


class Classifier(Peer):
    """One network and its cross-entropy."""

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """images: (rows, channels, height, width) grey levels in [0, 255]; keeps the accuracy as ours does."""
        scores = self.networks[0](images / 255)
        self.right = (scores.argmax(1) == labels).sum()
        return cross_entropy(scores, labels)

    def step(self) -> None:
        """Reads one batch."""
        self.optimizers[0].zero_grad()
        self.loss(*next(self.batches)).backward()
        self.optimizers[0].step()


class CNN(Classifier):
    """Trained by RMSprop, as Keras sets it."""

    def optimizer(self, network: nn.Module) -> torch.optim.Optimizer:
        """With Keras's rho and epsilon."""
        return torch.optim.RMSprop(network.parameters(), self.config.learning_rate, alpha=0.9, eps=1e-7)


PEERS: dict[str, Callable[[TrainConfig], Any]] = {
    "wgan_gp": WGANGP,
    "dcgan": DCGAN,
    "cnn": lambda config: CNN(config, cnn(config)),
    "mlp": lambda config: Classifier(config, mlp(config)),
}


def _filters(config: TrainConfig) -> list[int]:
    """As trainer.models.gan, which needs TensorFlow; that both networks are of one size is asserted."""
    size, result = config.image_size, list[int]()
    while size % 2 == 0 and size > 4:
        size //= 2
        result.append(config.width * min(2 ** len(result), 8))
    return result


def _batch_norm(width: int) -> nn.Module:
    return nn.BatchNorm2d(width, eps=1e-3, momentum=0.1)


def _dropout(config: TrainConfig) -> list[nn.Module]:
    return [nn.Dropout(config.dropout)] if config.dropout else []
