"""Hooks of `ddp_join` on shadow steps: the table on its page, their arguments, and batches that end early."""

import re
import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.toolkit import RANK, Classifier, Stream, fit, gather, loader, samples, trainer

COUNTS = (3, 1)  # batches of each rank
WITH_BATCH = {  # position of the batch among the arguments
    "on_before_batch_transfer": 0, "transfer_batch_to_device": 0, "on_after_batch_transfer": 0,
    "on_train_batch_start": 0, "training_step": 0, "on_train_batch_end": 1,
    "on_validation_batch_start": 0, "validation_step": 0, "on_validation_batch_end": 1,
    "on_test_batch_start": 0, "test_step": 0, "on_test_batch_end": 1,
    "on_predict_batch_start": 0, "predict_step": 0, "on_predict_batch_end": 1,
}  # fmt: skip
EPOCH = ["on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_start", "on_validation_epoch_end"]
WITH_GRADIENT = ["on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"]
WITHOUT = [
    "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "lr_scheduler_step", *WITH_GRADIENT, *EPOCH,
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

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def watched(name: str) -> Callable[..., Any]:
    """Return a hook that notes `is_shadow`, the number of its batch, and the loss, outputs or gradient it finds."""
    hook = getattr(Plain, name)

    def call(self: Plain, *args: Any, **kwargs: Any) -> Any:
        batch = int(args[WITH_BATCH[name]][0, 0]) if name in WITH_BATCH else None
        given: Any = None
        if name == "on_before_backward":
            given = float(args[0])
        elif name == "on_train_batch_end":
            given = {key: float(value) for key, value in args[0].items()}
        elif name in WITH_GRADIENT:
            given = self.layer.weight.grad.tolist()
        self.calls.append((name, self.trainer.strategy.is_shadow, batch, given))
        return hook(self, *args, **kwargs)

    return call


Watching = type("Watching", (Plain,), {name: watched(name) for name in [*WITH_BATCH, *WITHOUT]})


@cache
def calls_of_ranks() -> list[list[tuple[str, bool, int | None, Any]]]:
    """Train, test and predict; return the calls of both ranks."""
    module, made = Watching(), trainer(gradient_clip_val=1.0, precision="32-true")
    batches = [torch.full((2, 2), float(10 * RANK + number)) for number in range(COUNTS[RANK])]
    loader = DataLoader(batches, batch_size=None)
    made.fit(module, loader, loader)
    made.test(module, loader, verbose=False)
    made.predict(module, loader)
    return gather(module.calls)


class Output:
    """A part of an output, of which nothing but the loop should hold a reference."""


class Returning(Plain):
    """Notes in each step how many outputs of earlier steps are alive, and what `on_train_batch_end` gets."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Output]] = []
        self.alive: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        self.alive.append(sum(made() is not None for made in self.made))
        part = Output()
        self.made.append(weakref.ref(part))
        logits = self.layer(batch)
        return {"loss": logits.square().mean(), "parts": {"logits": logits, "part": part}}

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.calls.append(("", self.trainer.strategy.is_shadow, int(batch[0, 0]), outputs["parts"]["logits"].shape))


PAGE = (Path(__file__).parents[2] / "docs" / "ddp_join.md").read_text()
ROWS = re.findall(r"^\| (`on_before_batch_transfer`.*?|`\w+`.*?) \| (yes|\*\*no\*\*) \|", PAGE, re.MULTILINE)
PROMISED = {name: runs == "yes" for names, runs in ROWS for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.ranks(2)
def test_hooks_run_on_shadow_steps_as_the_page_says() -> None:
    active, joined = (Counter(name for name, *_ in of_rank) for of_rank in calls_of_ranks())
    assert PROMISED.keys() | set(EPOCH) == active.keys()
    for hook, runs in PROMISED.items():
        assert active[hook] in (3, 12), hook  # batch transfers: training, validation, test and prediction
        assert joined[hook] == (active[hook] if runs else 1), hook


@pytest.mark.ranks(2)
def test_hooks_of_training_get_the_last_batch_a_loss_of_zero_and_the_gradient_of_all_ranks() -> None:
    def given(rank: int, hook: str) -> list[Any]:
        return [found for name, _, _, found in calls_of_ranks()[rank] if name == hook]

    assert {batch for _, _, batch, _ in calls_of_ranks()[1] if batch is not None} == {10}
    outputs, losses = given(1, "on_train_batch_end"), given(1, "on_before_backward")
    assert outputs[0]["loss"] > 0
    assert outputs[1:] == [{"loss": 0.0, "mark": 10.0}] * 2
    assert losses[0] > 0
    assert losses[1:] == [0.0, 0.0]
    for hook in WITH_GRADIENT:
        assert given(0, hook) == given(1, hook)
        assert len(given(0, hook)) == 3


@pytest.mark.ranks(2)
def test_shadow_steps_are_visible_but_before_the_transfer_and_in_epochs() -> None:
    active, joined = calls_of_ranks()
    shadow = Counter(name for name, is_shadow, *_ in joined if is_shadow)
    assert not set(shadow) & set(EPOCH)
    assert not shadow["on_before_batch_transfer"]
    assert shadow["transfer_batch_to_device"] == shadow["on_after_batch_transfer"] == 8
    assert [shadow[name] for name in ("on_train_batch_start", "optimizer_step", "on_train_batch_end")] == [2] * 3
    assert not any(is_shadow for _, is_shadow, *_ in active)


@pytest.mark.ranks(2)
def test_no_output_but_that_of_the_last_batch_outlives_its_step() -> None:
    sizes = ((2, 2, 2, 2, 2), (2, 2, 1))[RANK]
    batches = [torch.full((size, 2), float(10 * RANK + number)) for number, size in enumerate(sizes)]
    module = Returning()
    trainer(max_epochs=2, precision="32-true").fit(module, DataLoader(batches, batch_size=None))
    if RANK == 0:
        assert module.alive == [0] * 10
        return
    assert module.alive == [0] * 3 + [1, 1, 0]  # on the host, until the last batch of the next epoch
    # In shadow steps the output has the shape of the stand-in.
    shapes = {10: (2, 1), 11: (2, 1), 12: (1, 1)}
    assert [(batch, shape) for _, _, batch, shape in module.calls] == [
        (batch, shapes[batch]) for batch in [10, 11, 12, 12, 12] * 2
    ]
    assert [is_shadow for _, is_shadow, *_ in module.calls] == [False, False, False, True, True] * 2


class Ending(Classifier):
    """Ends the epoch before its third batch, and notes what the end of the epoch sees."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.was_shadow = self.trainer.strategy.is_shadow


@pytest.mark.ranks(2)
def test_a_batch_that_a_hook_skips_has_ended_at_the_end_of_the_epoch() -> None:
    module = Ending()
    fit(module, loader(8, 2))
    assert module.was_shadow is False


class Marked(Classifier):
    """Returns more than a loss, and notes the outputs that hooks see in shadow steps of the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "mark": batch[2].sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.strategy.is_shadow and self.current_epoch:
            self.seen.append(sorted(outputs))


class FirstEpochOnly(Stream):
    """Has items in the first epoch, and afterwards on rank 0 only."""

    def __iter__(self) -> Any:
        items, self.items = self.items, self.items if RANK == 0 else []
        return iter(items)


@pytest.mark.ranks(2)
def test_a_stand_in_of_another_rank_has_no_output_of_an_earlier_epoch() -> None:
    module = Marked()
    fit(module, DataLoader(FirstEpochOnly(list(zip(*samples(4), strict=True))), batch_size=2), max_epochs=2)
    assert module.seen == ([["loss"]] * 2 if RANK else [])
