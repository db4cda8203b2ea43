"""However a batch is nested, each chunk holds its samples, and the chunks make up the batch."""

import copy
import dataclasses
import itertools
from typing import Any

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.batches.splitting import count_samples, gather, join_batches, split_batch

MOST_ENTRIES = 3  # fewer than samples, so that a container is never as long as the batch


@dataclasses.dataclass(frozen=True)
class Record:
    first: Any
    second: Any


def leaves(n):
    """Values that name their samples, or that belong to all samples."""
    ids = torch.arange(n)
    per_sample = [
        lambda: ids.clone(),
        lambda: ids[:, None].expand(n, 2).double(),
        lambda: ids.numpy().copy(),
        lambda: (ids.clone(), {"again": ids.clone(), "scale": 0.5}),
        lambda: [str(i) for i in range(n)],
        lambda: tuple({"boxes": torch.full((i + n + 1, 4), i)} for i in range(n)),
        lambda: [torch.full((3, i + 1), i) for i in range(n)],
    ]
    shared = [lambda: None, lambda: "text", lambda: 2.5, lambda: True, lambda: torch.tensor(7), dict]
    return st.sampled_from(per_sample + shared).map(lambda make: make())


def containers(children):
    return st.one_of(
        st.dictionaries(st.text("abc", min_size=1, max_size=2), children, max_size=MOST_ENTRIES),
        st.builds(Record, children, children),
    )


@st.composite
def batches(draw, least=MOST_ENTRIES + 1, most=7):
    n = draw(st.integers(least, most))
    rest = draw(st.recursive(leaves(n), containers, max_leaves=6))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, n), max_size=3))), n]
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    return n, {"ids": torch.arange(n), "rest": rest}, sizes


def parts(value):
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, Record):
        return [value.first, value.second]
    return list(value) if isinstance(value, list | tuple) else None


def check(chunk, whole, start, stop, n):
    """Compare a chunk with the rows, or the entries, of the whole batch."""
    assert type(chunk) is type(whole)
    if isinstance(whole, torch.Tensor | numpy.ndarray):
        expected = whole[start:stop] if whole.ndim else whole
        assert (chunk == expected).all()
        assert chunk.shape == expected.shape
    elif isinstance(whole, list | tuple) and len(whole) == n:
        assert len(chunk) == stop - start
        assert all(map(same, chunk, whole[start:stop]))
    elif (inner := parts(whole)) is not None:
        for mine, all_of_it in zip(parts(chunk), inner, strict=True):
            check(mine, all_of_it, start, stop, n)
    else:
        assert chunk == whole


def same(one, other):
    if isinstance(one, torch.Tensor | numpy.ndarray):
        return bool((one == other).all()) and one.shape == other.shape
    inner = parts(one)
    return one == other if inner is None else all(map(same, inner, parts(other)))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches())
def test_chunks_hold_their_samples_and_outputs_gathered_from_chunks_make_up_the_batch(drawn):
    n, batch, sizes = drawn
    kept = copy.deepcopy(batch)
    assert count_samples(batch) == n
    chunks = split_batch(batch, sizes)
    start = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        assert (chunk is None) == (size == 0)
        if chunk is not None:
            check(chunk, batch, start, start + size, n)
        start += size
    assert same(batch, kept)
    outputs = {
        "ids": batch["ids"],
        "names": [str(i) for i in range(n)],
        "pair": (torch.zeros(n, 2), {"n": batch["ids"]}),
    }
    chunks = [chunk for chunk in split_batch(outputs, sizes) if chunk is not None]
    assert same(gather(chunks, [size for size in sizes if size], torch.device("cpu")), outputs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches(least=2 * (MOST_ENTRIES + 1), most=14))
def test_chunks_joined_are_the_batch_again(drawn):
    n, batch, _ = drawn
    chunks = split_batch(batch, [n // 2, n - n // 2])
    assert same(join_batches(chunks), batch)
