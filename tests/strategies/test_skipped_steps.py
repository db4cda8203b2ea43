"""`training_step` returns None on some ranks or on all: these have no weight in the gradient, and nothing waits."""

import pytest
import torch

from tests.strategies import skipping_ranks as ranks
from tests.support.processes import run_processes

ALL = {**ranks.CASES, **ranks.UNEVEN}


@pytest.fixture(scope="module")
def found():
    return {name: run_processes(ranks.fit_skipping, 2, name, timeout=120) for name in ranks.STRATEGIES}


@pytest.mark.parametrize(
    ("name", "case"), [*[("ddp_checkpoint", case) for case in ranks.CASES], *[("ddp_join", case) for case in ALL]]
)
def test_the_gradient_is_that_of_the_other_ranks(found, name, case):
    alone = ranks.alone(ALL[case])
    for outcome, _ in (of_rank[case] for of_rank in found[name]):
        assert len(outcome.gradients) == len(alone.gradients)
        for ours, wanted in zip(outcome.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(outcome.parameters, alone.parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ranks.STRATEGIES)
def test_ranks_stay_bit_identical(found, name):
    first, second = found[name]
    for case in first:
        assert first[case][0].digest == second[case][0].digest != ""


@pytest.mark.parametrize("name", ranks.STRATEGIES)
def test_each_rank_warns_once(found, name):
    for rank, of_rank in enumerate(found[name]):
        ((message,)) = of_rank["one rank"][1]
        assert message.startswith(f"`training_step` returned None on rank {rank}, whose samples have no weight")


def test_samples_that_are_not_skipped_fail_the_same_check():
    case = ranks.CASES["one rank"]
    skipped, all_samples = ranks.alone(case), ranks.fit_alone(case)
    assert (skipped.parameters - all_samples.parameters).abs().max() > 1e-3
