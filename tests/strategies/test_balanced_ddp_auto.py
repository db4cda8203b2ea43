"""`balance="auto"` of `balanced_ddp`: shares follow the times of the ranks, which are simulated here."""

from functools import partial
from typing import Any

import pytest

from tests.strategies.test_balanced_ddp import Case, alone, joined
from tests.strategies.toolkit import part_of_a_run, run_on_ranks, selected, values_of, with_slow

Long = partial(Case, 469, batch_size=16)  # 30 batches of 16 samples, the last of 5
CASES = {
    "in time": Long(),
    "late": Long(late=2),
    "accumulated": Long(windows=3),
    "workers": Long(of_loader={"num_workers": 2, "prefetch_factor": 3}),
    "other workers on each rank": Long(late=1, workers_of_rank_1=2),
    "persistent workers": Long(of_loader={"num_workers": 1, "persistent_workers": True}),
    "stream": Long(is_stream=True),
    "stream with workers": Long(is_stream=True, of_loader={"num_workers": 2}),
    "memory": Long(most=10),
    "scarce memory": Long(most=6),  # less than an even share
    "scarce memory and workers": Long(most=6, of_loader={"num_workers": 2}),
}


QUICK = {"in time", "accumulated", "workers", "stream", "scarce memory"}  # the others are slow


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    chosen = {name: CASES[name] for name in CASES if name in selected(request, "name") | {"in time"}}
    others = {
        "swapped": Long(speeds=[(1, 3)] * 30 + [(3, 1)]),
        "deterministic": Long(of_trainer={"deterministic": True}),  # the last one, because it changes the process
    }
    return run_on_ranks(2, {**chosen, **others}, tmp_path_factory.mktemp("auto"))


@pytest.mark.parametrize("name", with_slow(CASES, QUICK))
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
    workers = {"num_workers": 2} if steps == 40 else {}
    return Long(of_trainer=part_of_a_run(f"{folder}/{steps}", steps, until), of_loader=workers)(folder)


POINTS = (9, 30, 40)  # a change is decided and not in effect; the end of the first epoch; within the second epoch


@pytest.fixture(scope="module")
def until(tmp_path_factory):
    """The folder of the checkpoints, and the runs until they were saved."""
    folder = tmp_path_factory.mktemp("until")
    return folder, run_on_ranks(2, {f"{steps}": partial(resume, steps, True) for steps in POINTS}, folder)


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 3])
def test_learnt_shares_are_kept_on_the_same_number_of_ranks(found, after, until):
    whole, (folder, saved) = values_of(found, "in time"), until
    resumed = run_on_ranks(after, {f"{steps}": partial(resume, steps, False) for steps in POINTS}, folder)
    order = [sorted(joined(batches.get(number, []) for batches, *_ in whole)) for number in range(60)]
    for steps in POINTS:
        parts = values_of(saved, f"{steps}"), values_of(resumed, f"{steps}")
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
