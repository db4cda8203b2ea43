"""Values that differ between ranks: counts in buffers, and losses over features of all ranks."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torchmetrics import MeanMetric

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.callbacks import ReplicaConsistency
from tests.parity.models import Twins
from tests.strategies.toolkit import Case, Classifier, run_on_ranks, values_of

EVEN = [[3, 3, 5], [2, 1, 4]]
UNEVEN = [[3, 2], [2, 4, 3, 1]]  # rank 0 makes shadow steps
JOIN = partial(DDPJoinStrategy)


class Trained(Classifier):
    """Trains with momentum."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)


# ---------------------------------------------------------------- counts


class Counting(Trained):
    """Counts labels in an integer buffer and adds the counts of all ranks up in a hook."""

    def __init__(
        self, hook: str = "on_train_batch_end", automatic: bool = True, resets: bool = True, first_epoch: int = 0
    ) -> None:
        super().__init__()
        self.automatic_optimization, self.resets, self.first_epoch = automatic, resets, first_epoch
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("any_seen", torch.zeros(4, dtype=torch.bool))
        self.found: list[Any] = []
        setattr(self, hook, self.add_up)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = torch.bincount(batch[1], minlength=4)[:4]
        if self.current_epoch >= self.first_epoch:
            self.counts += own
            self.any_seen |= own > 0
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss / 2, retain_graph=True)
        self.manual_backward(loss / 2)
        optimizer.step()
        return None

    def add_up(self, *_: Any) -> None:
        both = torch.stack([self.counts, self.any_seen.long()])
        if dist.is_initialized():
            dist.all_reduce(both)
        self.found.append([both[0].tolist(), (both[1] > 0).tolist()])
        if self.resets:
            self.counts.zero_()
            self.any_seen.zero_()


def counted(case: Case) -> list[Any]:
    """Return what hooks have found, the buffers at the end, and warnings."""
    module = case.module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        replace(case, module=lambda: module)()
    named = [str(one.message) for one in caught if "buffer `counts` was changed differently" in str(one.message)]
    return [module.found, module.counts.tolist(), module.any_seen.tolist(), named]


COUNTS = {
    "counts, even": Case(EVEN, Counting),
    "counts, uneven": Case(UNEVEN, Counting, JOIN),
    "counts, before the optimizer": Case(UNEVEN, partial(Counting, "on_before_optimizer_step"), JOIN),
    "counts, manual": Case(UNEVEN, partial(Counting, automatic=False), JOIN),
    "counts, accumulated": Case([[2, 1, 3, 2], [1, 1, 2, 4]], partial(Counting, "on_before_optimizer_step"), windows=2),
}
COUNTS["counts, compared"] = replace(
    COUNTS["counts, even"], trainer={"callbacks": [ReplicaConsistency(every_n_steps=1)]}
)
KEPT = {
    "kept": Case(EVEN, partial(Counting, "on_train_epoch_end", resets=False)),
    "kept, from the second epoch": Case(EVEN, partial(Counting, "on_train_epoch_end", resets=False, first_epoch=1)),
}


class Saving(Callback):
    """Saves in a hook of each batch, and reads the counts once the batch has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.path.exists():
            saved = torch.load(self.path, weights_only=False)["state_dict"]
            self.found.append((saved["counts"].tolist(), module.counts.tolist()))


def saved_in_a_hook(folder: str) -> Any:
    saving = Saving(Path(folder) / "counts.ckpt")
    module = Counting("on_train_epoch_end", resets=False)
    Case(UNEVEN, lambda: module, JOIN, trainer={"callbacks": [saving]})()
    return saving.found


class Measuring(Trained):
    """Communicates in a metric and in a logged value only."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric(dist_sync_on_step=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.metric(loss.detach())
        return loss


def warned(case: Case) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = case()
    return trace, [str(one.message) for one in caught if "communicates between ranks" in str(one.message)]


SAMPLES = {
    "twins by samples": Case(EVEN, Twins),
    "twins by samples, uneven": Case(UNEVEN, Twins, JOIN),
    "twins of equal batches": Case([[3, 3], [3, 3]], Twins),
    "metrics only": Case(EVEN, Measuring),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_on_ranks(
        2,
        {
            "saved": saved_in_a_hook,
            **{name: partial(_on_rank, counted, case) for name, case in COUNTS.items()},
            **{name: partial(_on_rank, counted, case) for name, case in KEPT.items()},
            **{name: partial(_on_rank, warned, case) for name, case in SAMPLES.items()},
        },
        tmp_path_factory.mktemp("checkpoints"),
    )


def _on_rank(function: Callable[[Case], Any], case: Case, folder: str) -> Any:
    return function(case)


@pytest.mark.parametrize("name", COUNTS)
def test_hooks_add_up_the_integers_of_each_rank_as_in_one_process(found, name):
    module = COUNTS[name].module()
    replace(COUNTS[name], module=lambda: module).alone()
    for values in values_of(found, name):
        assert values == [module.found, [0] * 4, [False] * 4, []]


@pytest.mark.parametrize("name", KEPT)
def test_integers_become_equal_after_each_batch_and_a_warning_names_those_that_differed(found, name):
    (_, counts, seen, first), (_, *others, second) = values_of(found, name)
    assert others == [counts, seen]
    assert first == []
    assert len(second) == 1
    assert "the value of rank 0 is kept" in second[0]
    assert "_set_params_and_buffers_to_ignore_for_model(module, ['counts'])" in second[0]


def test_a_checkpoint_of_a_hook_holds_the_integers_that_all_ranks_get_after_the_batch(found):
    first, second = values_of(found, "saved")
    assert first == second
    assert len(first) == 7
    assert len({tuple(after) for _, after in first}) > 4
    assert all(saved == after for saved, after in first)


def test_one_warning_says_that_a_step_that_communicates_needs_equal_weights(found):
    for name in SAMPLES:
        texts = [text for _, own in values_of(found, name) for text in own]
        assert len(texts) == ("by samples" in name), name
        assert all('needs `weight_by="equal"`' in text for text in texts)
