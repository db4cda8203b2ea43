"""The same training once more in one process, to compare a run with."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig
from typing_extensions import override

from lightning_ddp_ext.batches.containers import to_device
from lightning_ddp_ext.batches.splitting import count_samples, gather
from lightning_ddp_ext.distributed.exchange import broadcast_bytes, own_group
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

_CPU = torch.device("cpu")

# (epoch, number of the batch of the reference in it)
_Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Reference:
    """What came of the training in one process.

    Attributes:
        results: Test metrics by name.
        difference: Norm of the difference of all parameters between the run and this one, relative to theirs.
        precision: The precision of both.
    """

    results: Mapping[str, float]
    difference: float
    precision: str


class BatchRecorder(Callback):
    """Keeps every training batch of every rank, in memory.

    Strategies that weigh micro-batches make an accumulation window equal to one large batch, and so does the reference.
    Others accumulate as Lightning does; the reference then accumulates too.

    Attributes:
        batches: What makes up each batch of the reference, one rank's after another's; complete on rank 0 when training
            has ended.
        length: Batches of an epoch of the reference, None if that is not known.
        accumulated: Batches per optimizer step of the reference.

    Raises:
        UnsupportedFeatureError: In training, if a batch of one of several ranks cannot be sent to rank 0.
    """

    def __init__(self) -> None:
        self.batches: dict[_Place, list[Any]] = defaultdict(list)
        self.length: int | None = None
        self.accumulated = 1

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not getattr(trainer.strategy, "is_shadow", False):
            place = trainer.current_epoch, batch_idx // _window(trainer)
            recorded = copy.deepcopy(to_device(batch, _CPU))
            if trainer.world_size > 1:
                _check_sendable(recorded, trainer.global_rank)
            self.batches[place].append(recorded)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        batches = trainer.num_training_batches
        self.length = None if math.isinf(batches) else math.ceil(batches / _window(trainer))
        self.accumulated = trainer.accumulate_grad_batches // _window(trainer)
        if trainer.world_size == 1:
            return
        own, group = pack(dict(self.batches)).data, own_group()
        self.batches.clear()
        for rank in range(trainer.world_size):
            sent = broadcast_bytes(own if rank == trainer.global_rank else None, group, rank)
            if trainer.is_global_zero:
                for place, some in unpack(sent)[0].items():
                    self.batches[place].extend(some)
        dist.destroy_process_group(group)


def train_alone(config: DictConfig, run: Trainer, recorder: BatchRecorder) -> Reference:
    """Repeat a training in one process: from the same start, it steps on the concatenation of the ranks' batches.

    Args:
        config: The composed configuration of the run.
        run: Its Trainer; the process group has to be gone.
        recorder: What it was trained on.

    Raises:
        UnsupportedFeatureError: If batches cannot be concatenated.
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
        # The recorded batches are what is left after these.
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
    return Reference(results, _difference(run.lightning_module, model), str(trainer.precision))


def merge_results(by_loader: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Put the results of all test loaders together; Lightning tells their names apart.

    Args:
        by_loader: What `trainer.test` returns.

    Returns:
        All values by name.
    """
    return {name: value for results in by_loader for name, value in results.items()}


def _check_sendable(batch: Any, rank: int) -> None:
    skipped = pack(batch).skipped
    if skipped:
        raise UnsupportedFeatureError(
            f"rank {rank}: a batch holds {name_skipped(skipped)}, which cannot be sent to rank 0 without running code"
            " there, and the reference of one process needs all batches. Set `reference=false`."
        )


def _window(trainer: Trainer) -> int:
    """Return how many batches of the run make up a batch of the reference."""
    return trainer.accumulate_grad_batches if isinstance(trainer.strategy, ExplicitDDPStrategy) else 1


class _Replay:
    """A loader of recorded batches."""

    def __init__(self, recorder: BatchRecorder, trainer: Trainer, concatenate: Callable[[Sequence[Any]], Any]) -> None:
        self._recorder = recorder
        self._trainer = trainer
        self._concatenate = concatenate

    def __iter__(self) -> Iterator[Any]:
        epoch = self._trainer.current_epoch
        for place in sorted(place for place in self._recorder.batches if place[0] == epoch):
            batches = self._recorder.batches[place]
            yield batches[0] if len(batches) == 1 else self._concatenate(batches)

    def __len__(self) -> int:
        if self._recorder.length is None:
            raise TypeError("the number of batches was not known")
        return self._recorder.length


class _StopAfter(Callback):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self._steps


def _concatenate(batches: Sequence[Any]) -> Any:
    try:
        return gather(batches, [count_samples(batch) for batch in batches], _CPU)
    except RuntimeError as error:
        raise UnsupportedFeatureError(
            f"the batches of the ranks cannot be concatenated ({error}), which the reference of one process needs. Give"
            " the data module a method `concatenate_batches(self, batches)`, or set `reference=false`."
        ) from error


def _difference(one: LightningModule, other: LightningModule) -> float:
    parameters, others = (
        torch.cat([parameter.detach().to(_CPU, torch.float64).flatten() for parameter in module.parameters()])
        for module in (one, other)
    )
    return float((parameters - others).norm() / others.norm())
