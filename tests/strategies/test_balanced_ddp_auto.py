"""`balance="auto"` of `balanced_ddp`: shares follow the times of the ranks, which are simulated here."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import BalancedDDPStrategy
from lightning_ddp_ext.shares import steps as shared_steps
from tests.strategies.test_balanced_ddp import SPEEDS, Recording, Simulated, alone, joined
from tests.strategies.toolkit import RANK, Stream, fit, run_on_ranks, samples, values_of


@dataclass(frozen=True)
class Case:
    """A run of two epochs of 30 batches of 16 samples, the last of 5."""

    late: int = 0
    windows: int = 1
    of_loader: dict[str, Any] = field(default_factory=dict)
    is_stream: bool = False
    of_trainer: dict[str, Any] = field(default_factory=dict)
    speeds: Any = (SPEEDS,)
    most: int | None = None  # samples that rank 1 has memory for
    workers_of_rank_1: int | None = None

    def __call__(self, folder: str = "") -> Any:
        data = TensorDataset(*samples(469))
        given: Any = Stream(list(data)) if self.is_stream else data
        other = {} if self.workers_of_rank_1 is None or RANK != 1 else {"num_workers": self.workers_of_rank_1}
        loader = DataLoader(given, 16, shuffle=not self.is_stream, **{**self.of_loader, **other})
        module, simulated = Recording(), Simulated(self.speeds, self.late)
        options = {"max_epochs": 2, "accumulate_grad_batches": self.windows, **self.of_trainer}
        callbacks = [simulated, *options.pop("callbacks", [])]
        limits = [self.most if RANK == 1 else None]
        with (
            mock.patch.object(shared_steps, "has_own_memory", return_value=self.most is not None),
            mock.patch.object(shared_steps.PeakMemory, "observe", return_value=limits),
        ):
            _, trace = fit(module, loader, strategy=BalancedDDPStrategy(), callbacks=callbacks, **options)
        return module.by_batch, trace.parameters, trace.digests, simulated.sizes


CASES = {
    "in time": Case(),
    "late": Case(late=2),
    "accumulated": Case(windows=3),
    "workers": Case(of_loader={"num_workers": 2, "prefetch_factor": 3}),
    "other workers on each rank": Case(late=1, workers_of_rank_1=2),
    "persistent workers": Case(of_loader={"num_workers": 1, "persistent_workers": True}),
    "stream": Case(is_stream=True),
    "stream with workers": Case(is_stream=True, of_loader={"num_workers": 2}),
    "memory": Case(most=10),
    "scarce memory": Case(most=6),  # less than an even share
    "scarce memory and workers": Case(most=6, of_loader={"num_workers": 2}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    others = {
        "swapped": Case(speeds=[(1, 3)] * 30 + [(3, 1)]),
        "deterministic": Case(of_trainer={"deterministic": True}),  # the last one, because it changes the process
    }
    return run_on_ranks(2, {**CASES, **others}, tmp_path_factory.mktemp("auto"))


@pytest.mark.parametrize("name", CASES)
def test_shares_follow_the_speeds_and_the_training_is_the_one_of_one_process(found, name):
    by_rank = values_of(found, name)
    (_, _, digests, sizes), *_ = by_rank
    assert sizes[0] == (8, 8)
    most = CASES[name].most or 12
    assert sizes[-5] == (16 - most, most)
    for batches, _, own_digests, own_sizes in by_rank:
        assert own_sizes == sizes
        assert own_digests == digests != []
        rank = [one[0] for one in by_rank].index(batches)
        assert [len(batches.get(number, [])) for number in range(len(sizes))] == [one[rank] for one in sizes]
    order = [joined(batches.get(number, []) for batches, *_ in by_rank) for number in range(len(sizes))]
    for epoch in (order[: len(order) // 2], order[len(order) // 2 :]):
        count = 2 if name == "stream with workers" else 1
        assert sorted(joined(epoch)) == sorted([*range(469)] * count)
    wanted = alone(order, CASES[name].windows)
    assert max(float((parameters - wanted).abs().max()) for _, parameters, *_ in by_rank) < 1e-10


def test_a_change_of_speeds_is_followed(found):
    (_, _, _, sizes), _ = values_of(found, "swapped")
    assert sizes[28] == (4, 12)
    assert sizes[30 + 15] == (12, 4)


def test_deterministic_runs_share_evenly(found):
    for *_, sizes in values_of(found, "deterministic"):
        assert set(sizes) == {(8, 8), (3, 2)}


# ---------------------------------------------------------------- resuming


def resume(steps: int, until: bool, folder: str) -> Any:
    """Train until a checkpoint is saved after a step, or from it on."""
    path = f"{folder}/{steps}.ckpt"
    if until:
        saving = ModelCheckpoint(folder, f"{steps}", every_n_train_steps=steps, save_top_k=-1)
        options = {"callbacks": [saving], "enable_checkpointing": True, "max_steps": steps}
    else:
        options = {"ckpt_path": path}
    workers = {"num_workers": 2} if steps == 40 else {}
    return Case(of_trainer=options, of_loader=workers)(folder)


POINTS = (9, 30, 40)  # a change is decided and not in effect; the end of the first epoch; within the second epoch


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3])
def test_learnt_shares_are_kept_on_the_same_number_of_ranks(found, after, tmp_path):
    whole = values_of(found, "in time")
    until = run_on_ranks(2, {f"{steps}": partial(resume, steps, True) for steps in POINTS}, tmp_path)
    resumed = run_on_ranks(after, {f"{steps}": partial(resume, steps, False) for steps in POINTS}, tmp_path)
    order = [sorted(joined(batches.get(number, []) for batches, *_ in whole)) for number in range(60)]
    for steps in POINTS:
        parts = values_of(until, f"{steps}"), values_of(resumed, f"{steps}")
        found_order = [
            sorted(joined(batches.get(number, []) for part in parts for batches, *_ in part)) for number in range(60)
        ]
        assert found_order == order
        sizes = parts[1][0][3]
        assert len(sizes) == 60 - steps
        if after == 3:
            assert sizes[0] == (6, 5, 5)
            assert sizes[-2] == (2, 6, 8)
        else:
            assert sizes == whole[0][3][steps:]
