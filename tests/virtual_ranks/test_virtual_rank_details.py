"""The tree of virtual ranks, what it refuses, and what the parts of a batch begin with."""

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPJoinStrategy
from lightning_ddp_ext import fabric as for_fabric
from lightning_ddp_ext.batches.chunk_sizes import ChunkRule
from lightning_ddp_ext.consistency import hash_training_state
from lightning_ddp_ext.errors import ReplicaMismatchError, UnsupportedFeatureError
from lightning_ddp_ext.reducer.buckets import GradientBucket
from lightning_ddp_ext.reducer.virtual_reducer import (
    Node,
    NodeSums,
    TreeSum,
    TreeTransport,
    Values,
    VirtualReducer,
    nodes_of,
)
from lightning_ddp_ext.shares.parts import PartSampler
from lightning_ddp_ext.steps.balancer import ShareBalancer
from tests.strategies.toolkit import WORLD_SIZE, Adversaries, Momentum, fit, run_on_ranks, samples, trainer, values_of
from tests.support.devices import accelerator
from tests.support.training import quiet_trainer
from tests.virtual_ranks.models import CLASSES, Classifier, Images, convolutions, perceptron

pytestmark = pytest.mark.timeout(600)


# ---------------------------------------------------------------- the tree


def sums_of(values: torch.Tensor, run: range) -> list[tuple[Node, Values]]:
    sums = NodeSums()
    for part in run:
        sums.push((part, 1), {0: values[part].clone()})
    return sums.entries


@pytest.mark.parametrize("parts", range(1, 14))
def test_ranks_add_the_largest_nodes_of_their_parts_whatever_the_cuts(parts: int) -> None:
    values = torch.randn(parts, generator=torch.Generator().manual_seed(parts)) * 10.0 ** torch.arange(parts)

    whole = {node: of_node[0] for node, of_node in sums_of(values, range(parts))}
    assert [size for _, size in whole] == [1 << bit for bit in reversed(range(4)) if parts >> bit & 1]
    for first, end in combinations(range(parts + 1), 2):
        assert [node for node, _ in sums_of(values, range(first, end))] == nodes_of(range(first, end))
        for (start, size), of_node in sums_of(values, range(first, end)):
            assert start % size == 0
            ((_, alone),) = sums_of(values, range(start, start + size))
            assert torch.equal(of_node[0], alone[0])  # does not depend on the other parts of the rank


def test_a_sum_with_a_missing_gradient_keeps_the_sign_of_a_zero() -> None:
    sums = NodeSums()
    sums.push((0, 1), {0: torch.tensor([-0.0, 1.0])})
    sums.push((1, 1), {1: torch.ones(1)})
    ((_, values),) = sums.entries
    assert values.keys() == {0, 1}
    parameter = nn.Parameter(torch.ones(2))  # has no gradient
    bucket = GradientBucket(0, [parameter], [0])
    bucket.pack_all(1.0)
    assert (bucket.buffer() + values[0]).tolist() == values[0].tolist() == [0.0, 1.0]
    assert (bucket.buffer() + values[0]).signbit().tolist() == [True, False]


DIVISIONS = {2: [(4, 4), (3, 5), (8, 0), (2, 6), (0, 8), (7, 1)], 3: [(3, 3, 2), (4, 2, 2), (0, 7, 1)]}


def sum_with_every_division(_: str) -> list[tuple[bool, int]]:
    dist.init_process_group("gloo")
    values = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(8)[:, None]
    ((_, expected),) = sums_of(values, range(8))
    tree, found = TreeSum(dist.group.WORLD), []
    for numbers in DIVISIONS[dist.get_world_size()]:
        tree.begin(numbers, [1] * 8)
        result = torch.zeros(12)
        with patch.object(dist, "all_gather", wraps=dist.all_gather) as second_message:
            tree.send([of_node[0] for _, of_node in sums_of(values, tree.run)], result)()
        found.append((torch.equal(result, expected[0]), second_message.call_count))
    return found


@pytest.mark.parametrize("ranks", DIVISIONS)
def test_every_division_of_the_parts_gives_the_bits_of_one_rank(ranks: int) -> None:
    """Two ranks with one node each send one message, others two."""
    expected = [(True, int(numbers != (4, 4))) for numbers in DIVISIONS[ranks]]
    found = run_on_ranks(ranks, [sum_with_every_division])
    assert values_of(found, sum_with_every_division) == [expected] * ranks


# ---------------------------------------------------------------- training


def virtual(parts: int = 4, **options: Any) -> BalancedDDPStrategy:
    return BalancedDDPStrategy(virtual_ranks=parts, **options)


def train(module: LightningModule, loader: Any, strategy: BalancedDDPStrategy | None = None, **options: Any) -> Trainer:
    trainer = quiet_trainer(strategy=strategy or virtual(), devices=1, **{"max_epochs": 1, **options})
    trainer.fit(module, loader)
    return trainer


def images(number: int = 16, **options: Any) -> DataLoader:
    return DataLoader(Images(number), batch_size=8, **options)


def tenths_of(batch: Any) -> float:
    return 0.1 * len(batch[1])


def fit_classifier(options: dict[str, Any], batches: int, folder: str) -> torch.Tensor:
    data = DataLoader(TensorDataset(*samples(26)), batch_size=11)  # the last batch of a window is short
    _, trace = fit(
        Momentum(is_sum=options.get("weight_by") == "sum"),
        data,
        strategy=BalancedDDPStrategy(**options),
        max_epochs=2,
        accumulate_grad_batches=batches,
    )
    return trace.parameters


EXACT = {
    f"{parts} parts, {weight_by}, {batches} batches": (parts, weight_by, batches)
    for parts, weight_by, batches in ((5, "samples", 1), (3, "samples", 3), (4, "sum", 3), (4, tenths_of, 3))
}


def test_the_gradient_is_that_of_the_whole_batch() -> None:
    plain, cut = (
        {
            name: partial(
                fit_classifier, {**({} if alone else {"virtual_ranks": parts}), "weight_by": weight_by}, batches
            )
            for name, (parts, weight_by, batches) in EXACT.items()
        }
        for alone in (True, False)
    )
    expected, found = run_on_ranks(1, plain), run_on_ranks(2, cut)
    for name in EXACT:
        (alone,) = values_of(expected, name)
        for parameters in values_of(found, name):
            torch.testing.assert_close(parameters, alone, rtol=1e-12, atol=1e-12)


class Skipping(nn.Module):
    """Runs each convolution for about half of the parts; the other layers fill the first bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(1, 1, 3, padding=1) for _ in range(2)])
        self.others = nn.Sequential(nn.Flatten(), nn.Linear(64, 6000), nn.ReLU(), nn.Linear(6000, CLASSES))
        self.convolutions.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            images = layer(images) if random.random() < 0.5 else images
        return self.others(images)


def follow_buckets(folder: str) -> tuple[str, str]:
    """Train; return the hash of the training state, and starts, buckets and ends of backward passes (s, b, e)."""
    events = list[str]()

    def record(patch: pytest.MonkeyPatch, owner: type, name: str, event: str) -> None:
        function = getattr(owner, name)
        patch.setattr(owner, name, lambda *args: [events.append(event), function(*args)][1])

    seed_everything(3, verbose=False)
    module = Classifier(Skipping())
    with pytest.MonkeyPatch.context() as patch:
        record(patch, VirtualReducer, "begin", "s")
        record(patch, TreeTransport, "send", "b")
        record(patch, VirtualReducer, "_finish", "e")
        made = trainer(strategy=virtual(5), precision="32-true", max_epochs=4)
        made.fit(module, images(32))
    return hash_training_state(module, made.optimizers), "".join(events)


def test_buckets_leave_during_the_last_backward_pass_unless_a_gradient_is_missing() -> None:
    found = [run_on_ranks(ranks, {"": follow_buckets}) for ranks in (1, 2, 3)]
    results = [result for one in found for result in values_of(one, "")]
    assert len({state for state, _ in results}) == 1
    for _, events in results:
        first, *others = events.split("s")[1:]
        assert first.startswith("e")  # there are no buckets yet
        assert all(batch.startswith("b") for batch in others)
        assert {batch.endswith("e") for batch in others} == {True, False}  # a convolution without a gradient waits


def test_running_statistics_are_the_mean_of_the_parts_and_steps_are_counted_once() -> None:
    class Normalised(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.network[0].running_mean.eq(0).all()  # of the start, for every part
            assert self.network[0].num_batches_tracked == 0
            return super().training_step(batch, batch_idx)

    features = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    module = Normalised(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))
    train(module, DataLoader(TensorDataset(features, torch.zeros(6).long()), batch_size=6), virtual(3))
    norm = module.network[0]
    variance = torch.stack([part.var(0) for part in features.split(2)]).mean(0)
    torch.testing.assert_close(norm.running_mean, 0.1 * features.mean(0))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variance)
    assert norm.num_batches_tracked == 1


def split_unevenly(options: dict[str, Any], folder: str) -> str:
    seed_everything(1, verbose=False)
    module = Classifier(convolutions())
    trainer, _ = fit(module, images(24, shuffle=True), strategy=virtual(**options), precision="32-true", max_epochs=2)
    return hash_training_state(module, trainer.optimizers)


def test_a_rank_may_have_no_part() -> None:
    def cases(*options: dict[str, Any]) -> dict[str, Callable[[str], Any]]:
        return {str(one): partial(split_unevenly, one) for one in options}

    expected = values_of(run_on_ranks(1, cases({})), "{}")
    found = run_on_ranks(2, cases({"split": [0, 1]}, {"gpu0_batch_size": 1}, {"split": [3, 1]}))
    assert len(found) == 3
    for name in found:
        assert values_of(found, name) == expected * 2


class Counting(Classifier):
    """Counts batches in an integer, without any loss."""

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.steps += 1


def count_steps(folder: str) -> int:
    module = Counting()
    fit(module, images(24), strategy=virtual(split=[0, 1] if WORLD_SIZE == 2 else None), precision="32-true")
    return int(module.steps)


def test_integers_without_weight_are_of_a_rank_that_has_parts() -> None:
    for ranks in (1, 2):
        assert values_of(run_on_ranks(ranks, {"": count_steps}), "") == [3] * ranks


class OfOutputs(Classifier):
    """Changes a buffer with the output of its rank."""

    def __init__(self) -> None:
        super().__init__(perceptron())
        self.register_buffer("seen", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += outputs["loss"].detach()


def end_differently(folder: str) -> None:
    with pytest.raises(ReplicaMismatchError, match="after epoch 0, ranks have different training states"):
        quiet_trainer(strategy=virtual(), devices=2, max_epochs=2).fit(OfOutputs(), images())


def test_ranks_that_hooks_change_differently_end_with_an_error() -> None:
    values_of(run_on_ranks(2, {"outputs": end_differently}), "outputs")


def test_training_begins_again_after_an_error_in_a_step() -> None:
    class Failing(Classifier):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails:
                raise ValueError("of the user")
            return super().training_step(batch, batch_idx)

    module, strategy = Failing(perceptron()), virtual()
    trainer = quiet_trainer(strategy=strategy, devices=1, max_epochs=1)
    with pytest.raises(ValueError, match="of the user"):
        trainer.fit(module, images())
    assert strategy.all_gather.__self__ is strategy  # which `training_step` must not call
    module.fails = False
    trainer.fit(module, images())
    assert trainer.global_step == 2


def test_shares_by_speed_are_numbers_of_virtual_ranks() -> None:
    messages = list[str]()
    balancer = ShareBalancer(
        ChunkRule(None, None, "auto"), 2, torch.device("cpu"), messages.append, unit="virtual ranks"
    )
    assert balancer.controller is not None
    decisions = [balancer.controller.observe([4, 4], [0.3, 0.1]) for _ in range(10)]
    assert [str(one).split(", because")[0] for one in decisions if one] == ["from 4, 4 to 2, 6 virtual ranks"]


def scale_in_half_precision(folder: str) -> tuple[str, float]:
    seed_everything(1, verbose=False)
    module, scaler = Classifier(perceptron()), torch.amp.GradScaler(accelerator(), init_scale=2.0**24)
    precision = {"precision": None, "plugins": [MixedPrecision("16-mixed", accelerator(), scaler)]}
    trainer, _ = fit(module, images(24, shuffle=True), strategy=virtual(), max_epochs=5, **precision)
    return hash_training_state(module, trainer.optimizers), scaler.get_scale()


def test_a_gradient_scaler_skips_the_same_steps() -> None:
    (alone,) = values_of(run_on_ranks(1, {"scaler": scale_in_half_precision}), "scaler")
    assert values_of(run_on_ranks(2, {"scaler": scale_in_half_precision}), "scaler") == [alone] * 2
    assert 2.0**10 < alone[1] < 2.0**24  # and other steps are made


def test_workers_draw_the_numbers_of_the_main_process() -> None:
    digests = []
    for workers in (0, 2):
        seed_everything(3, verbose=False)
        module = Classifier(perceptron())
        trainer = train(module, images(shuffle=True, num_workers=workers))
        digests.append(hash_training_state(module, trainer.optimizers))
    assert digests[0] == digests[1]


def test_a_loader_of_parts_can_be_copied() -> None:
    copied = copy.copy(PartSampler([[0, 1, 2]], 2, tuple))
    assert [*copied] == [[((0, 0), [0, 1]), ((0, 1), [2])]]


# ---------------------------------------------------------------- gradients that come in another way


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


class HookedInStep(Classifier):
    """Adds a hook on gradients in its first step."""

    is_hooked = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.is_hooked:
            self.is_hooked = True
            self.network[-1].weight.register_post_accumulate_grad_hook(halve)
        return super().training_step(batch, batch_idx)


class SparseRows(nn.Module):
    """Looks up rows of a table several times, with sparse gradients that no `nn.Embedding` announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(3, 8)), nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.flatten(1).mul(10).long().abs() % 3
        return self.head(nn.functional.embedding(rows, self.table, sparse=True).sum(1))


def test_sparse_rows_are_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="`virtual_ranks` does not support embeddings with `sparse=True`"):
        train(Classifier(SparseRows(), torch.optim.SGD), images())


def fit_hooked(folder: str) -> str:
    seed_everything(3, verbose=False)
    module = HookedInStep(perceptron())
    made = trainer(strategy=virtual(), precision="32-true")
    made.fit(module, images(32))
    return hash_training_state(module, made.optimizers)


def test_a_hook_that_a_step_adds_gets_the_same_gradient_on_any_number_of_ranks() -> None:
    found = [run_on_ranks(ranks, {"": fit_hooked}) for ranks in (1, 2, 3)]
    assert len({state for one in found for state in values_of(one, "")}) == 1


def gradients_of(options: dict[str, Any], way: str, folder: str) -> torch.Tensor:
    """Return the norms of the gradients that hooks get in windows of two batches, or optimizers in a resumed run."""
    path = f"{folder}/{sorted(options)}{way}.ckpt"
    data, norms = DataLoader(TensorDataset(*samples(32)), batch_size=8), list[torch.Tensor]()

    class SaveWithinWindow(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.save_checkpoint(path)

    def run(**more: Any) -> list[torch.Tensor]:
        seed_everything(1, verbose=False)
        module = Momentum()
        if way == "hooks":
            module.network[0].weight.register_post_accumulate_grad_hook(lambda one: norms.append(one.grad.norm()))
        _, trace = fit(module, data, strategy=BalancedDDPStrategy(**options), accumulate_grad_batches=2, **more)
        return [gradient.norm() for gradient in trace.gradients]

    if way == "hooks":
        run()
        return torch.stack(norms)
    run(callbacks=[SaveWithinWindow()])
    return torch.stack(run(ckpt_path=path))


def test_gradients_of_hooks_and_of_resumed_windows_are_those_of_the_whole_window(tmp_path: Any) -> None:
    plain, cut = (
        {way: partial(gradients_of, {**more, "weight_by": tenths_of}, way) for way in ("hooks", "resumed")}
        for more in ({}, {"virtual_ranks": 4})
    )
    expected, found = run_on_ranks(1, plain, tmp_path), run_on_ranks(2, cut, tmp_path)
    for way in cut:
        (alone,) = values_of(expected, way)
        assert len(alone) == 2
        for norms in values_of(found, way):
            torch.testing.assert_close(norms, alone)


def continue_without(folder: str) -> str:
    """Continue a run without virtual ranks, which only two ranks make, with virtual ranks."""
    path = f"{folder}/plain.ckpt"
    for strategy, options in (
        (BalancedDDPStrategy(), {"callbacks": [Saving(path)]}),
        (virtual(), {"ckpt_path": path, "max_epochs": 2}),
    ):
        if "callbacks" in options and WORLD_SIZE != 2:
            continue
        seed_everything(1, verbose=False)
        module = Momentum()
        made, _ = fit(module, DataLoader(TensorDataset(*samples(32)), batch_size=8), strategy=strategy, **options)
    return hash_training_state(module, made.optimizers)


def test_a_run_without_virtual_ranks_continues_alike_on_any_number_of_ranks(tmp_path: Any) -> None:
    found = [run_on_ranks(ranks, {"": continue_without}, tmp_path) for ranks in (2, 1, 3)]
    assert len({state for one in found for state in values_of(one, "")}) == 1


# ---------------------------------------------------------------- refusals


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(1, 8, 8), 0)] * 16)


class Gathering(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(batch[1])


class Waiting(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.strategy.barrier()


class Moving(Classifier):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Growing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.register_buffer("seen", torch.zeros(len(batch[1]) + getattr(self, "number", 0)))
        self.number = getattr(self, "number", 0) + 1
        return super().training_step(batch, batch_idx)


class Reusing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = batch[0].flatten(1).requires_grad_()
        for _ in range(2):
            values = checkpoint(self.network, values, use_reentrant=True)
        return values.sum()


REFUSED: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any]]] = {
    "manual optimization": (Adversaries, images),
    "on_before_batch_transfer": (lambda: Moving(perceptron()), images),
    "all_gather": (lambda: Gathering(perceptron()), images),
    "`barrier` was called": (lambda: Waiting(perceptron()), images),
    "SyncBatchNorm": (lambda: Classifier(nn.Sequential(nn.Flatten(), nn.SyncBatchNorm(64), nn.Linear(64, 3))), images),
    "sparse=True": (lambda: Classifier(nn.Embedding(4, 3, sparse=True)), images),
    "got an iterable dataset": (lambda: Classifier(perceptron()), lambda: DataLoader(Stream(), batch_size=8)),
    "got 2 training loaders": (lambda: Classifier(perceptron()), lambda: [images(), images()]),
    "batch_size=None": (lambda: Classifier(perceptron()), lambda: DataLoader([*images()], batch_size=None)),
    "a buffer": (lambda: Growing(perceptron()), images),
    "use_reentrant=False": (lambda: Reusing(nn.Linear(64, 64)), images),
    "L-BFGS": (lambda: Classifier(perceptron(), torch.optim.LBFGS), images),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_cut_into_virtual_ranks_is_refused(message: str) -> None:
    make, loader = REFUSED[message]
    with pytest.raises(UnsupportedFeatureError, match=message):
        train(make(), loader())


def test_averaging_that_changes_statistics_after_training_is_refused() -> None:
    with pytest.raises(UnsupportedFeatureError, match="does not support `StochasticWeightAveraging`"):
        train(Classifier(convolutions()), images(), callbacks=[StochasticWeightAveraging(0.01)])


@pytest.mark.parametrize("kind", [for_fabric.DDPJoinStrategy, BalancedDataParallelStrategy, DDPJoinStrategy])
def test_other_strategies_name_the_one_with_virtual_ranks(kind: Any) -> None:
    with pytest.raises(TypeError, match="an argument of the strategy `balanced_ddp`"):
        kind(virtual_ranks=4)


def test_constructors_refuse_what_virtual_ranks_exclude() -> None:
    for options, kind, message in (
        ({"virtual_ranks": 0}, ValueError, "`virtual_ranks` must be at least 1, got 0"),
        ({"virtual_ranks": 4, "cost": "length"}, ValueError, "`virtual_ranks=4` and `cost` exclude"),
    ):
        with pytest.raises(kind, match=message):
            BalancedDDPStrategy(**options)
    with pytest.raises(ValueError, match="at least the number of ranks, 3, got 2"):
        quiet_trainer(strategy=virtual(2), devices=3)


class Saving(Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("changed", "message"), [("parts", "4 as `virtual_ranks`, .* has 5"), ("threads", "threads")])
def test_a_checkpoint_of_other_virtual_ranks_or_threads_is_refused(tmp_path: Any, changed: str, message: str) -> None:
    train(Classifier(perceptron()), images(), callbacks=[Saving(tmp_path / "last.ckpt")])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + (changed == "threads"))
        resumed = quiet_trainer(strategy=virtual(5 if changed == "parts" else 4), devices=1, max_epochs=2)
        with pytest.raises(UnsupportedFeatureError, match=message):
            resumed.fit(Classifier(perceptron()), images(), ckpt_path=tmp_path / "last.ckpt")
    finally:
        torch.set_num_threads(threads)


def test_epochs_log_the_hash_of_the_training_state(monkeypatch: pytest.MonkeyPatch) -> None:
    module, messages = Classifier(convolutions()), list[str]()
    monkeypatch.setattr("lightning_ddp_ext.steps.virtual_ranks.rank_zero_info", messages.append)
    trainer = train(module, images(), max_epochs=2)
    logged = [text.split()[-1].strip(".") for text in messages if "SHA-256" in text]
    assert len(logged) == 2
    assert logged[0] != logged[1]
    assert logged[1] == hash_training_state(module, trainer.optimizers)
