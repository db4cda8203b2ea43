"""The table of hooks on the page of `ddp_join`: hooks on shadow steps, and their arguments."""

import re
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.toolkit import RANK, run_on_ranks, trainer, values_of

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


def fit_and_test(folder: str) -> list[tuple[str, bool, int | None, Any]]:
    module, made = Watching(), trainer(gradient_clip_val=1.0, precision="32-true")
    batches = [torch.full((2, 2), float(10 * RANK + number)) for number in range(COUNTS[RANK])]
    loader = DataLoader(batches, batch_size=None)
    made.fit(module, loader, loader)
    made.test(module, loader, verbose=False)
    made.predict(module, loader)
    return module.calls


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


def fit_returning(folder: str) -> tuple[list[int], list[tuple[str, bool, int | None, Any]]]:
    sizes = ((2, 2, 2, 2, 2), (2, 2, 1))[RANK]
    batches = [torch.full((size, 2), float(10 * RANK + number)) for number, size in enumerate(sizes)]
    module = Returning()
    trainer(max_epochs=2, precision="32-true").fit(module, DataLoader(batches, batch_size=None))
    return module.alive, module.calls


PAGE = (Path(__file__).parents[2] / "docs" / "ddp_join.md").read_text()
ROWS = re.findall(r"^\| (`on_before_batch_transfer`.*?|`\w+`.*?) \| (yes|\*\*no\*\*) \|", PAGE, re.MULTILINE)
PROMISED = {name: runs == "yes" for names, runs in ROWS for name in re.findall(r"`(\w+)`", names)}


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(2, [fit_and_test, fit_returning])


@pytest.fixture(scope="module")
def calls(found):
    return values_of(found, fit_and_test)


def test_hooks_run_on_shadow_steps_as_the_page_says(calls):
    active, joined = (Counter(name for name, *_ in of_rank) for of_rank in calls)
    assert PROMISED.keys() | set(EPOCH) == active.keys()
    for hook, runs in PROMISED.items():
        assert active[hook] in (3, 12), hook  # batch transfers: training, validation, test and prediction
        assert joined[hook] == (active[hook] if runs else 1), hook


def test_hooks_of_training_get_the_last_batch_a_loss_of_zero_and_the_gradient_of_all_ranks(calls):
    def given(rank, hook):
        return [found for name, _, _, found in calls[rank] if name == hook]

    assert {batch for _, _, batch, _ in calls[1] if batch is not None} == {10}
    outputs, losses = given(1, "on_train_batch_end"), given(1, "on_before_backward")
    assert outputs[0]["loss"] > 0
    assert outputs[1:] == [{"loss": 0.0, "mark": 10.0}] * 2
    assert losses[0] > 0
    assert losses[1:] == [0.0, 0.0]
    for hook in WITH_GRADIENT:
        assert given(0, hook) == given(1, hook)
        assert len(given(0, hook)) == 3


def test_shadow_steps_are_visible_but_before_the_transfer_and_in_epochs(calls):
    shadow = Counter(name for name, is_shadow, *_ in calls[1] if is_shadow)
    assert not set(shadow) & set(EPOCH)
    assert not shadow["on_before_batch_transfer"]
    assert shadow["transfer_batch_to_device"] == shadow["on_after_batch_transfer"] == 8
    assert [shadow[name] for name in ("on_train_batch_start", "optimizer_step", "on_train_batch_end")] == [2] * 3
    assert not any(is_shadow for _, is_shadow, *_ in calls[0])


def test_no_output_but_that_of_the_last_batch_outlives_its_step(found):
    (alive, _), (alive_on_joined, calls) = values_of(found, fit_returning)
    assert alive == [0] * 10
    assert alive_on_joined == [0] * 3 + [1, 1, 0]  # on the host, until the last batch of the next epoch
    sizes = {10: 2, 11: 2, 12: 1}  # in shadow steps the output has the shape of the stand-in
    assert [(batch, shape) for _, _, batch, shape in calls] == [
        (batch, (sizes[batch], 1)) for batch in [10, 11, 12, 12, 12] * 2
    ]
    assert [is_shadow for _, is_shadow, *_ in calls] == [False, False, False, True, True] * 2
