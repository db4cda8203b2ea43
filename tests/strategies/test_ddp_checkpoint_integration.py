"""`ddp_checkpoint` in a Trainer on real processes, against one process with the batches of all ranks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategies import ddp_ranks as ranks
from tests.strategies.ddp_modules import CLASSES, Adam, Adversaries, Classifier, Fused, Momentum, SumLoss
from tests.strategies.ddp_ranks import Case
from tests.support.processes import run_processes


class FusedEarly(Classifier):
    """Makes the optimizer in the constructor, before gradients are synchronised by anything."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = Fused(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


class InBackward(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import _apply_optimizer_in_backward  # warns on import

        _apply_optimizer_in_backward(torch.optim.SGD, self.network.parameters(), {"lr": 0.1})
        return super().configure_optimizers()


class TokenLoss(Classifier):
    """Only some samples count; a batch may have none of them."""

    def loss(self, batch: Any) -> Tensor:
        counts = batch[1] != 0
        return functional.cross_entropy(self.network(batch[0])[counts], batch[1][counts])


class ManualSums(SumLoss):
    """Two backward passes of losses that are sums; on rank 1 three, if the passes are `uneven`."""

    def __init__(self, uneven: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.uneven = uneven

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for factor in range(1, 3 + (self.global_rank if self.uneven else 0)):
            self.manual_backward(factor * self.loss(batch))
        optimizer.step()


class ByHand(Classifier):
    """Accumulates over two batches by hand, in a step that does not ask for `batch_idx`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches = 0

    def training_step(self, batch: Any) -> None:
        optimizer = self.optimizers()
        self.batches += 1
        accumulates = self.trainer.world_size > 1  # one process has both batches in one
        if accumulates and self.batches % 2:
            optimizer.zero_grad()
            with optimizer.toggle_model(sync_grad=False):
                self.manual_backward(self.loss(batch) / 2)
            return
        if not accumulates:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / (2 if accumulates else 1))
        optimizer.step()


class ByTorch(Adversaries):
    """Steps optimizers that Lightning does not wrap; one backward pass is in a closure."""

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return super().optimizers(use_pl_optimizer=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        scores = self.discriminator(self.generator(batch[0][:, :2]))
        generator.zero_grad()
        self.manual_backward(scores.sigmoid().log().mean().neg())
        generator.step()

        def closure() -> Tensor:
            discriminator.zero_grad()
            loss = self.discriminator(batch[0]).pow(2).mean()
            self.manual_backward(loss)
            return loss

        discriminator.step(closure)


class ByTorchWithoutSynchronisation(ByTorch):
    """Calls `loss.backward()` before a step that Lightning does not see."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class ByTorchInClosure(ByTorchWithoutSynchronisation):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[1]

        def closure() -> Tensor:
            loss = self.discriminator(batch[0]).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure=closure)


class GrownHead(Classifier):
    """Gets a parameter after training was set up, and an optimizer for it."""

    def on_train_start(self) -> None:
        self.head = nn.Linear(CLASSES, CLASSES).to(self.device, torch.float64)
        self.optimizers().add_param_group({"params": list(self.head.parameters())})

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.head(self.network(batch[0])), batch[1])


class OwnTensor(Classifier):
    """Optimizes a tensor that is not part of the module; does not use it on the first batches."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.bias = [torch.zeros(CLASSES, dtype=torch.float64, device=self.device, requires_grad=True)]
        return self.make_optimizer([*self.parameters(), *self.bias])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.network(batch[0])
        return functional.cross_entropy(logits + self.bias[0] if batch_idx == 2 else logits, batch[1])


class WithProbe(Classifier):
    """Trains a probe, which the strategy ignores, with another optimizer between micro-batches."""

    def on_train_start(self) -> None:
        self.probe = [torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)]
        self.probe_optimizer = torch.optim.SGD(self.probe, lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.probe[0].square().sum().add(self.probe[0].sum()).backward()
        self.probe_optimizer.step()
        return super().training_step(batch, batch_idx)


class RawBackward(Adversaries):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


def count_tokens(batch: Any) -> float:
    return float((batch[1] != 0).sum())


def negative_weight(batch: Any) -> float:
    return -1.0


UNEVEN = [[3, 5, 2, 4, 6], [1, 2, 7, 4, 3]]
EVEN = [[4] * 5, [4] * 5]

EXACT = {
    "batches of different sizes": Case(UNEVEN, Momentum),
    "Adam": Case(UNEVEN, Adam),
    "clipped by norm": Case(UNEVEN, Momentum, {"gradient_clip_val": 0.05}),
    "clipped by value": Case(UNEVEN, Momentum, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    **{
        f"accumulation over {window}": Case(UNEVEN, Momentum, {"accumulate_grad_batches": window}, windows=window)
        for window in (2, 3)
    },
    "an optimizer inside of the backward pass": Case(UNEVEN, partial(Classifier, Fused)),
    "an optimizer inside, made early, accumulated": Case(UNEVEN, FusedEarly, {"accumulate_grad_batches": 2}, windows=2),
    "weights by ranks": Case(EVEN, Momentum, strategy={"weight_by": "equal"}),
    "a loss that is a sum": Case(UNEVEN, SumLoss, strategy={"weight_by": "sum"}),
    "a sum, accumulated": Case(UNEVEN, SumLoss, {"accumulate_grad_batches": 2}, {"weight_by": "sum"}, windows=2),
    "accumulated by hand over batches": Case([[3, 3, 5, 5], [1, 1, 2, 2]], ByHand, windows=2),
    "a rank with an empty batch": Case([[3, 4], [2, 0]], Momentum),
    "two sums": Case(UNEVEN, ManualSums, strategy={"weight_by": "sum"}),
    "weights by tokens": Case(UNEVEN, TokenLoss, strategy={"weight_by": count_tokens}),
    "weights by tokens, accumulated": Case(
        UNEVEN, TokenLoss, {"accumulate_grad_batches": 3}, {"weight_by": count_tokens}, windows=3
    ),
    "two optimizers": Case(UNEVEN, Adversaries),
    "manual accumulation": Case(UNEVEN, partial(Adversaries, toggle=False, accumulate=True)),
    "optimizers of torch": Case(UNEVEN, ByTorch),
    "a probe, accumulated": Case(UNEVEN, WithProbe, {"accumulate_grad_batches": 2}, windows=2),
    "L-BFGS": Case(UNEVEN, partial(Classifier, torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")),
}

FAILING = {
    "raw backward": Case(EVEN, RawBackward),
    "raw backward, torch's step": Case(EVEN, ByTorchWithoutSynchronisation),
    "raw backward in a closure": Case(EVEN, ByTorchInClosure),
    "a parameter that came later": Case(EVEN, GrownHead),
    "a parameter of nobody": Case(EVEN, OwnTensor),
    "negative weight": Case(EVEN, Momentum, strategy={"weight_by": negative_weight}),
    "uneven passes": Case(EVEN, partial(ManualSums, uneven=True)),
    "torch's optimizer inside of the backward pass": Case(EVEN, InBackward),
}


@pytest.fixture(scope="module")
def outcomes():
    return run_processes(ranks.fit_cases, 2, {**EXACT, **FAILING}, timeout=200)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_equal_one_process_and_ranks_are_bit_identical(outcomes, name):
    alone = ranks.fit_alone(EXACT[name])
    tolerance = 1e-6 if name == "L-BFGS" else 1e-11  # a line search amplifies rounding
    for rank, outcome in enumerate(found[name] for found in outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
        assert len(outcome.gradients) == len(alone.gradients)
        for ours, wanted in zip(outcome.gradients, alone.gradients, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=tolerance)
        torch.testing.assert_close(outcome.parameters, alone.parameters, rtol=0, atol=tolerance)
    assert outcomes[0][name].digest == outcomes[1][name].digest != ""


def test_mistakes_are_refused_on_every_rank(outcomes):
    raw = "UnsynchronizedGradientsError: rank {}: `Adam` is about to step"
    unknown = "rank {{}}: `SGD` is about to step with the gradient of {}, which was not part of"
    expected = {
        "raw backward": raw,
        "raw backward, torch's step": raw,
        "raw backward in a closure": raw,
        "a parameter that came later": unknown.format("`head.weight`"),
        "a parameter of nobody": unknown.format("a parameter of shape [3]"),
        "negative weight": "ValueError: `weight_by` returned -1.0",
        "uneven passes": "RanksOutOfStepError: rank {} synchronises gradients at position",
        "torch's optimizer inside of the backward pass": (
            "UnsupportedFeatureError: parameter `network.0.weight` is changed inside of the backward pass"
        ),
    }
    assert expected.keys() == FAILING.keys()
    for name, message in expected.items():
        for rank, found in enumerate(outcomes):
            assert message.format(rank) in found[name].error, name


def test_equal_weights_are_not_exact():
    """The negative control: Lightning's own strategy on batches of different sizes."""
    names = ["batches of different sizes", "accumulation over 3"]
    outcomes = run_processes(ranks.fit_cases, 2, {name: EXACT[name] for name in names}, theirs=True, timeout=60)
    for name in names:
        alone = ranks.fit_alone(EXACT[name])
        assert (outcomes[0][name].gradients[0] - alone.gradients[0]).abs().max() > 1e-4
