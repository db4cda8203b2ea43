"""Ranks make the same steps with any numbers of batches; the ranks are threads of this process."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import UnevenInputsError, UnsupportedFeatureError
from lightning_ddp_ext.loaders.lockstep_source import HasNextBatch, LockstepBatches
from tests.support.fake_group import run_ranks

LENGTHS = [(3, 3), (3, 1), (0, 2), (2, 0), (0, 0), (1, 4), (3, 1, 2), (0, 0, 2), (4, 4, 4), (0, 3, 0)]
NAMES = ("active", "is_shadow", "is_uneven")


def batches_of(rank, length):
    return [(f"{rank}.{number}", float(number)) for number in range(length)]


def iterate(lengths, is_sized=True, sends_flags=False, true_lengths=None, **options):
    """Return the steps of each rank, and its loader."""

    def run(group):
        has_next_batch = HasNextBatch(group)
        batches = iter(batches_of(group.rank, (true_lengths or lengths)[group.rank]))
        known = list(lengths) if is_sized else None
        loader = LockstepBatches(batches, known, group, has_next_batch, **options)
        steps = []
        for number, step in enumerate(loader):
            if sends_flags and number % 2:  # every second step exchanges the flags with the gradients
                flags = torch.zeros(len(lengths))
                flags[group.rank] = has_next_batch.local
                dist.all_reduce(flags, group=group)
                has_next_batch.receive(flags.tolist())
            steps.append(step)
        return steps, loader

    return run_ranks(len(lengths), run)


def expected_steps(lengths, rank, uneven_inputs="join", skip=0):
    for step in range(skip, min(lengths) if uneven_inputs == "stop" else max(lengths)):
        active = tuple(other for other, length in enumerate(lengths) if length > step)
        if step < lengths[rank]:
            batch, samples = f"{rank}.{step}", step
        elif lengths[rank]:
            batch, samples = f"{rank}.{lengths[rank] - 1}", None  # the last batch of the rank
        else:
            first = next(other for other, length in enumerate(lengths) if length > skip)
            batch, samples = f"{first}.{skip}", None  # the first batch of another rank
        yield batch, samples, active, rank not in active, len(active) < len(lengths)


@pytest.mark.parametrize("way", ["sized", "unsized", "unsized, flags sent with gradients"])
def test_all_ranks_make_the_same_steps_and_see_each_batch_once(way):
    for lengths, options in itertools.product(LENGTHS, [{}, {"uneven_inputs": "stop"}, {"skip": 1}]):
        found = iterate(lengths, is_sized=way == "sized", sends_flags="flags" in way, **options)
        for rank, (steps, loader) in enumerate(found):
            flat = [
                (batch, fetched.samples, *(getattr(fetched.participation, name) for name in NAMES))
                for batch, fetched in steps
            ]
            assert flat == list(expected_steps(lengths, rank, **options)), (lengths, options)
            kept = [batch for batch, fetched in steps if fetched.is_stand_in]
            if lengths[rank]:
                assert kept in ([], [f"{rank}.{lengths[rank] - 1}"])
            else:
                assert kept == [batch for batch, *_ in flat[:1]]  # of another rank
            assert kept or len({fetched.participation.is_shadow for _, fetched in steps}) < 2
            more = [length - min(lengths) for length in lengths] if "uneven_inputs" in options else [0] * len(lengths)
            if way == "sized":
                assert loader.dropped == more
            else:  # ranks know only that there was one more
                assert (loader.dropped or [0] * len(lengths)) == [min(number, 1) for number in more]


def test_a_loader_with_fewer_batches_than_it_announced_ends_as_one_without_a_length():
    for lengths in LENGTHS:
        for announced in ([length + 2 for length in lengths], [max(lengths) + 1] * len(lengths)):
            with pytest.warns(UserWarning, match=r"the loader announced .* batches and ended after") as caught:
                found = iterate(announced, true_lengths=lengths, is_exact=False)
            assert len(caught) == len(lengths)  # one on each rank, which are threads here
            for rank, (steps, _) in enumerate(found):
                flat = [
                    (batch, fetched.samples, *(getattr(fetched.participation, name) for name in NAMES))
                    for batch, fetched in steps
                ]
                assert flat == list(expected_steps(lengths, rank)), (lengths, announced)


def test_errors_name_the_rank_and_the_batch():
    cases = [
        ({"lengths": (3, 1)}, "rank 1 runs out of data after batch 1, while rank 0 has 3 batches"),
        ({"lengths": (3, 1), "is_sized": False}, "rank 1 ran out of data after batch 1, other ranks have more"),
        ({"lengths": (3, 3), "true_lengths": (2, 2)}, "the loader announced 3 batches and ended after 2"),
    ]
    for options, message in cases:
        with pytest.raises(UnevenInputsError, match=message):
            iterate(**options, uneven_inputs="error")
    for is_sized in (False, True):
        assert [len(steps) for steps, _ in iterate((2, 2), is_sized, uneven_inputs="error")] == [2, 2]


class Opaque:
    """Cannot be sent."""


def share(batch):
    """Return the stand-ins of rank 1, which has no batch, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, seen = run_ranks(
            2,
            lambda group: [
                given
                for given, _ in LockstepBatches(
                    [(batch, 1)] if group.rank == 0 else [], [1, 0], group, HasNextBatch(group)
                )
            ],
        )
    return seen, [str(one.message) for one in caught]


def test_a_rank_without_data_is_given_a_batch_without_running_code():
    (seen,), caught = share({"features": torch.arange(6.0).reshape(2, 3), "names": ["a", "b"]})
    assert torch.equal(seen["features"], torch.arange(6.0).reshape(2, 3))
    assert (seen["names"], caught) == (["a", "b"], [])
    (seen,), (warning,) = share({"features": torch.ones(2), "extra": [Opaque()]})
    assert torch.equal(seen["features"], torch.ones(2))
    assert seen["extra"] == [None]
    assert "None instead of `Opaque` at `['extra'][0]`" in warning
    with pytest.raises(UnsupportedFeatureError, match=r"^rank 1 never had a batch that can be copied.*`copy.deepcopy`"):
        share(Opaque())
