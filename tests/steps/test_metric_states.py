"""Metrics of three ranks, of which rank r has made r updates."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import CatMetric, Metric

from lightning_ddp_ext._compat.torchmetrics import watch_synchronization
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.steps.metric_states import synchronize_states
from tests.support.processes import run_processes


class Entries(Metric):
    entries: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("entries", default=[], dist_reduce_fx=None)

    def update(self, *values: torch.Tensor) -> None:
        self.entries.extend(values)

    def compute(self) -> list[list[float]]:
        return [entry.tolist() for entry in self.entries]


class Texts(Metric):
    """Gathers what is no tensor by itself, as `MeanAveragePrecision` does with masks."""

    texts: list[tuple[str]]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("texts", default=[], dist_reduce_fx=None)

    def update(self, *values: str) -> None:
        self.texts.extend((value,) for value in values)

    def compute(self) -> list[str]:
        return [text for (text,) in self.texts]

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn, process_group)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.texts)
        self.texts = [texts[index] for index in range(len(gathered[0])) for texts in gathered]


class Sums(Metric):
    """Takes the shape and the dtype of what it is given first."""

    total: torch.Tensor
    parts: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", default=torch.tensor(0, dtype=torch.int32), dist_reduce_fx="sum")
        self.add_state("parts", default=[], dist_reduce_fx="cat")

    def update(self, value: torch.Tensor) -> None:
        self.total = self.total + value
        self.parts.append(value.reshape(-1))

    def compute(self) -> tuple[list[float], list[float]]:
        parts = self.parts if isinstance(self.parts, torch.Tensor) else torch.cat(self.parts)
        return self.total.tolist(), sorted(parts.tolist())


def synchronize() -> dict[str, Any]:
    """Compute metrics of all ranks."""
    dist.init_process_group("gloo")
    cleanup = ExitStack()
    watch_synchronization(cleanup, synchronize_states)
    rank, found = dist.get_rank(), {}
    entries, numbers, shared = Entries(), CatMetric(), Entries()
    # Rank 0 has one entry of two numbers, others as many of one number as their rank says.
    entries.update(*([torch.zeros(2)] if rank == 0 else [torch.ones(1)] * 2 if rank == 1 else [torch.full((1,), 2.0)]))
    for _ in range(rank):
        numbers.update(float(rank))
    shared.update(*[torch.tensor(float(rank))] * rank)
    found["entries"], found["numbers"] = entries.compute(), sorted(numbers.compute().tolist())
    found["shared"], found["kept"] = len(shared.compute()), len(shared.entries)
    equal, unequal = Texts(), Texts()
    equal.update(f"rank {rank}")
    found["equal"] = equal.compute()
    unequal.update(*["text"] * rank)
    try:
        unequal.compute()
    except UnsupportedFeatureError as error:
        found["unequal"] = str(error)
    # Rank 0 makes no update, and others have numbers of another precision.
    for name, value in (("number", torch.tensor(0.25)), ("vector", torch.tensor([0.25, 0.5, 0.75]))):
        sums = Sums()
        if rank:
            sums.update(rank * (value.double() if rank == 2 else value))
        found[name] = sums.compute()
    alike, apart = Sums(), Sums()
    alike.update(torch.tensor([float(rank)]))
    found["alike"] = alike.compute()
    apart.update(torch.ones(1 + rank))
    try:
        apart.compute()
    except UnsupportedFeatureError as error:
        found["apart"] = str(error)
    cleanup.close()
    return found


@pytest.fixture(scope="module")
def found():
    return run_processes(synchronize, 3, timeout=60)


def test_lists_of_any_length_are_gathered_and_given_back(found):
    for rank, own in enumerate(found):
        assert sorted(own["entries"]) == [[0.0, 0.0], [1.0], [1.0], [2.0]]
        assert own["numbers"] == [1.0, 2.0, 2.0]
        assert own["shared"] == 3
        assert own["kept"] == rank


def test_what_torchmetrics_pickles_is_refused_where_ranks_differ(found):
    assert [own["equal"] for own in found] == [["rank 0", "rank 1", "rank 2"]] * 3
    expected = "`Texts` keeps 0 to 2 entries of `texts` on ranks 0 to 2"
    assert all(expected in own["unequal"] for own in found)


def test_states_take_the_form_of_ranks_that_have_made_an_update(found):
    for own in found:
        assert own["number"] == (0.75, [0.25, 0.5])
        assert own["vector"] == ([0.75, 1.5, 2.25], [0.25, 0.5, 0.5, 0.75, 1.0, 1.5])
        assert own["alike"] == ([3.0], [0.0, 1.0, 2.0])
        assert "`total` of `Sums` has the shapes [1], [2], [3] on ranks 0 to 2" in own["apart"]
