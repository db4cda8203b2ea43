"""Costs of samples, by which training batches are divided into shares that take equally long."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from lightning_ddp_ext._validation import as_number
from lightning_ddp_ext.batches.chunk_sizes import deal_by_cost, deal_by_padded_length
from lightning_ddp_ext.batches.containers import items
from lightning_ddp_ext.distributed.exchange import gather_different, gather_integer
from lightning_ddp_ext.errors import UnsupportedFeatureError, text_of
from lightning_ddp_ext.resume.rng_state import capture_states, find_loader_rngs, restore_states

Cost = Literal["length", "padded_length"] | Callable[[Any], float]
Deal = Callable[[Sequence[int], Sequence[float], int | None], list[list[int]]]


class SampleCost:
    """A checked `cost`: the cost of a sample, as the dataset returns it, and how samples are dealt out by it."""

    def __init__(self, cost: Cost) -> None:
        if cost not in ("length", "padded_length") and not callable(cost):
            raise ValueError(
                f'`cost` must be "length", "padded_length" or a function of one sample, got {cost!r}. Leave it out if'
                " all samples take equally long."
            )
        self._function = cost if callable(cost) else _length
        self.deal: Deal = deal_by_padded_length if cost == "padded_length" else deal_by_cost

    def __call__(self, sample: Any, place: str) -> float:
        """Return the cost of a sample; `place` names it in an error."""
        try:
            value = self._function(sample)
        except Exception as error:
            raises = "" if self._function is _length else f"`cost` raises {type(error).__name__}: "
            raise ValueError(f"{place}: {raises}{text_of(error)}") from error
        cost = as_number(value)
        if not 0 <= cost < math.inf:
            raise ValueError(
                f"{place}: `cost` returned {value!r}. Return a finite number of at least 0, such as the length of the"
                " sample."
            )
        return cost


def _length(sample: Any) -> int:
    """Return the length of the longest array, text or list of numbers in a sample, in the first dimension."""
    lengths = list(_lengths(sample))
    if not lengths:
        raise ValueError(
            f"`cost` finds no array, text or list of numbers in a sample, a `{type(sample).__name__}`. Use a"
            " function of the sample instead."
        )
    return max(lengths)


def _lengths(value: Any) -> Iterator[int]:
    shape = getattr(value, "shape", None)
    if shape is not None:
        yield from shape[:1]
    elif isinstance(value, str | bytes) or (
        isinstance(value, list) and all(isinstance(item, int | float) for item in value)
    ):
        yield len(value)
    else:
        # Graphs of PyTorch Geometric, among others.
        content = value.to_dict().values() if hasattr(value, "to_dict") else (item for _, item in items(value))
        for item in content:
            yield from _lengths(item)


def measure_costs(dataset: Any, cost: SampleCost, group: dist.ProcessGroup) -> list[float]:
    """Return the cost of each sample of a dataset, of which every rank reads a part. Communicates.

    If a sample has no cost, all ranks raise the error of the first such rank.
    """
    # Each rank reads the samples rank, rank + ranks, ...: other lengths would leave samples without a cost.
    numbers = gather_integer(len(dataset) if hasattr(dataset, "__len__") else -1, group)
    rank, ranks, number = dist.get_rank(group), len(numbers), numbers[0]
    if len(set(numbers)) > 1 or number < 0:
        raise UnsupportedFeatureError(
            f"`cost` needs a dataset with the same `len` on every rank, and `{type(dataset).__name__}` has"
            f" {', '.join('none' if one < 0 else str(one) for one in numbers)} on ranks 0 to {ranks - 1}. Leave `cost`"
            " out."
        )
    costs = torch.zeros(number, dtype=torch.float64)
    generators = find_loader_rngs([dataset])
    states = capture_states(generators)
    place, problem, failure = "", "", None
    try:
        for index in range(rank, number, ranks):
            place = f"rank {rank}, sample {index}"
            costs[index] = cost(dataset[index], place)
    except Exception as error:  # raised below, on the ranks that would wait for this one too
        failure = error
        text = text_of(error)
        problem = text if text.startswith(place) else f"{place}: {type(error).__name__}: {text}"
    restore_states(generators, states)
    problems = [*filter(None, gather_different(problem, group))]
    if problems:
        raise ValueError(problems[0]) from failure
    # A sum of disjoint parts, so exact.
    dist.all_reduce(costs, group=group)
    return cast(list[float], costs.tolist())
