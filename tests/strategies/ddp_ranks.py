"""Training on several ranks, and the same training in one process; kept apart because every rank imports it."""

import copy
import hashlib
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_ext import DDPCheckpointStrategy

FEATURES, CLASSES = 5, 3
Sizes = list[list[int]]  # of each rank's batches


@dataclass(frozen=True)
class Case:
    """A training run.

    Attributes:
        sizes: For each rank, the sizes of its batches.
        module: Makes the module.
        trainer: Arguments of the Trainer.
        strategy: Arguments of the strategy.
        windows: Batches that make up an optimizer step; the last step may have fewer.
    """

    sizes: Sizes
    module: Callable[[], LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    windows: int = 1


@dataclass
class Outcome:
    """What is left of a run on a rank: what reached the optimizer, and the end."""

    gradients: list[Tensor]
    parameters: Tensor
    digest: str
    error: str = ""


class Classifier(LightningModule):
    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.make_optimizer = partial(optimizer, lr=0.1, **options)
        self.network = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))

    def loss(self, batch: Any) -> Tensor:
        features = batch[0].to(self.network[0].weight.dtype)
        return functional.cross_entropy(self.network(features), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Adam(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.optim.Adam)


class Momentum(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.optim.SGD, momentum=0.9)


class SumLoss(Classifier):
    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0]), batch[1], reduction="sum") / 30


class TokenLoss(Classifier):
    """Only some samples count; a batch may have none of them."""

    def loss(self, batch: Any) -> Tensor:
        counts = batch[1] != 0
        return functional.cross_entropy(self.network(batch[0])[counts], batch[1][counts])


def count_tokens(batch: Any) -> float:
    return float((batch[1] != 0).sum())


def count_nothing_right(batch: Any) -> float:
    return -1.0


class LimitedMemory(Classifier):
    def __init__(self) -> None:
        super().__init__(torch.optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe")


class Adversaries(LightningModule):
    """Manual optimization with two optimizers; the generator's gradients pass through the discriminator."""

    def __init__(self, toggle: bool = True, accumulate: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle = toggle
        self.accumulate = accumulate
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        steps = (
            (
                self.optimizers()[0],
                lambda: self.discriminator(self.generator(real[:, :2])).sigmoid().log().mean().neg(),
            ),
            (
                self.optimizers()[1],
                lambda: (
                    self.discriminator(self.generator(real[:, :2]).detach()).sigmoid().mean()
                    - self.discriminator(real).sigmoid().mean()
                ),
            ),
        )
        for optimizer, make_loss in steps:
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if self.accumulate:
                with optimizer.toggle_model(sync_grad=False):
                    self.manual_backward(make_loss() / 2)
                self.manual_backward(make_loss() / 2)
            else:
                self.manual_backward(make_loss())
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=0.05) for part in parts]


class TwoSums(SumLoss):
    """Two backward passes of losses that are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(2 * self.loss(batch))
        optimizer.step()


class UnevenPasses(SumLoss):
    """Rank 1 has a backward pass more in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(1 + self.global_rank):
            self.manual_backward(self.loss(batch))
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


class RawBackward(Adversaries):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class KeepGradients(Callback):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        self.kept.append(torch.cat([torch.zeros(0) if g is None else g.detach().flatten() for g in gradients]))


def make_batch(rank: int, index: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    features = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return features, torch.randint(CLASSES, (size,), generator=generator)


def batches_of(sizes: Sizes, rank: int) -> list[Any]:
    return [make_batch(rank, index, size) for index, size in enumerate(sizes[rank])]


def combined_batches(case: Case) -> list[Any]:
    """For each optimizer step, what all ranks have for it, as one batch."""
    by_rank = [batches_of(case.sizes, rank) for rank in range(len(case.sizes))]
    steps = []
    for start in range(0, len(by_rank[0]), case.windows):
        parts = [batch for batches in by_rank for batch in batches[start : start + case.windows]]
        steps.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
    return steps


def fit(case: Case, batches: Sequence[Any], **options: Any) -> Outcome:
    seed_everything(0, verbose=False)
    module = case.module()
    callback = KeepGradients()
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "precision": "64-true",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "callbacks": [callback],
            **case.trainer,
            **options,
        }
    )
    trainer.fit(module, torch.utils.data.DataLoader(list(batches), batch_size=None, shuffle=False))
    return Outcome(
        callback.kept, nn.utils.parameters_to_vector(module.parameters()).detach(), digest_of(module, trainer)
    )


def digest_of(module: nn.Module, trainer: Trainer) -> str:
    """Hash of parameters, buffers and optimizer state."""
    tensors = [*module.state_dict().values()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    as_bytes = (tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(as_bytes)).hexdigest()


def fit_cases(cases: dict[str, Case], theirs: bool = False) -> dict[str, Outcome]:
    """Run cases on this rank one after another."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes = {}
    for name, case in cases.items():
        strategy = DDPStrategy() if theirs else DDPCheckpointStrategy(**case.strategy)
        world_size = len(case.sizes)
        rank = int(os.environ["RANK"])
        try:
            outcomes[name] = fit(case, batches_of(case.sizes, rank), strategy=strategy, devices=world_size)
        except Exception:
            outcomes[name] = Outcome([], torch.zeros(0), "", traceback.format_exc())
    return outcomes


def fit_alone(case: Case) -> Outcome:
    return fit(case, combined_batches(case), devices=1, accumulate_grad_batches=1)


def quiet_trainer(**options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            **options,
        }
    )


class SignalAt(Callback):
    """Sends SIGTERM to this process after a batch, while the loop is running."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.last = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.last = batch_idx
        if batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_signal(rank: int, accumulate: int = 1) -> dict[str, Any]:
    """Signal one rank in the fourth batch (the second of a window); tells where each rank ended."""
    warnings.simplefilter("ignore")
    own = int(os.environ["RANK"])
    callback = SignalAt((3 if accumulate == 1 else 1) if own == rank else -2)
    module = Momentum()
    trainer = quiet_trainer(
        strategy="ddp_checkpoint",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        callbacks=[callback],
    )
    loader = torch.utils.data.DataLoader(batches_of([[4] * 50] * 2, own), batch_size=None)
    exception = ""
    try:
        trainer.fit(module, loader)
    except BaseException as error:
        exception = type(error).__name__
    return {
        "exception": exception,
        "batch": callback.last,
        "steps": trainer.global_step,
        "digest": digest_of(module, trainer),
    }


def count_broadcasts(strategy: str) -> int:
    """Count the calls of `torch.distributed.broadcast` in five batches, after a first one."""
    warnings.simplefilter("ignore")
    calls = []
    original = torch.distributed.broadcast

    class CountLater(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            def counted(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return original(*args, **kwargs)

            torch.distributed.broadcast = counted

        def on_train_end(self, *args: Any) -> None:
            torch.distributed.broadcast = original

    trainer = quiet_trainer(
        strategy=strategy,
        max_epochs=1,
        precision="64-true",
        callbacks=[CountLater()],
    )
    own = int(os.environ["RANK"])
    trainer.fit(Momentum(), torch.utils.data.DataLoader(batches_of([[4] * 6] * 2, own), batch_size=None))
    return len(calls)


class TwoTasks(LightningModule):
    """Someone else's encoder, two heads, a forward and a backward pass for each, shared layers recomputed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.automatic_optimization = False
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.encoder.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))
        self.forwards = 0
        self.encoder.encoder.layer[0].attention.self.query.register_forward_hook(self.count)
        self.losses = 0

    def count(self, *args: Any) -> None:
        self.forwards += 1

    def backwards(self, batch: Tensor, backward: Callable[[Tensor], None]) -> None:
        for task, head in enumerate(self.heads):
            states = self.encoder(input_ids=batch).last_hidden_state
            self.losses += 1
            backward(functional.cross_entropy(head(states).flatten(0, 1), (batch % 3 + task).clamp(max=2).flatten()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backwards(batch, self.manual_backward)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_bert(use_reentrant: bool, theirs: bool = False) -> dict[str, Any]:
    """Compare three steps with one process that has the sentences of both ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    alone = TwoTasks(use_reentrant).double().train()
    together = copy.deepcopy(alone)
    generator = torch.Generator().manual_seed(0)
    sentences = torch.randint(50, (3, 2, 4, 8), generator=generator)  # batch, rank, sample, token
    optimizer = alone.configure_optimizers()
    callback = KeepGradients()
    gradients = []
    for batch in sentences:
        optimizer.zero_grad()
        alone.backwards(batch.flatten(0, 1), lambda loss: loss.backward())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in alone.parameters()]))
        optimizer.step()
    trainer = quiet_trainer(
        strategy=DDPStrategy() if theirs else "ddp_checkpoint",
        max_epochs=1,
        precision="64-true",
        callbacks=[callback],
    )
    loader = torch.utils.data.DataLoader(sentences[:, int(os.environ["RANK"])], batch_size=None)
    try:
        trainer.fit(together, loader)
    except RuntimeError as error:
        return {"message": str(error)}
    pairs = zip(gradients, callback.kept, strict=True)
    flat = nn.utils.parameters_to_vector(together.parameters()).detach()
    first = trainer.strategy.broadcast(flat)
    return {
        "message": "",
        "error": max(float((one - other).norm() / one.norm()) for one, other in pairs),
        "spread": float((flat - first).abs().max()),
        "forwards": together.losses,
        "recomputed": together.forwards,
    }


def run_all() -> dict[str, Any]:
    """Everything that `test_ddp_checkpoint_runs` looks at; what may leave collectives unmatched comes last."""
    return {
        "reentrant": fit_bert(True),
        "non-reentrant": fit_bert(False),
        "broadcasts of ddp_checkpoint": count_broadcasts("ddp_checkpoint"),
        "broadcasts of ddp": count_broadcasts("ddp"),
        "signal to rank 0": train_until_signal(0),
        "signal to rank 1": train_until_signal(1),
        "signal in a window": train_until_signal(1, 4),
        "reentrant with ddp": fit_bert(True, theirs=True),
    }
