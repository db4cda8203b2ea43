"""`ddp_checkpoint` on two ranks gives the gradients of one process with all batches, or raises an error."""

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_ext import DDPCheckpointStrategy
from tests.strategies.toolkit import (
    CLASSES,
    RANK,
    Adversaries,
    Case,
    Classifier,
    Fused,
    Polyak,
    Summed,
    assert_same_training,
    run_on_ranks,
    values_of,
)
from tests.support import devices


class FusedEarly(Classifier):
    """Makes the optimizer in the constructor, before gradients are synchronised by anything."""

    def __init__(self) -> None:
        super().__init__()
        optimizer = Fused(self.parameters(), lr=0.1)
        self.make_optimizer = lambda parameters: optimizer


class InBackward(Classifier):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import _apply_optimizer_in_backward  # warns on import

        _apply_optimizer_in_backward(torch.optim.SGD, self.network.parameters(), {"lr": 0.1})
        return super().configure_optimizers()


class TokenLoss(Classifier):
    """Averages the loss over the samples of some classes; a batch may have none of them."""

    def loss(self, batch: Any) -> Tensor:
        kept = batch[1] != 0
        return functional.cross_entropy(self.network(batch[0])[kept], batch[1][kept])


class ManualSums(Classifier):
    """Two backward passes of losses that are sums; on rank 1 three, if the passes are `uneven`."""

    def __init__(self, uneven: bool = False) -> None:
        super().__init__(torch.optim.SGD, is_sum=True)
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


class GrownHead(Classifier):
    """Gets a parameter after training was set up, and an optimizer for it."""

    def on_train_start(self) -> None:
        self.head = nn.Linear(CLASSES, CLASSES).to(self.device, torch.float64)
        self.optimizers().add_param_group({"params": list(self.head.parameters())})

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.head(self.network(batch[0])), batch[1])


class PlainTensor(Classifier):
    """Trains a tensor that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]) * self.scale.sum(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.scale], lr=0.1)


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


class ByHandAlone(Adversaries):
    """Sets the gradients of this rank by hand."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for parameter in filter(lambda one: one.requires_grad, self.parameters()):
            (parameter.grad,) = torch.autograd.grad(loss, [parameter], retain_graph=True)


class SteppingAlone(Adversaries):
    """Rank 1 leaves out the step of each second optimizer."""

    def optimizers(self, *args: Any) -> Any:
        first, second = super().optimizers()
        if RANK:
            second.step = lambda: None
        return first, second


class SteppingAnother(Adversaries):
    """Rank 1 steps the first optimizer twice, in its last batch."""

    def optimizers(self, *args: Any) -> Any:
        first, second = super().optimizers()
        if RANK and self.trainer.is_last_batch:
            second.step = first.step
        return first, second


class TwoTasks(LightningModule):
    """An encoder of Hugging Face whose layers are recomputed, and two heads with a backward pass each."""

    def __init__(self, use_reentrant: bool) -> None:
        from transformers import BertConfig, BertModel  # which machines with a GPU may lack

        super().__init__()
        self.automatic_optimization = False
        config = BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.encoder.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))
        self.losses = self.forwards = 0
        self.encoder.encoder.layer[0].attention.self.query.register_forward_hook(self.count)

    def count(self, *args: Any) -> None:
        self.forwards += 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        tokens = (20 * batch[0].abs()).long() % 50
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for task, head in enumerate(self.heads):
            self.losses += 1
            states = self.encoder(input_ids=tokens).last_hidden_state
            targets = (tokens % 3 + task).clamp(max=2)
            self.manual_backward(functional.cross_entropy(head(states).flatten(0, 1), targets.flatten()))
        optimizer.step()

    def on_train_end(self) -> None:
        assert self.forwards > self.losses > 0, "nothing was recomputed"

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def count_tokens(batch: Any) -> float:
    return float((batch[1] != 0).sum())


def negative_weight(batch: Any) -> float:
    return -1.0


UNEVEN = [[3, 5, 2, 4, 6], [1, 2, 7, 4, 3]]
EVEN = [[4] * 5, [4] * 5]

SUM = partial(DDPCheckpointStrategy, weight_by="sum")
TOKENS = partial(DDPCheckpointStrategy, weight_by=count_tokens)
LBFGS = partial(Classifier, torch.optim.LBFGS, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

EXACT = {
    "batches of different sizes": Case(UNEVEN),
    "Adam": Case(UNEVEN, Classifier),
    "clipped by norm": Case(UNEVEN, trainer={"gradient_clip_val": 0.05}),
    "clipped by value": Case(UNEVEN, trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulation over 2": Case(UNEVEN, windows=2),
    "accumulation over 3": Case(UNEVEN, windows=3),
    "an optimizer inside of the backward pass": Case(UNEVEN, partial(Classifier, Fused)),
    "an optimizer inside, made early, accumulated": Case(UNEVEN, FusedEarly, windows=2),
    "equal weights": Case(EVEN, strategy=partial(DDPCheckpointStrategy, weight_by="equal")),
    "a loss that is a sum": Case(UNEVEN, Summed, SUM),
    "a sum, accumulated": Case(UNEVEN, Summed, SUM, windows=2),
    "accumulated by hand over batches": Case(
        [[3, 3, 5, 5], [1, 1, 2, 2]], ByHand, windows=2, trainer={"accumulate_grad_batches": 1}
    ),
    "a rank with an empty batch": Case([[3, 4], [2, 0]]),
    "two sums": Case(UNEVEN, ManualSums, SUM),
    "weights by tokens": Case(UNEVEN, TokenLoss, TOKENS),
    "weights by tokens, accumulated": Case(UNEVEN, TokenLoss, TOKENS, windows=3),
    "two optimizers": Case(UNEVEN, Adversaries),
    "manual accumulation": Case(UNEVEN, partial(Adversaries, toggle=False, accumulate=True)),
    "optimizers of torch": Case(UNEVEN, ByTorch),
    "a probe, accumulated": Case(UNEVEN, WithProbe, windows=2),
    "L-BFGS": Case(UNEVEN, LBFGS),
    "steps by the loss": Case(UNEVEN, partial(Classifier, Polyak)),
    "steps by a sum": Case(UNEVEN, partial(Classifier, Polyak, is_sum=True), SUM),
}

if importlib.util.find_spec("transformers"):  # which environments of other versions lack
    EXACT |= {
        "Hugging Face, reentrant": Case([[2, 3], [1, 4]], partial(TwoTasks, True)),
        "Hugging Face, non-reentrant": Case([[2, 3], [1, 4]], partial(TwoTasks, False)),
    }
FAILING = {
    "raw backward": (Case(EVEN, RawBackward), "UnsynchronizedGradientsError: rank {}: `Adam` is about to step"),
    "gradients set by hand": (
        Case(EVEN, ByHandAlone),
        "UnsynchronizedGradientsError: rank {}: `Adam` is about to step",
    ),
    "steps of one rank": (Case(EVEN, SteppingAlone), "RanksOutOfStepError: rank {} has made"),
    "steps of other optimizers": (Case(EVEN, SteppingAnother), "as many as others, but not with the same optimizers"),
    "a parameter that came later": (
        Case(EVEN, GrownHead),
        "rank {}: `Adam` is about to step with the gradient of `head.weight`, which was not part",
    ),
    "a trained tensor that is no parameter": (
        Case(EVEN, PlainTensor),
        "rank {}: `SGD` is about to step with the gradient of a parameter of shape [2], which was not part",
    ),
    "negative weight": (
        Case(EVEN, strategy=partial(DDPCheckpointStrategy, weight_by=negative_weight)),
        "ValueError: `weight_by` returned -1.0",
    ),
    "uneven passes": (
        Case(EVEN, partial(ManualSums, uneven=True)),
        "RanksOutOfStepError: rank {} synchronises gradients at batch",
    ),
    "torch's optimizer inside of the backward pass": (
        Case(EVEN, InBackward),
        "UnsupportedFeatureError: parameter `network.0.weight` is changed inside of the backward pass",
    ),
}
CONTROLS = {
    f"{name}, under ddp": replace(EXACT[name], strategy=DDPStrategy)
    for name in ("batches of different sizes", "accumulation over 3", "steps by the loss", "Hugging Face, reentrant")
    if name in EXACT and devices.is_cpu()
}


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(2, {**EXACT, **{name: case for name, (case, _) in FAILING.items()}, **CONTROLS})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", EXACT)
def test_gradients_equal_one_process_and_ranks_are_bit_identical(found, name):
    tolerance = 1e-6 if name == "L-BFGS" else 1e-11  # a line search amplifies rounding
    assert_same_training(values_of(found, name), EXACT[name].alone(), tolerance)


@pytest.mark.cpu_only("is about `ddp`")
def test_lightnings_ddp_fails_the_same_checks(found):
    """The negative control: its gradients are not exact, or it raises an error."""
    for name in list(CONTROLS)[:3]:
        alone = EXACT[name.removesuffix(", under ddp")].alone()
        assert (values_of(found, name)[0].gradients[0] - alone.gradients[0]).abs().max() > 1e-4
    for error in found.get("Hugging Face, reentrant, under ddp", ()):
        assert "RuntimeError: It looks like your LightningModule has parameters that were not used" in error


def test_mistakes_are_refused_on_every_rank(found):
    for name, (_, message) in FAILING.items():
        for rank, error in enumerate(found[name]):
            assert message.format(rank) in error, name
