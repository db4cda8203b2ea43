"""Which hooks run on shadow steps, and what they are given; kept apart because every rank imports it."""

import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.ddp_ranks import quiet_trainer

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
COUNTS = (3, 1)  # batches of each rank
_WITH_BATCH = {  # position of the batch among the arguments
    "on_before_batch_transfer": 0, "transfer_batch_to_device": 0, "on_after_batch_transfer": 0,
    "on_train_batch_start": 0, "training_step": 0, "on_train_batch_end": 1,
    "on_validation_batch_start": 0, "validation_step": 0, "on_validation_batch_end": 1,
    "on_test_batch_start": 0, "test_step": 0, "on_test_batch_end": 1,
}  # fmt: skip
_WITHOUT = [
    "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step",
    "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end",
]  # fmt: skip


class Plain(LightningModule):
    """A module whose hooks do what they do anyhow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[tuple[str, bool, int | None, Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.layer(batch).square().mean() + 1, "mark": float(batch[0, 0])}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _watched(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Plain, *args: Any, **kwargs: Any) -> Any:
        position = _WITH_BATCH.get(name)
        batch = None if position is None else int(args[position][0, 0])
        first = args[0] if args else None
        given = {key: float(value) for key, value in first.items()} if isinstance(first, dict) else None
        if name == "on_before_backward":
            given = float(first)
        if name in ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"):
            given = self.layer.weight.grad.tolist()
        self.calls.append((name, self.trainer.strategy.is_shadow, batch, given))
        return hook(self, *args, **kwargs)

    return call


Watching = type(
    "Watching", (Plain,), {name: _watched(name, getattr(Plain, name)) for name in [*_WITH_BATCH, *_WITHOUT]}
)


def _loader() -> DataLoader:
    return DataLoader(
        [torch.full((2, 2), float(10 * RANK + number)) for number in range(COUNTS[RANK])], batch_size=None
    )


def fit_and_test() -> list[tuple[str, bool, int | None, Any]]:
    """Fit one epoch and test; returns for each call of a hook `is_shadow`, the batch's number, and what was given."""
    module = Watching()
    trainer = quiet_trainer(
        strategy="ddp_join",
        devices=WORLD_SIZE,
        max_epochs=1,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, _loader(), _loader())
    trainer.test(module, _loader(), verbose=False)
    return module.calls
