"""Modules that ranks train, of every kind of optimization; kept apart because every rank imports them."""

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


class FusedOptimizer(Classifier):
    def __init__(self) -> None:
        super().__init__(Fused)


class FusedEarly(Classifier):
    """Makes the optimizer in the constructor, before gradients are synchronised by anything."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Fused(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class InBackward(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import _apply_optimizer_in_backward  # warns on import

        _apply_optimizer_in_backward(torch.optim.SGD, self.network.parameters(), {"lr": 0.1})
        return super().configure_optimizers()


class SumLoss(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum") / 30


class TokenLoss(Classifier):
    """Only some samples count; a batch may have none of them."""

    def loss(self, batch: Any) -> Tensor:
        counts = batch[1] != 0
        return functional.cross_entropy(self.network(batch[0])[counts], batch[1][counts])


def count_tokens(batch: Any) -> float:
    return float((batch[1] != 0).sum())


def count_nothing_right(batch: Any) -> float:
    return -1.0


class LimitedMemory(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")


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


class TwoSums(SumLoss):
    """Two backward passes of losses that are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(2 * self.loss(batch))
        optimizer.step()


class UnevenPasses(SumLoss):
    """Rank 1 has a backward pass more in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(1 + self.global_rank):
            self.manual_backward(self.loss(batch))
        optimizer.step()


class ByHand(Classifier):
    """Accumulates over two batches by hand, in a step that does not ask for `batch_idx`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches = 0

    def training_step(self, batch: Any) -> None:
        optimizer = self.optimizers()
        self.batches += 1
        accumulates = self.trainer.world_size > 1  # one process has both batches in one
        if accumulates and self.batches % 2:
            optimizer.zero_grad()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch) / 2)
            return
        if not accumulates:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / (2 if accumulates else 1))
        optimizer.step()


class ByTorch(Adversaries):
    """Steps optimizers that Lightning does not wrap; one backward pass is in a closure."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        scores = self.discriminator(self.generator(batch[0][:, :2]))
        generator.zero_grad()
        self.manual_backward(scores.sigmoid().log().mean().neg())
        generator.step()

        def closure() -> Tensor:
            discriminator.zero_grad()
            loss = self.discriminator(batch[0]).pow(2).mean()
            self.manual_backward(loss)
            return loss

        discriminator.step(closure)


class ByTorchWithoutSynchronisation(ByTorch):
    """Calls `loss.backward()` before a step that Lightning does not see."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class ByTorchInClosure(ByTorchWithoutSynchronisation):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[1]

        def closure() -> Tensor:
            loss = self.discriminator(batch[0]).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure=closure)


class GrownHead(Classifier):
    """Gets a parameter after training was set up, and an optimizer for it."""

    def on_train_start(self) -> None:
        self.head = nn.Linear(CLASSES, CLASSES).double()
        self.optimizers().add_param_group({"params": list(self.head.parameters())})

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.head(self.network(batch[0])), batch[1])


class OwnTensor(Classifier):
    """Optimizes a tensor that is not part of the module; does not use it on the first batches."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.bias = [torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)]
        return self.make_optimizer([*self.parameters(), *self.bias])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.network(batch[0])
        return functional.cross_entropy(logits + self.bias[0] if batch_idx == 2 else logits, batch[1])


class WithProbe(Classifier):
    """A probe with an optimizer of its own is nobody's concern, also when it learns between micro-batches."""

    def on_train_start(self) -> None:
        self.probe = [torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)]
        self.probe_optimizer = torch.optim.SGD(self.probe, lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.probe[0].square().sum().add(self.probe[0].sum()).backward()
        self.probe_optimizer.step()
        return super().training_step(batch, batch_idx)


class RawBackward(Adversaries):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
