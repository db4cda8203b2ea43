"""The same training in one process, on the concatenation of the recorded batches of all ranks."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from typing_extensions import override

from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.batches.splitting import join_batches
from lightning_ddp_ext.distributed.exchange import destroy_group, gather_objects, own_group
from lightning_ddp_ext.distributed.serialization import name_skipped, pack
from lightning_ddp_ext.errors import BatchSplitError, UnsupportedFeatureError
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

_CPU = torch.device("cpu")

# (epoch, index of the batch of the single process)
_Place = tuple[int, int]


class BatchRecorder(Callback):
    """Keeps every training batch of every rank in memory, and collects them on rank 0 at the end.

    With our strategies, an accumulation window has the gradient of one large batch, and the single process trains on
    one concatenated batch per window. Other strategies average batches, and the single process accumulates as well.
    """

    def __init__(self) -> None:
        self.batches: dict[_Place, list[Any]] = {}
        self.length: int | None = None  # batches per epoch of the single process, if known
        self.accumulated = 1  # batches per optimizer step of the single process

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not getattr(trainer.strategy, "is_shadow", False):
            place = trainer.current_epoch, batch_idx // _window(trainer)
            recorded = copy.deepcopy(to_device(batch, _CPU))
            if trainer.world_size > 1 and (skipped := pack(recorded).skipped):
                raise UnsupportedFeatureError(
                    f"rank {trainer.global_rank}: a batch holds {name_skipped(skipped)}, which cannot be sent to rank 0"
                    " without running code there, and the comparison with one process needs all batches. Set"
                    " `compare_single_process=false`."
                )
            self.batches.setdefault(place, []).append(recorded)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = trainer.num_training_batches
        self.length = None if math.isinf(batches) else math.ceil(batches / _window(trainer))
        self.accumulated = trainer.accumulate_grad_batches // _window(trainer)
        if trainer.world_size == 1:
            return
        group = own_group()
        gathered: list[dict[_Place, list[Any]]] = gather_objects(dict(self.batches), group)
        destroy_group(group)
        places = sorted({place for batches in gathered for place in batches})
        self.batches = {place: [batch for batches in gathered for batch in batches.get(place, ())] for place in places}


def train_single_process(config: DictConfig, run: Trainer, recorder: BatchRecorder) -> tuple[dict[str, float], float]:
    """Repeat the training of `run`, whose process group is destroyed, in one process on the recorded batches.

    Returns the test metrics, and the norm of the difference of all parameters to the run, relative to their norm.
    """
    seed_everything(config.seed, workers=True, verbose=False)
    model: LightningModule = instantiate(config.model)
    data: LightningDataModule = instantiate(config.data)
    device = run.strategy.root_device
    trainer: Trainer = instantiate(
        config.trainer,
        strategy="auto",
        devices=1 if device.index is None else [device.index],
        num_nodes=1,
        plugins=config.trainer.plugins or [LightningEnvironment()],
        callbacks=[_StopAfter(run.global_step)],
        # The recorded batches are already limited by these arguments.
        accumulate_grad_batches=recorder.accumulated,
        limit_train_batches=None,
        overfit_batches=0.0,
        val_check_interval=None,
        min_epochs=None,
        min_steps=None,
        logger=False,
        profiler=None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    concatenate = getattr(data, "concatenate_batches", _concatenate)
    loader = _Replay(recorder, trainer, concatenate)
    setattr(data, "train_dataloader", lambda: loader)  # noqa: B010  a method of this instance
    trainer.fit(model, datamodule=data)
    results = merge_results(trainer.test(model, datamodule=data, verbose=False))
    assert run.lightning_module is not None
    return results, _difference(run.lightning_module, model)


def merge_results(by_loader: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the results of all test loaders, whose names Lightning makes distinct."""
    return {name: value for results in by_loader for name, value in results.items()}


def _window(trainer: Trainer) -> int:
    """Return the number of batches of a rank in one batch of the single process."""
    return trainer.accumulate_grad_batches if isinstance(trainer.strategy, ExplicitDDPStrategy) else 1


@dataclass(frozen=True)
class _Replay:
    """A loader of the recorded batches."""

    recorder: BatchRecorder
    trainer: Trainer
    concatenate: Callable[[Sequence[Any]], Any]

    def __iter__(self) -> Iterator[Any]:
        for (epoch, _), batches in self.recorder.batches.items():
            if epoch == self.trainer.current_epoch:
                yield batches[0] if len(batches) == 1 else self.concatenate(batches)

    def __len__(self) -> int:
        if self.recorder.length is None:
            raise TypeError("the number of batches was not known")
        return self.recorder.length


class _StopAfter(Callback):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self._steps


def _concatenate(batches: Sequence[Any]) -> Any:
    try:
        return join_batches(batches)
    except BatchSplitError as error:
        raise UnsupportedFeatureError(
            f"the batches of the ranks cannot be concatenated ({error.problem}), which the comparison with one process"
            " needs. Give the data module a method `concatenate_batches(self, batches)`, or set"
            " `compare_single_process=false`."
        ) from error


def _difference(one: LightningModule, other: LightningModule) -> float:
    parameters, others = (
        torch.cat([parameter.detach().to(_CPU, torch.float64).flatten() for parameter in module.parameters()])
        for module in (one, other)
    )
    return float((parameters - others).norm() / others.norm())
