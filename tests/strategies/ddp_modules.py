"""Modules and optimizers that several tests train on ranks; every rank imports this module."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

FEATURES, CLASSES = 5, 3


class Classifier(LightningModule):
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.make_optimizer = partial(optimizer, lr=0.1, **options)
        self.network = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))

    def loss(self, batch: Any) -> Tensor:
        features = batch[0].to(self.network[0].weight.dtype)
        return functional.cross_entropy(self.network(features), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Adam(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.optim.Adam)


class Momentum(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, momentum=0.9)


class SumLoss(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum") / 30


class Fused(torch.optim.Optimizer):
    """Steps inside of the backward pass, as LOMO does: no gradient is left when it has ended."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class Noisy(torch.optim.SGD):
    """Adds noise before and after its closure has run, as optimizers for sampling do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.add_noise()
        loss = super().step(closure)
        self.add_noise()
        return loss

    def add_noise(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


class Adversaries(LightningModule):
    """Manual optimization with two optimizers; the generator's gradients pass through the discriminator."""

    def __init__(self, toggle: bool = True, accumulate: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.accumulate = accumulate
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        steps = (
            (
                self.optimizers()[0],
                lambda: self.discriminator(self.generator(real[:, :2])).sigmoid().log().mean().neg(),
            ),
            (
                self.optimizers()[1],
                lambda: (
                    self.discriminator(self.generator(real[:, :2]).detach()).sigmoid().mean()
                    - self.discriminator(real).sigmoid().mean()
                ),
            ),
        )
        for optimizer, make_loss in steps:
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if self.accumulate:
                with optimizer.toggle_model(sync_grad=False):
                    self.manual_backward(make_loss() / 2)
                self.manual_backward(make_loss() / 2)
            else:
                self.manual_backward(make_loss())
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=0.05) for part in parts]
