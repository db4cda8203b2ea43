"""`ddp_join` against one process that steps on the concatenation of the ranks' batches. One launch per world size."""

import random

import pytest
import torch

from tests.strategies import join_ranks as ranks
from tests.strategies.join_ranks import Case
from tests.support.processes import run_processes

CASES = [
    *[
        Case((number,), (2, 2), "map", windows, clip=0.5)
        for number, windows in ((7, 1), (8, 2), (5, 3), (1, 1), (9, 4))
    ],
    Case((14, 6), (2, 2)),
    Case((14, 6), (2, 2), "stream", 2),
    Case((0, 9), (2, 4), windows=4),
    Case((9, 0), (4, 2), "stream", 3, clip=0.3),
    Case((10, 3), (3, 1), "stream", workers=1),
    Case((6, 13), (2, 3), trainer={"val_check_interval": 2}),
    Case((14, 6), (2, 2), windows=2, strategy={"weight_by": "sum"}),
    *[Case((number,), (2, 2, 2), "map", windows) for number, windows in ((12, 1), (13, 2), (14, 3), (2, 1))],
    Case((7, 3, 13), (3, 1, 2), windows=2),
    Case((0, 5, 0), (1, 2, 1), "stream", 2),
    Case((11, 4, 1), (2, 2, 1), trainer={"val_check_interval": 0.5}, clip=0.5),
    Case((9, 4, 1, 0), (2, 2, 1, 1), "stream", 2),
]


def draw(generator: random.Random) -> Case:
    """Draw ranks, amounts of data and options of the Trainer."""
    world_size = generator.choice([2, 3])
    kind = generator.choice(["map", "list", "stream"])
    sizes = tuple(generator.randint(1, 4) for _ in range(world_size))
    counts = tuple(generator.choice([0, generator.randint(1, 16)]) for _ in range(world_size))
    if kind == "map":
        counts, sizes = (generator.randint(1, 20),), sizes[:1] * world_size
    if not sum(counts):
        counts = (3, *counts[1:])
    steps = max(-(-count // size) for count, size in zip(counts, sizes, strict=False))
    trainer = {"val_check_interval": generator.randint(1, 2)} if steps >= 2 * world_size else {}
    return Case(counts, sizes, kind, generator.randint(1, 4), clip=generator.choice([None, 0.3]), trainer=trainer)


def parameters_of(module: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def check(case: Case, found: list[ranks.Outcome]) -> None:
    expected = ranks.train_in_one_process(case)
    wanted = parameters_of(expected)
    for outcome in found:
        assert float((outcome.parameters - wanted).norm() / wanted.norm()) < 1e-12
        assert outcome.trace.digests == found[0].trace.digests
        assert outcome.trace.metrics == found[0].trace.metrics
        assert outcome.trace.validations == found[0].trace.validations != []
        assert outcome.global_step == found[0].global_step
        if outcome.trace.validations[-1] == outcome.global_step:
            assert outcome.metrics["val_loss"] == pytest.approx(ranks.evaluate_in_one_process(expected), rel=1e-12)
    assert sorted(index for outcome in found for index in outcome.seen) == sorted(list(range(case.total)) * case.epochs)
    steps = [max(map(len, case.batches(epoch))) for epoch in range(case.epochs)]
    assert found[0].global_step == sum(-(-number // case.windows) for number in steps)
    for rank, outcome in enumerate(found):
        batches = [len(case.batches(epoch)[rank]) for epoch in range(case.epochs)]
        assert outcome.trace.shadow_ranks == [
            number >= batches[epoch] for epoch in range(case.epochs) for number in range(steps[epoch])
        ]


@pytest.fixture(scope="module")
def found():
    """The outcomes of each case on all ranks."""
    outcomes = {}
    for world_size in (2, 3, 4):
        cases = [case for case in CASES if case.world_size == world_size]
        by_rank = run_processes(ranks.fit_all, world_size, cases, timeout=240)
        outcomes.update({repr(case): [of_rank[number] for of_rank in by_rank] for number, case in enumerate(cases)})
    return outcomes


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_uneven_ranks_train_as_one_process_and_stay_identical(found, case):
    check(case, found[repr(case)])


def test_equal_weights_fail_the_same_check():
    case = Case((14, 6), (3, 2))
    exact = parameters_of(ranks.train_in_one_process(case))
    control = parameters_of(ranks.train_in_one_process(case, lambda losses: torch.stack(losses).mean()))
    assert float((control - exact).norm() / exact.norm()) > 1e-3


def test_torchs_join_fails_the_same_check():
    case = Case((14, 6), (2, 2))
    (first, first_digest), (second, second_digest) = run_processes(ranks.fit_with_torch_join, 2, case, timeout=60)
    exact = parameters_of(ranks.train_in_one_process(case))
    assert first_digest != second_digest
    for parameters in (first, second):
        assert float((parameters - exact).norm() / exact.norm()) > 1e-3


def run_drawn(seed: int, number: int) -> None:
    generator = random.Random(seed)
    drawn = [draw(generator) for _ in range(number)]
    for world_size in (2, 3):
        cases = [case for case in drawn if case.world_size == world_size]
        by_rank = run_processes(ranks.fit_all, world_size, cases, timeout=280)
        for index, case in enumerate(cases):
            check(case, [of_rank[index] for of_rank in by_rank])


@pytest.mark.slow
def test_drawn_amounts_of_data():
    run_drawn(seed=1, number=12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 12))
def test_more_drawn_amounts_of_data(seed):
    run_drawn(seed, number=30)
