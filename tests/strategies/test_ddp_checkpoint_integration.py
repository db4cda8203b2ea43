"""`ddp_checkpoint` in a Trainer on real processes, against one process with the batches of all ranks."""

from functools import partial

import pytest
import torch

from tests.strategies import ddp_ranks as ranks
from tests.strategies.ddp_modules import (
    Adam,
    Adversaries,
    ByHand,
    ByTorch,
    ByTorchInClosure,
    ByTorchWithoutSynchronisation,
    FusedEarly,
    FusedOptimizer,
    GrownHead,
    InBackward,
    LimitedMemory,
    Momentum,
    OwnTensor,
    RawBackward,
    SumLoss,
    TokenLoss,
    TwoSums,
    UnevenPasses,
    WithProbe,
    count_nothing_right,
    count_tokens,
)
from tests.strategies.ddp_ranks import Case
from tests.support.processes import run_processes

UNEVEN = [[3, 5, 2, 4, 6], [1, 2, 7, 4, 3]]
EVEN = [[4] * 5, [4] * 5]

EXACT = {
    "batches of different sizes": Case(UNEVEN, Momentum),
    "Adam": Case(UNEVEN, Adam),
    "clipped by norm": Case(UNEVEN, Momentum, {"gradient_clip_val": 0.05}),
    "clipped by value": Case(UNEVEN, Momentum, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    **{
        f"accumulation over {window}": Case(UNEVEN, Momentum, {"accumulate_grad_batches": window}, windows=window)
        for window in (2, 3, 4)
    },
    "an optimizer inside of the backward pass": Case(UNEVEN, FusedOptimizer),
    "an optimizer inside, made early, accumulated": Case(UNEVEN, FusedEarly, {"accumulate_grad_batches": 2}, windows=2),
    "weights by ranks": Case(EVEN, Momentum, strategy={"weight_by": "equal"}),
    "a loss that is a sum": Case(UNEVEN, SumLoss, strategy={"weight_by": "sum"}),
    "a sum, accumulated": Case(UNEVEN, SumLoss, {"accumulate_grad_batches": 2}, {"weight_by": "sum"}, windows=2),
    "accumulated by hand over batches": Case([[3, 3, 5, 5], [1, 1, 2, 2]], ByHand, windows=2),
    "a rank with an empty batch": Case([[3, 4], [2, 0]], Momentum),
    "two sums": Case(UNEVEN, TwoSums, strategy={"weight_by": "sum"}),
    "weights by tokens": Case(UNEVEN, TokenLoss, strategy={"weight_by": count_tokens}),
    "weights by tokens, accumulated": Case(
        UNEVEN, TokenLoss, {"accumulate_grad_batches": 3}, {"weight_by": count_tokens}, windows=3
    ),
    "two optimizers": Case(UNEVEN, Adversaries),
    "two optimizers without toggling": Case(UNEVEN, partial(Adversaries, toggle=False)),
    "manual accumulation": Case(UNEVEN, partial(Adversaries, toggle=False, accumulate=True)),
    "optimizers of torch": Case(UNEVEN, ByTorch),
    "a probe, accumulated": Case(UNEVEN, WithProbe, {"accumulate_grad_batches": 2}, windows=2),
    "L-BFGS": Case(UNEVEN, LimitedMemory),
}

FAILING = {
    "raw backward": Case(EVEN, RawBackward),
    "raw backward, torch's step": Case(EVEN, ByTorchWithoutSynchronisation),
    "raw backward in a closure": Case(EVEN, ByTorchInClosure),
    "a parameter that came later": Case(EVEN, GrownHead),
    "a parameter of nobody": Case(EVEN, OwnTensor),
    "ambiguous batches": Case(EVEN, Momentum, strategy={"weight_by": count_nothing_right}),
    "uneven passes": Case(EVEN, UnevenPasses),
    "torch's optimizer inside of the backward pass": Case(EVEN, InBackward),
}


@pytest.fixture(scope="module")
def outcomes():
    return run_processes(ranks.fit_cases, 2, {**EXACT, **FAILING}, timeout=200)


@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_one_process(outcomes, name):
    alone = ranks.fit_alone(EXACT[name])
    tolerance = 1e-6 if name == "L-BFGS" else 1e-11  # a line search amplifies rounding
    for rank, outcome in enumerate(found[name] for found in outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
        assert len(outcome.gradients) == len(alone.gradients)
        for ours, wanted in zip(outcome.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)
        torch.testing.assert_close(outcome.parameters, alone.parameters, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", EXACT)
def test_ranks_are_bit_identical(outcomes, name):
    assert outcomes[0][name].digest == outcomes[1][name].digest != ""


def test_a_backward_pass_that_bypasses_the_strategy_is_refused(outcomes):
    for rank, found in enumerate(outcomes):
        for name in ("raw backward", "raw backward, torch's step", "raw backward in a closure"):
            assert f"UnsynchronizedGradientsError: rank {rank}: `Adam` is about to step" in found[name].error


@pytest.mark.parametrize(
    ("case", "parameter"),
    [("a parameter that came later", "`head.weight`"), ("a parameter of nobody", "a parameter of shape [3]")],
)
def test_a_parameter_that_no_other_rank_knows_of_is_refused(outcomes, case, parameter):
    for rank, found in enumerate(outcomes):
        message = f"rank {rank}: `SGD` is about to step with the gradient of {parameter}, which was not part of"
        assert message in found[case].error


def test_an_optimizer_that_would_step_with_the_gradient_of_one_rank_is_refused(outcomes):
    for found in outcomes:
        error = found["torch's optimizer inside of the backward pass"].error
        assert "UnsupportedFeatureError: parameter `network.0.weight` is changed inside of the backward pass" in error


def test_a_negative_weight_is_refused(outcomes):
    for found in outcomes:
        assert "ValueError: `weight_by` returned -1.0" in found["ambiguous batches"].error


def test_ranks_with_different_numbers_of_backward_passes_are_refused(outcomes):
    for rank, found in enumerate(outcomes):
        assert f"RanksOutOfStepError: rank {rank} synchronises gradients at position" in found["uneven passes"].error


def test_equal_weights_are_not_exact():
    """The negative control: Lightning's own strategy on batches of different sizes."""
    names = ["batches of different sizes", "accumulation over 3"]
    outcomes = run_processes(ranks.fit_cases, 2, {name: EXACT[name] for name in names}, theirs=True, timeout=60)
    for name in names:
        alone = ranks.fit_alone(EXACT[name])
        assert (outcomes[0][name].gradients[0] - alone.gradients[0]).abs().max() > 1e-4
