"""Loaders that are set up before the strategy, and batches that do not end as usual."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.strategies.toolkit import RANK, Classifier, Stream, fit, loader, run_on_ranks, samples, values_of


class Ending(Classifier):
    """Ends the epoch before its third batch, and notes what the end of the epoch sees."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.was_shadow = self.trainer.strategy.is_shadow


class Marked(Classifier):
    """Returns more than a loss, and notes the outputs that hooks see in shadow steps of the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "mark": batch[2].sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.strategy.is_shadow and self.current_epoch:
            self.seen.append([sorted(outputs), batch[2].tolist()])


class FirstEpochOnly(Stream):
    """Has items in the first epoch, and afterwards on rank 0 only."""

    def __iter__(self) -> Any:
        items, self.items = self.items, self.items if RANK == 0 else []
        return iter(items)


def ended(folder: str) -> Any:
    module = Ending()
    fit(module, loader(8, 2))
    return module.was_shadow


def marked(folder: str) -> Any:
    module = Marked()
    fit(module, DataLoader(FirstEpochOnly(list(zip(*samples(4), strict=True))), batch_size=2), max_epochs=2)
    return module.seen


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Callable[[Callable[[str], Any]], list[Any]]:
    by_case = run_on_ranks(2, [ended, marked], tmp_path_factory.mktemp("ends"))
    return lambda case: values_of(by_case, case)


def test_a_batch_that_a_hook_skips_has_ended_at_the_end_of_the_epoch(found):
    assert found(ended) == [False, False]


def test_a_stand_in_of_another_rank_has_no_output_of_an_earlier_epoch(found):
    of_shadow = found(marked)[1]
    assert of_shadow
    assert {tuple(names) for names, _ in of_shadow} == {("loss",)}
