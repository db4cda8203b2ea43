"""Runs that resume on as many ranks."""

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

from tests.strategies.join_cases.casing import COUNTS, RANK, case, fit, loader, trainer
from tests.strategies.join_ranks import Classifier, Trace


@case
def resuming(folder: str) -> Any:
    """Resume in an epoch: before any rank has joined, and in the uneven phase."""
    found = {}
    for steps in (1, 3, 6):
        whole = fit(Classifier(), max_epochs=2)[1].digests
        seed_everything(0, verbose=False)
        saving = ModelCheckpoint(f"{folder}/{steps}", every_n_train_steps=steps, save_top_k=-1)
        fit(Classifier(), max_epochs=2, max_steps=steps, callbacks=[saving], enable_checkpointing=True)
        trace = Trace()
        trainer(trace, max_epochs=2).fit(
            Classifier().double(), loader(*COUNTS), ckpt_path=_broadcast(saving.best_model_path), weights_only=False
        )
        found[steps] = (trace.digests, whole[steps:])
        seed_everything(0, verbose=False)
    return found


@case
def resuming_with_buckets_that_have_grown(folder: str) -> Any:
    """Layers are thawed one after another, the first rank joins first, and the order of use is not that of creation."""

    class Thawing(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.top, self.middle, self.bottom = nn.Linear(50, 1), nn.Linear(40, 50), nn.Linear(6, 40)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.bottom.requires_grad_(self.global_step > 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.top(self.middle(self.bottom(batch[1].double()).tanh()).tanh()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    counts = (2, 6, 8)
    saving = ModelCheckpoint(f"{folder}/grown", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(Thawing(), loader(*counts), max_epochs=2, callbacks=[saving], enable_checkpointing=True)[1].digests
    found = []
    for steps in (1, 3, 6):
        trace = Trace()
        path = _broadcast(f"{folder}/grown/step={steps}.ckpt")
        trainer(trace, max_epochs=2).fit(Thawing().double(), loader(*counts), ckpt_path=path)
        found.append((trace.digests, whole[steps:]))
    return found


def _broadcast(path: str) -> str:
    paths = [path]
    dist.broadcast_object_list(paths, 0)
    return str(paths[0])


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


class Sampling(Classifier):
    """Masks inputs, for which each rank draws numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        torch.rand(RANK)
        index, features, labels = batch
        return super().loss((index, functional.dropout(features), labels))

    def configure_optimizers(self) -> Any:
        return Noisy(self.parameters(), lr=0.1)


@case
def optimizers_that_draw(folder: str) -> Any:
    """Digests after each batch, of a run that is resumed as well; and what the steps have drawn."""
    os.environ.pop("PL_GLOBAL_SEED")  # with which Lightning would seed all ranks alike
    torch.manual_seed(RANK)
    module = Sampling()
    saving = ModelCheckpoint(f"{folder}/drawing", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(module, max_epochs=2, callbacks=[saving], enable_checkpointing=True)[1].digests
    torch.manual_seed(RANK + 7)
    again, trace = Sampling(), Trace()
    trainer(trace, max_epochs=2).fit(
        again.double(), loader(*COUNTS), ckpt_path=_broadcast(f"{folder}/drawing/step=3.ckpt")
    )
    return whole, trace.digests, module.drawn, again.drawn
