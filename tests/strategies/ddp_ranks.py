"""Training on several ranks, and the same training in one process; every rank imports this module."""

import hashlib
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_ddp_ext import DDPCheckpointStrategy
from tests.strategies.ddp_modules import CLASSES, FEATURES
from tests.support import devices as test_devices

Sizes = list[list[int]]  # of each rank's batches


@dataclass(frozen=True)
class Case:
    """A training run; `windows` batches make up an optimizer step, and the last step may have fewer."""

    sizes: Sizes
    module: Callable[[], LightningModule]
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    windows: int = 1


@dataclass
class Outcome:
    """The gradients of each optimizer step, and the end of a run, on a rank."""

    gradients: list[Tensor]
    parameters: Tensor
    digest: str
    error: str = ""


class KeepGradients(Callback):
    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        self.kept.append(torch.cat([torch.zeros(0) if g is None else g.detach().flatten().cpu() for g in gradients]))


def make_batch(rank: int, index: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    features = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return features, torch.randint(CLASSES, (size,), generator=generator)


def batches_of(sizes: Sizes, rank: int) -> list[Any]:
    return [make_batch(rank, index, size) for index, size in enumerate(sizes[rank])]


def combined_batches(case: Case) -> list[Any]:
    """Concatenate the batches of all ranks for each optimizer step."""
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
    defaults = {"precision": "64-true", "max_epochs": 2, "callbacks": [callback]}
    trainer = quiet_trainer(**{**defaults, **case.trainer, **options})
    trainer.fit(module, torch.utils.data.DataLoader(list(batches), batch_size=None, shuffle=False))
    return Outcome(
        callback.kept, nn.utils.parameters_to_vector(module.parameters()).detach().cpu(), digest_of(module, trainer)
    )


def digest_of(module: nn.Module, trainer: Trainer) -> str:
    """Hash of parameters, buffers and optimizer state."""
    tensors = [*module.state_dict().values()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    as_bytes = (tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
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


def quiet_trainer(strategy: Any = "auto", devices: int = 2, **options: Any) -> Trainer:
    return Trainer(
        **{
            **test_devices.trainer_options(strategy, devices),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            **options,
        }
    )
