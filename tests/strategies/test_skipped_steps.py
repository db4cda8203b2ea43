"""`training_step` returns None on some ranks or on all: these batches have no weight, and no rank waits."""

import os
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.ddp_modules import CLASSES, FEATURES, Adam, Classifier, Momentum, SumLoss
from tests.strategies.ddp_ranks import Case, Outcome, batches_of, fit, fit_alone
from tests.support.devices import accelerator
from tests.support.processes import run_processes

SKIPPED = 7  # the size of batches for which the step returns None
STRATEGIES = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}


def skipping(base: type[Classifier]) -> type[Classifier]:
    """Return a class whose step returns None for batches of `SKIPPED` samples, and for those without samples."""

    class Skipping(base):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = super().training_step(batch, batch_idx)
            self.log("weight", self.network[0].weight.detach().norm(), sync_dist=True)
            return None if len(batch[1]) in (0, SKIPPED) else loss

    return Skipping


class Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))


class SecondOrder(Classifier):
    """Layers in double precision in a LightningModule of single precision: losses are not of the module's type."""

    def __init__(self) -> None:
        super().__init__(torch.optim.LBFGS, max_iter=5, history_size=3, line_search_fn="strong_wolfe")
        self.network.double()


def scaled(case: Case) -> Case:
    """Return a case whose losses are scaled, as under half precision."""
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0**10, growth_interval=1000)
    options = {"precision": None, "plugins": [MixedPrecision("16-mixed", accelerator(), scaler)]}
    return replace(case, module=partial(_double, case.module), trainer=options)


def _double(make: Any) -> Any:
    return make().double()


CASES = {
    "one rank": Case([[3, 7, 2], [1, 2, 7]], skipping(Momentum)),
    "all ranks": Case([[3, 7, 2, 7], [1, 7, 4, 7]], skipping(Adam)),
    "the first batch": Case([[7, 3], [7, 2]], skipping(Adam)),
    "accumulated": Case(
        [[3, 7, 7, 2, 7, 7, 3], [1, 2, 7, 4, 7, 7, 7]], skipping(Momentum), {"accumulate_grad_batches": 2}, windows=2
    ),
    "sums": Case([[3, 7, 2, 7], [1, 2, 7, 7]], skipping(SumLoss), strategy={"weight_by": "sum"}),
    "equal weights": Case([[4, 7, 4], [4, 4, 4]], skipping(Momentum), strategy={"weight_by": "equal"}),
    "clipped": Case([[3, 7, 7], [1, 2, 7]], skipping(Momentum), {"gradient_clip_val": 0.05}),
    "scaled": scaled(Case([[3, 7, 2, 7], [1, 2, 7, 7]], skipping(Momentum))),
}
UNEVEN = {"without data": Case([[3, 7, 2, 7, 7, 4], [1, 2, 7]], skipping(Momentum))}
IDENTICAL = {
    "normalised": Case([[3, 7, 7, 2], [4, 2, 7, 7]], skipping(Normalised)),
    "second order": Case([[3, 7, 2], [7, 2, 4]], skipping(SecondOrder), {"precision": "32-true"}),
}


def fit_alone_without_skipped(case: Case) -> Outcome:
    warnings.simplefilter("ignore")
    return fit_alone(replace(case, sizes=[[0 if size == SKIPPED else size for size in row] for row in case.sizes]))


def fit_skipping(name: str) -> dict[str, tuple[Outcome, list[str]]]:
    """Run the cases under a strategy; returns each outcome, and the warnings about None."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    cases = {**CASES, **IDENTICAL, **(UNEVEN if name == "ddp_join" else {})}
    found = {}
    for key, case in cases.items():
        strategy = STRATEGIES[name](**case.strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = fit(case, batches_of(case.sizes, rank), strategy=strategy, devices=2)
        found[key] = outcome, [str(one.message) for one in caught if "returned None" in str(one.message)]
    return found


ALL = {**CASES, **UNEVEN}


@pytest.fixture(scope="module")
def found():
    return {name: run_processes(fit_skipping, 2, name, timeout=120) for name in STRATEGIES}


@pytest.mark.parametrize(
    ("name", "case"), [*[("ddp_checkpoint", case) for case in CASES], *[("ddp_join", case) for case in ALL]]
)
def test_the_gradient_is_that_of_the_other_ranks(found, name, case):
    alone = fit_alone_without_skipped(ALL[case])
    for outcome, _ in (of_rank[case] for of_rank in found[name]):
        assert len(outcome.gradients) == len(alone.gradients)
        for ours, wanted in zip(outcome.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(outcome.parameters, alone.parameters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_stay_bit_identical_and_each_warns_once(found, name):
    first, second = found[name]
    for case in first:
        assert first[case][0].digest == second[case][0].digest != ""
    for rank, of_rank in enumerate(found[name]):
        ((message,)) = of_rank["one rank"][1]
        assert message.startswith(f"`training_step` returned None on rank {rank}, whose samples have no weight")


def test_samples_that_are_not_skipped_fail_the_same_check():
    case = CASES["one rank"]
    skipped, all_samples = fit_alone_without_skipped(case), fit_alone(case)
    assert (skipped.parameters - all_samples.parameters).abs().max() > 1e-3
