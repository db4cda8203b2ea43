"""`training_step` returns None on some ranks or on all: these batches have no weight, and no rank waits."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from tests.strategies.toolkit import (
    CLASSES,
    FEATURES,
    STRATEGIES,
    Case,
    Classifier,
    Fused,
    Trace,
    assert_same_training,
    run_on_ranks,
    values_of,
)
from tests.support.devices import accelerator

SKIPPED = 7  # the size of batches for which the step returns None


class Skipping(Classifier):
    """Skips batches of `SKIPPED` samples, and those without samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if len(batch[1]) in (0, SKIPPED) else loss


class Normalised(Skipping):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))


class SecondOrder(Skipping):
    """Layers in double precision in a LightningModule of single precision: losses are not of the module's type."""

    def __init__(self) -> None:
        super().__init__(torch.optim.LBFGS, max_iter=5, history_size=3, line_search_fn="strong_wolfe")
        self.network.double()


class Scaled(Skipping):
    """For a plug-in of mixed precision, which leaves the module in double precision."""

    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, momentum=0.9)
        self.double()


def weigh_unless_skipped(batch: Any) -> float:
    """Give batches no weight whose loss has gradients, unlike the loss of a step that has returned None."""
    return float(len(batch[1]) % SKIPPED)


def scaling() -> dict[str, Any]:
    scaler = torch.amp.GradScaler(accelerator(), init_scale=2.0**10, growth_interval=1000)
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", accelerator(), scaler)]}


Momentum = partial(Skipping, torch.optim.SGD, lr=0.1, momentum=0.9)
CASES = {
    "one rank": Case([[3, 7, 2], [1, 2, 7]], Momentum),
    "all ranks": Case([[3, 7, 2, 7], [1, 7, 4, 7]], Skipping),
    "the first batch": Case([[7, 3], [7, 2]], Skipping),
    "accumulated": Case([[3, 7, 7, 2, 7, 7, 3], [1, 2, 7, 4, 7, 7, 7]], Momentum, windows=2),
    "sums": Case([[3, 7, 2, 7], [1, 2, 7, 7]], partial(Skipping, torch.optim.SGD, is_sum=True)),
    "equal weights": Case([[4, 7, 4], [4, 4, 4]], Momentum),
    "clipped": Case([[3, 7, 7], [1, 2, 7]], Momentum, trainer={"gradient_clip_val": 0.05}),
    "scaled": Case([[3, 7, 2, 7], [1, 2, 7, 7]], Scaled, trainer=scaling),
    "without data": Case([[3, 7, 2, 7, 7, 4], [1, 2, 7]], Momentum),  # under `ddp_join` only
    # Its hooks step in a backward pass, also in the first one, which has no weight on rank 0.
    "without weight": Case([[7, 3, 7, 2], [1, 7, 4, 7]], partial(Classifier, Fused), windows=2),
    "normalised": Case([[3, 7, 7, 2], [4, 2, 7, 7]], Normalised),
    "second order": Case([[3, 7, 2], [7, 2, 4]], SecondOrder, trainer={"precision": "32-true"}),
}
IDENTICAL_ONLY = ("normalised", "second order")
WEIGHTS = {"sums": "sum", "equal weights": "equal", "without weight": weigh_unless_skipped}
RUNS = [(name, strategy) for name in CASES for strategy in STRATEGIES]
RUNS.remove(("without data", "ddp_checkpoint"))


def train(name: str, strategy: str, folder: str) -> tuple[Trace, list[str]]:
    """Train on this rank; returns also the warnings about None."""
    make = partial(STRATEGIES[strategy], weight_by=WEIGHTS.get(name, "samples"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = replace(CASES[name], strategy=make)()
    return trace, [str(one.message) for one in caught if "returned None" in str(one.message)]


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(2, {f"{name}, {strategy}": partial(train, name, strategy) for name, strategy in RUNS})


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(("name", "strategy"), RUNS)
def test_the_gradient_is_that_of_the_other_ranks_and_one_warning_says_so(found, name, strategy):
    traces, warned = zip(*values_of(found, f"{name}, {strategy}"), strict=True)
    if name in IDENTICAL_ONLY:
        assert traces[0].digests == traces[1].digests != []
    else:
        assert_same_training(traces, CASES[name].alone(without=SKIPPED))
    if name == "one rank":
        for rank, (message,) in enumerate(warned):
            assert message.startswith(f"`training_step` returned None on rank {rank}, whose samples have no weight")


def test_samples_that_are_not_skipped_fail_the_same_check():
    case = replace(CASES["one rank"], module=partial(Classifier, torch.optim.SGD, lr=0.1, momentum=0.9))
    assert (case.alone(without=SKIPPED).parameters - case.alone().parameters).abs().max() > 1e-3
