"""Values that differ between ranks: settings of optimizers, counts in buffers, losses over features of all ranks."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torchmetrics import MeanMetric

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import ReplicaConsistency
from tests.strategies.toolkit import RANK, Case, Classifier, assert_same_training, run_on_ranks, values_of

EVEN = [[3, 3, 5], [2, 1, 4]]
UNEVEN = [[3, 2], [2, 4, 3, 1]]  # rank 0 makes shadow steps
JOIN = partial(DDPJoinStrategy)


class Trained(Classifier):
    """Trains with momentum."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, lr=0.1, momentum=0.9)


# ---------------------------------------------------------------- settings of optimizers


class Monitoring(Trained):
    """Reduces the learning rate by a value of this rank."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own"}}

    def on_train_epoch_end(self) -> None:
        self.log("own", float(self.current_epoch * (1 if RANK else -1)))


class WarmingUp(Trained):
    """Sets the learning rate by the number of samples of this rank, at a tensor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1), foreach=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trainer.optimizers[0].param_groups[0]["lr"].fill_(0.1 / (1 + len(self.seen)))


class Growing(Trained):
    """Adds a parameter group on rank 1 only."""

    def on_train_batch_end(self, *_: Any) -> None:
        if RANK and self.global_step == 2:
            parameter = torch.nn.Parameter(torch.zeros(1, device=self.device))
            self.trainer.optimizers[0].add_param_group({"params": [parameter]})


class DecayingLast(Trained):
    """Changes a setting in the last batch of the run, of which no gradient tells."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_last_batch and self.current_epoch == 1:
            self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * RANK


class Manual(Trained):
    """Sets the learning rate of a manual step, on all ranks alike or on one rank."""

    def __init__(self, is_alike: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.is_alike = False, is_alike

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + batch_idx) if self.is_alike or batch_idx < 2 else 0.1 * (1 + RANK)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Thawing(Trained):
    """Trains another layer on each rank, and the network on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.network.parameters(), *self.layers[RANK].parameters()], lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(parameter.square().sum() for parameter in self.layers.parameters())


class Numpy(Trained):
    """Holds a setting in an array of NumPy."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.trainer.optimizers[0].param_groups[0]["weights"] = np.array([0.5, 0.25 * (1 + RANK)], dtype=np.float32)


class Scheduled(Trained):
    """Changes settings on all ranks alike: by a scheduler in each batch, and in the step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.01 * batch_idx
        return super().training_step(batch, batch_idx)


CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    "monitor": (Monitoring, "setting `lr` of parameter group 0 of optimizer 0 (SGD) is 0.1 on rank 0 but 0.01"),
    "warm-up": (WarmingUp, "setting `lr` of parameter group 0 of optimizer 0 (SGD) is 0.0"),
    "group": (Growing, "number of parameter groups of optimizer 0 (SGD) is 1 on rank 0 but 2 on rank 1. Make"),
    "parameters": (
        Thawing,
        "parameter `layers.0.weight` of parameter group 0 of optimizer 0 (SGD) is present on rank 0 but missing on"
        " rank 1; parameter `layers.0.bias` of",
    ),
    "numpy": (Numpy, "setting `weights` of parameter group 0 of optimizer 0 (SGD) is [0.5, 0.25] on rank 0 but [0.5, "),
    "last batch": (
        DecayingLast,
        "setting `weight_decay` of parameter group 0 of optimizer 0 (SGD) is 0.0 on rank 0 but 0.1",
    ),
    "manual": (
        partial(Manual, False),
        "setting `lr` of parameter group 0 of optimizer 0 (SGD) is 0.1 on rank 0 but 0.2",
    ),
}
SETTINGS = {
    f"{name}, {strategy}": Case(sizes, module, kind, trainer={"max_epochs": 3 if name == "monitor" else 2})
    for name, (module, _) in CHANGED.items()
    for strategy, kind, sizes in (("even", DDPCheckpointStrategy, EVEN), ("uneven", JOIN, [[3, 2, 2, 1], [2, 4, 3]]))
    if (name, strategy) != ("manual", "uneven") and (name, strategy) != ("group", "uneven")
}
ALIKE = {
    "scheduled, even": Case(EVEN, Scheduled),
    "scheduled, uneven": Case(UNEVEN, Scheduled, JOIN),
    "manual, alike": Case(UNEVEN, partial(Manual, True), JOIN),
}


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


# ---------------------------------------------------------------- losses over features of all ranks


class Twins(Trained):
    """Barlow Twins: the loss of statistics of all samples, on every rank."""

    def loss(self, batch: Any) -> Tensor:
        features = batch[0].to(self.network[0].weight.dtype)
        one, other = self.network(features), self.network(features + 0.1 * features.roll(1, 1))
        product, number = one.T @ other, torch.tensor(float(len(features)), dtype=torch.float64)
        if dist.is_initialized():
            product = all_reduce(product)
            dist.all_reduce(number)
        product = product / number
        return 0.01 * ((torch.diagonal(product) - 1).square().sum() + 0.1 * product.square().sum())


def gathered(own: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks with their gradients, and the position of the first own row."""
    if not dist.is_initialized():
        return own, 0
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(len(own)))
    start, total = int(sum(sizes[:RANK])), int(sum(sizes))
    return all_reduce(functional.pad(own, (0, 0, start, total - start - len(own)))), start


class Contrast(Trained):
    """CLIP and SimCLR: each view of a sample is compared with the other views of all samples."""

    def __init__(self, is_local: bool) -> None:
        super().__init__()
        self.is_local = is_local

    def loss(self, batch: Any) -> Tensor:
        features = batch[0].to(self.network[0].weight.dtype)
        one, start = gathered(self.network(features))
        other, _ = gathered(self.network(features + 0.1 * features.roll(1, 1)))
        if not self.is_local:
            logits = one @ other.T
            own = torch.arange(len(one))
            return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2
        rows = torch.arange(start, start + len(features))
        return functional.cross_entropy(one[rows] @ other.T, rows, reduction="sum") / len(one)


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


EQUAL = {
    "twins, even steps": Case(EVEN, Twins, partial(DDPCheckpointStrategy, weight_by="equal")),
    "all pairs": Case(EVEN, partial(Contrast, False), partial(DDPCheckpointStrategy, weight_by="equal")),
    "own pairs": Case(EVEN, partial(Contrast, True), partial(DDPCheckpointStrategy, weight_by="sum")),
}
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
            **SETTINGS,
            **ALIKE,
            **{name: partial(_on_rank, counted, case) for name, case in COUNTS.items()},
            **{name: partial(_on_rank, counted, case) for name, case in KEPT.items()},
            **EQUAL,
            **{name: partial(_on_rank, warned, case) for name, case in SAMPLES.items()},
        },
        tmp_path_factory.mktemp("checkpoints"),
    )


def _on_rank(function: Callable[[Case], Any], case: Case, folder: str) -> Any:
    return function(case)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_between_ranks_are_named_with_their_values_on_all_ranks(found, name):
    for error in found[name]:
        last = str(error).strip().splitlines()[-1]
        expected = CHANGED[name.split(",")[0]][1]
        assert f"ReplicaMismatchError: ranks are not set up alike: {expected}" in last
        assert ("`sync_dist=True`" in last) == expected.startswith("setting")


@pytest.mark.parametrize("name", ALIKE)
def test_settings_that_all_ranks_change_alike_are_no_error(found, name):
    alone, traces = ALIKE[name].alone(), values_of(found, name)
    assert traces[0].digests == traces[1].digests != []
    for trace in traces:
        torch.testing.assert_close(trace.parameters, alone.parameters, rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("name", EQUAL)
def test_a_loss_over_features_of_all_ranks_is_exact_with_the_documented_weights(found, name):
    assert_same_training(values_of(found, name), EQUAL[name].alone(), tolerance=1e-10)


def test_by_samples_a_loss_over_features_of_all_ranks_is_wrong(found):
    by_samples = values_of(found, "twins by samples")[0][0]
    assert (by_samples.parameters - EQUAL["twins, even steps"].alone().parameters).abs().max() > 1e-5


def test_one_warning_says_that_a_step_that_communicates_needs_equal_weights(found):
    for name in SAMPLES:
        texts = [text for _, own in values_of(found, name) for text in own]
        assert len(texts) == ("by samples" in name), name
        assert all('needs `weight_by="equal"`' in text for text in texts)


@pytest.mark.slow
def test_three_ranks_of_which_two_run_out_of_data_train_as_one_process():
    sizes = [[3, 2], [2, 4, 3, 1], [4, 1, 2]]
    twins = Case(sizes, Twins, partial(DDPJoinStrategy, weight_by="equal"))
    made = run_on_ranks(3, {"twins": twins, "counts": partial(_on_rank, counted, Case(sizes, Counting, JOIN))})
    assert_same_training(values_of(made, "twins"), twins.alone(), tolerance=1e-10)
    module = Counting()
    Case(sizes, lambda: module).alone()
    assert values_of(made, "counts") == [[module.found, [0] * 4, [False] * 4, []]] * 3
