"""Training loops of Fabric on ranks against the same loop in one process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext.fabric import BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from tests.strategies.toolkit import (
    RANK,
    WORLD_SIZE,
    Polyak,
    batches_of_ranks,
    digest_of,
    run_on_ranks,
    samples,
    values_of,
    whole_batches,
)

STRATEGIES: dict[str, Callable[..., Any]] = {
    "ddp": DDPStrategy,
    "ddp_checkpoint": DDPCheckpointStrategy,
    "ddp_join": DDPJoinStrategy,
    "balanced_ddp": BalancedDDPStrategy,
}
EVEN = ((3, 2, 1), (1, 2, 4), (2, 2, 1))
UNEVEN = ((3, 2, 1, 2), (2, 1), (4,))


class Network(nn.Module):
    """Recomputes activations, and counts samples in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.last = nn.Linear(7, 3)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean += 0.1 * (features.mean(dim=0) - self.mean)
        hidden = checkpoint(self.first, features.requires_grad_(), use_reentrant=True)
        return self.last(hidden)


@dataclass
class Outcome:
    gradients: list[Tensor] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    shadows: list[bool] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    state: Tensor = field(default_factory=lambda: torch.empty(0))


def loop(fabric: Fabric, batches: Any, windows: int, epochs: int = 2) -> Outcome:
    """A loop as users write it; the loss of each micro-batch is divided by the length of the window."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # Fabric converts outputs of modules to it
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    is_shared = isinstance(fabric.strategy, BalancedDDPStrategy)
    loader = fabric.setup_dataloaders(batches, use_distributed_sampler=is_shared)
    outcome = Outcome()
    for _ in range(epochs):
        for number, (features, labels, _) in enumerate(loader):
            is_accumulating = (number + 1) % windows != 0 and number + 1 != len(loader)
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = functional.cross_entropy(model(features), labels)
                fabric.backward(loss / min(windows, len(loader) - number // windows * windows))
            outcome.losses.append(float(fabric.all_reduce(loss.detach().clone())))
            outcome.shadows.append(getattr(fabric.strategy, "is_shadow", False))
            outcome.sizes.append(len(labels))
            if is_accumulating:
                continue
            outcome.gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            outcome.digests.append(digest_of(model, optimizer.optimizer))
    torch.set_default_dtype(torch.float32)
    outcome.state = nn.utils.parameters_to_vector([*model.parameters(), *model.buffers()]).detach()
    return outcome


@dataclass(frozen=True)
class Case:
    sizes: tuple[tuple[int, ...], ...]
    strategy: str = "ddp_checkpoint"
    windows: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, folder: str = "") -> Outcome:
        strategy = STRATEGIES[self.strategy](**self.options)
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, precision="64-true")
        fabric.launch()
        return loop(fabric, DataLoader(batches_of_ranks(self.sizes)[RANK], batch_size=None), self.windows)

    def alone(self) -> Outcome:
        fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
        return loop(fabric, DataLoader(whole_batches(batches_of_ranks(self.sizes), self.windows), batch_size=None), 1)


CASES = {
    "even": Case(EVEN),
    "even in windows": Case(EVEN, windows=2),
    "uneven": Case(UNEVEN, "ddp_join"),
    "uneven in windows": Case(UNEVEN, "ddp_join", windows=3),
}
CONTROL = Case(EVEN, options={"weight_by": "equal"})


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_one_process(world_size):
    cases = {
        name: Case(case.sizes[:world_size], case.strategy, case.windows, case.options)
        for name, case in {**CASES, "control": CONTROL}.items()
    }
    found = run_on_ranks(world_size, cases)
    for name in CASES:
        alone = cases[name].alone()
        outcomes = values_of(found, name)
        for outcome in outcomes:
            for ours, wanted in zip(outcome.gradients, alone.gradients, strict=True):
                torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
            # A window changes a buffer once per micro-batch.
            last = None if cases[name].windows == 1 else -5
            torch.testing.assert_close(outcome.state[:last], alone.state[:last], rtol=0, atol=1e-12)
            assert outcome.digests == outcomes[0].digests
    control, *_ = values_of(found, "control")
    assert float((control.gradients[0] - cases["even"].alone().gradients[0]).abs().max()) > 1e-3


@dataclass(frozen=True)
class Closures:
    """Steps whose size depends on the loss that a closure returns; `is_raw` keeps the optimizer from Fabric."""

    optimizer: Callable[..., torch.optim.Optimizer]
    is_raw: bool = False
    strategy: str = "ddp_join"
    sizes: tuple[tuple[int, ...], ...] = UNEVEN[:2]

    def __call__(self, folder: str = "") -> Tensor:
        return self.train(STRATEGIES[self.strategy](), batches_of_ranks(self.sizes)[RANK])

    def alone(self) -> Tensor:
        return self.train("auto", whole_batches(batches_of_ranks(self.sizes)))

    def train(self, strategy: Any, batches: Any) -> Tensor:
        fabric = Fabric(strategy=strategy, accelerator="cpu", devices=WORLD_SIZE, precision="64-true")
        fabric.launch()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)  # as in `loop`
        model = nn.Linear(5, 3)
        optimizer = self.optimizer(model.parameters())
        model = fabric.setup(model)
        optimizer = optimizer if self.is_raw else fabric.setup_optimizers(optimizer)
        for features, labels, _ in fabric.setup_dataloaders(
            DataLoader(batches, batch_size=None), use_distributed_sampler=False
        ):

            def closure(features: Tensor = features, labels: Tensor = labels) -> Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(features), labels)
                fabric.backward(loss)
                return loss

            optimizer.step(closure)
        torch.set_default_dtype(torch.float32)
        return nn.utils.parameters_to_vector(model.parameters()).detach()


CLOSURES = {
    "L-BFGS": Closures(partial(torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")),
    "L-BFGS without Fabric": Closures(partial(torch.optim.LBFGS, lr=0.1, max_iter=4), is_raw=True),
    "Polyak": Closures(partial(Polyak, lr=0.1)),
    "control": Closures(partial(Polyak, lr=0.1), strategy="ddp", sizes=EVEN[:2]),
}


def test_closures_return_the_loss_of_the_whole_batch():
    """The control is Fabric's own strategy, which gives each rank a loss of its own."""
    found = run_on_ranks(2, CLOSURES)
    for name, case in CLOSURES.items():
        if name == "control":
            continue
        ours = values_of(found, name)
        torch.testing.assert_close(ours[0], case.alone(), rtol=0, atol=1e-11)
        assert all(torch.equal(ours[0], other) for other in ours), name
    assert not torch.equal(*values_of(found, "control"))


@dataclass(frozen=True)
class Shared:
    """Ranks share batches of four samples, of which the last one has two."""

    options: dict[str, Any] = field(default_factory=dict)
    windows: int = 1

    def __call__(self, folder: str = "") -> Outcome:
        options = {**self.options}
        if "split" in options:
            options["split"] = options["split"][:WORLD_SIZE]
        fabric = Fabric(
            strategy=BalancedDDPStrategy(**options), accelerator="cpu", devices=WORLD_SIZE, precision="64-true"
        )
        fabric.launch()
        return loop(fabric, DataLoader(TensorDataset(*samples(14)), batch_size=4), self.windows)

    def alone(self) -> Outcome:
        fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
        return loop(fabric, DataLoader(TensorDataset(*samples(14)), batch_size=4 * self.windows), 1)


def rising(sample: Any) -> int:
    """Return the cost of a sample: the last of four samples costs more than the others together."""
    return 10 ** (int(sample[2]) % 4)


SHARED = {
    "auto": Shared(),
    "even": Shared({"balance": "even"}),
    "split": Shared({"split": [1, 3, 2]}),
    "without data": Shared({"gpu0_batch_size": 0}),
    "windows": Shared({"split": [1, 3, 2]}, windows=2),
    "cost": Shared({"balance": "even", "cost": rising}),
    "windows without data": Shared({"gpu0_batch_size": 0}, windows=2),
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_batches_train_as_one_process(world_size):
    found = run_on_ranks(world_size, {**SHARED, "control": Shared({"split": [1, 3, 2], "weight_by": "equal"})})
    for name, case in SHARED.items():
        alone, outcomes = case.alone(), values_of(found, name)
        assert len(alone.gradients) == (8 if case.windows == 1 else 4)
        for outcome in outcomes:
            assert len(outcome.gradients) == len(alone.gradients)
            for ours, wanted in zip(outcome.gradients, alone.gradients, strict=True):
                torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
            last = None if case.windows == 1 else -5
            torch.testing.assert_close(outcome.state[:last], alone.state[:last], rtol=0, atol=1e-12)
            assert outcome.digests == outcomes[0].digests
        if name == "cost" and world_size == 2:
            assert [one.sizes[0] for one in outcomes] == [1, 3]
        if "without data" in name:
            assert outcomes[0].shadows == [True] * 8
            assert not any(outcomes[1].shadows)
    control, *_ = values_of(found, "control")
    assert float((control.gradients[0] - SHARED["split"].alone().gradients[0]).abs().max()) > 1e-3
