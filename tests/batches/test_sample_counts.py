"""Numbers of samples in batches, from the loader or from their tensors."""

import math
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext.batches.sample_counts import BatchSamples, mean_count
from lightning_ddp_ext.loaders.counting import CountedLoader


def test_without_a_count_of_the_loader_the_tensors_decide():
    batch = torch.zeros(5, 3)
    assert BatchSamples(0).count(batch) == 5
    assert BatchSamples(1).rounded(batch) == 3
    unclear = BatchSamples(0)
    assert unclear.count({"a": torch.zeros(3), "b": torch.zeros(4)}) is unclear.rounded([batch, torch.zeros(2)]) is None
    assert "ambiguous" in unclear.problem
    assert math.isnan(unclear.weight([batch, torch.zeros(2)]))


class Graphs:
    """A batch of graphs, of a class that the package does not know."""

    def __init__(self, number):
        self.num_graphs = number


def stack(rows):
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def pad(rows):
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True)


EIGHT = [(torch.randn(5), torch.tensor(index)) for index in range(8)]
SQUARE = [(torch.randn(8), torch.tensor(index)) for index in range(8)]  # as many features as samples
RAGGED = [(torch.randn(3 + index, 2), torch.tensor(index)) for index in range(8)]
IMAGES = [(torch.randn(3, 9, 7 + index), {"boxes": torch.zeros(index, 4)}) for index in range(8)]
# Samples, and a collate function, which is called with all samples and with six of them.
COLLATED = {
    "stacked": (EIGHT, stack),
    "a list of samples with as many features as drawn": (SQUARE, list),
    "a tuple of mappings": ([{"x": x, "y": y} for x, y in EIGHT], tuple),
    "tensors of different lengths": (RAGGED, lambda rows: [x for x, _ in rows]),
    "images and converted targets": (IMAGES, lambda rows: ([x for x, _ in rows], [y["boxes"] + 1 for _, y in rows])),
    "padded": (RAGGED, pad),
    "graphs with labels of all": ([(torch.zeros(4, 2),)] * 8, lambda rows: (Graphs(len(rows)), torch.zeros(8))),
    "texts": ([("a", 0)] * 8, list),
}


@pytest.mark.parametrize(("samples", "collate"), COLLATED.values(), ids=COLLATED)
def test_the_weight_is_the_number_of_samples_that_the_collate_function_keeps(samples, collate):
    for kept in (8, 6):
        counts, counted = [], BatchSamples(0)
        (batch,) = CountedLoader(
            DataLoader(samples, 8, collate_fn=lambda rows, kept=kept: collate(rows[-kept:])), counts
        )
        assert counts == [8]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            counted.begin(mean_count(counts), batch)
        assert counted.count(batch) == kept
        assert ["drawn 8 samples for a batch of 6 samples" in str(one.message) for one in caught] == [True] * (
            8 - kept > 0
        )


# A collate function with rows that are no samples; the drawn number stays.
SILENT = {
    "two views in mappings": lambda rows: [{"x": stack(rows + rows)[0]}] * 2,
    "two views in a list": lambda rows: [x for x, _ in rows + rows],
    "flat": lambda rows: {"x": torch.zeros(50, 3), "of": torch.zeros(50), "edges": torch.zeros(2, 200)},
    "converted": lambda rows: [x.double() for x, _ in rows],
    "a constant": lambda rows: [*stack(rows), torch.zeros(2)],
    "nested": lambda rows: torch.nested.nested_tensor([x for x, _ in rows], layout=torch.jagged),
}


@pytest.mark.parametrize("collate", SILENT.values(), ids=SILENT)
def test_batches_of_other_rows_than_samples_keep_the_drawn_number_without_a_warning(collate):
    counts, counted = [], BatchSamples(0)
    (batch,) = CountedLoader(DataLoader(EIGHT, 8, collate_fn=collate), counts)
    counted.begin(mean_count(counts), batch)
    assert counted.count(batch) == 8


def test_numbers_of_samples_reach_the_batch_from_workers():
    counts, combined = [], DataLoader(EIGHT, 4, num_workers=1, collate_fn=lambda rows: rows[1:])
    assert [len(batch) for batch in CountedLoader(combined, counts)] == [3, 3]
    assert [(count, count.held) for count in counts] == [(4, 3)] * 2


PAIR = torch.zeros(3, 5), torch.zeros(3)
UNCLEAR = "of an unknown number of samples"


@pytest.mark.parametrize(
    ("batch", "batch_dim", "drawn", "expected"),
    [
        (PAIR, 0, 4.0, 3.0),
        ({"a": torch.zeros(2, 3, 5), "b": torch.zeros(1, 3)}, 1, 4.0, 3.0),
        ((torch.zeros(0, 5), torch.zeros(0)), 0, 4.0, 0.0),
        (PAIR, 0, 3.0, 3.0),
        (PAIR, 0, 2.0, 2.0),  # several rows for a sample
        ((torch.zeros(3, 4, 5), torch.zeros(3, 3)), 1, 4.0, 4.0),
        ([torch.zeros(3, 5)] * 4, 0, 4.0, 4.0),  # a list of samples
        (PAIR, 0, None, 3.0),
        # Three points in time of four samples, or three of four samples with four features.
        ((torch.zeros(3, 4, 5), torch.zeros(3, 4)), 0, 4.0, UNCLEAR),
        # Samples of other shapes.
        ((torch.zeros(3, 2), torch.zeros(2)), 0, 4.0, UNCLEAR),
    ],
)
def test_a_batch_that_is_smaller_than_drawn_decides_unless_samples_may_be_in_another_dimension(
    batch, batch_dim, drawn, expected
):
    counted = BatchSamples(batch_dim)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            counted.begin(drawn, batch)
    found = UNCLEAR if expected == UNCLEAR else f"of {expected:g} samples"
    assert counted.count(batch) == (drawn if expected == UNCLEAR else expected)
    is_warned = expected == UNCLEAR or (drawn is not None and expected < drawn)
    assert [f"drawn 4 samples for a batch {found}" in str(one.message) for one in caught] == [True] * is_warned
    counted.begin(None)
    assert counted.count(torch.zeros(7)) == 7.0 or batch_dim
