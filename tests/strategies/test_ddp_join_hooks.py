"""The table of hooks on the page of `ddp_join`: hooks on shadow steps, and their arguments."""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.ddp_ranks import quiet_trainer
from tests.support.processes import run_processes

RANK = int(os.environ.get("RANK", 0))
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
    """A module with the default hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[tuple[str, bool, int | None, Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.layer(batch).square().mean() + 1, "mark": float(batch[0, 0])}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).mean()

    test_step = validation_step

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
    batches = [torch.full((2, 2), float(10 * RANK + number)) for number in range(COUNTS[RANK])]
    return DataLoader(batches, batch_size=None)


def fit_and_test() -> list[tuple[str, bool, int | None, Any]]:
    """Fit one epoch and test; returns for each call of a hook `is_shadow`, the batch's number, and what was given."""
    module = Watching()
    trainer = quiet_trainer(strategy="ddp_join", max_epochs=1, gradient_clip_val=1.0, num_sanity_val_steps=0)
    trainer.fit(module, _loader(), _loader())
    trainer.test(module, _loader(), verbose=False)
    return module.calls


PAGE = (Path(__file__).parents[2] / "docs" / "ddp_join.md").read_text()
ROWS = re.findall(r"^\| (`on_before_batch_transfer`.*?|`\w+`.*?) \| (yes|\*\*no\*\*) \|", PAGE, re.MULTILINE)
PROMISED = {name: runs == "yes" for names, runs in ROWS for name in re.findall(r"`(\w+)`", names)}
EPOCH = ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end"]
TRANSFER = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]


@pytest.fixture(scope="module")
def calls():
    return run_processes(fit_and_test, 2, timeout=120)


def counts(calls):
    return [Counter(name for name, *_ in of_rank) for of_rank in calls]


def test_the_page_names_every_hook_that_is_watched(calls):
    assert PROMISED.keys() | set(EPOCH) == counts(calls)[0].keys()


def test_hooks_run_on_shadow_steps_as_the_page_says(calls):
    for hook, runs in PROMISED.items():
        active, joined = (count[hook] for count in counts(calls))
        assert active in (3, 9), hook  # batch transfers: training, validation and test
        assert joined == (active if runs else 1), hook


def test_hooks_of_training_get_the_last_batch_and_outputs_with_a_loss_of_zero(calls):
    joined = calls[1]
    assert {batch for _, _, batch, _ in joined if batch is not None} == {10}
    outputs = [given for name, _, _, given in joined if name == "on_train_batch_end"]
    assert outputs[0]["loss"] > 0
    assert outputs[1:] == [{"loss": 0.0, "mark": 10.0}] * 2
    losses = [given for name, _, _, given in joined if name == "on_before_backward"]
    assert losses[0] > 0
    assert losses[1:] == [0.0, 0.0]


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"])
def test_hooks_find_the_gradient_of_all_ranks(calls, hook):
    active, joined = ([given for name, _, _, given in of_rank if name == hook] for of_rank in calls)
    assert active == joined
    assert all(active)


def test_shadow_steps_are_visible_but_before_the_transfer_and_in_epochs(calls):
    shadow_ranks = Counter(name for name, is_shadow, *_ in calls[1] if is_shadow)
    assert not set(shadow_ranks) & {"on_before_batch_transfer", *EPOCH}
    assert all(shadow_ranks[name] == 6 for name in TRANSFER[1:])
    assert [shadow_ranks[name] for name in ("on_train_batch_start", "optimizer_step", "on_train_batch_end")] == [2] * 3
    assert not any(is_shadow for _, is_shadow, *_ in calls[0])
