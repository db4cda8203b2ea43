"""Taking over what a step with manual optimization has done on another rank."""

from collections.abc import Set
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_ext._compat.loops import manual_step_progress
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.parallel.consistency.sharing import find_ignored
from lightning_ddp_ext.parallel.gradients.reducer import GradientReducer
from lightning_ddp_ext.parallel.messages.flat_messages import broadcast_all
from lightning_ddp_ext.parallel.messages.packing import Packed, broadcast_packed, pack, unpack

# What is the same on every rank without being sent: code.
_CODE = (type, FunctionType, BuiltinFunctionType, partial, Enum)


def mirror_training(
    trainer: Trainer,
    module: LightningModule,
    reducer: GradientReducer,
    group: dist.ProcessGroup,
    source: int,
    take: bool,
) -> None:
    """Give ranks the training state of one of them; to be called on every rank.

    Under manual optimization the step itself clips gradients, steps optimizers and schedulers, and changes whatever it
    likes: a rank that did not run it cannot do the same, but it can have the same.

    Args:
        trainer: The Trainer.
        module: Its module.
        reducer: Synchronises its gradients.
        group: The ranks.
        source: The rank that has run the step.
        take: Whether this rank takes what it is given.

    Raises:
        UnsupportedFeatureError: On every rank, if the state of an optimizer or a scheduler holds something that cannot
            be sent.
    """
    ignored = find_ignored(module)
    parameters = [parameter for name, parameter in module.named_parameters() if name not in ignored]
    buffers = [buffer for name, buffer in module.named_buffers() if name not in ignored]
    own = _pack_state(trainer, parameters, reducer.unsynchronized(parameters))
    sent = broadcast_packed(own, group, source)
    state = unpack(sent, own.left_out)
    if "problem" in state:
        raise UnsupportedFeatureError(state["problem"])
    broadcast_all([*parameters, *buffers], group, source)
    if take:
        for optimizer, values in zip(trainer.optimizers, state["optimizers"], strict=True):
            _load(optimizer, values, own=set(module.parameters()).difference(parameters))
        for config, values in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        trainer.precision_plugin.load_state_dict(state["precision"])
        manual_step_progress(trainer).load_state_dict(state["progress"])
    if state["gradients"] is not None:
        _mirror_gradients(dict(zip(parameters, state["gradients"], strict=True)), group, source, take)


def _load(optimizer: Optimizer, values: dict[str, Any], own: Set[nn.Parameter]) -> None:
    """Load the state of an optimizer, but for parameters that belong to this rank alone."""
    kept: dict[Tensor, Any] = {
        parameter: optimizer.state.pop(parameter) for parameter in own if parameter in optimizer.state
    }
    optimizer.load_state_dict(values)
    for parameter in own:
        optimizer.state.pop(parameter, None)
    optimizer.state.update(kept)


def _mirror_gradients(kinds: dict[nn.Parameter, int | None], group: dist.ProcessGroup, source: int, take: bool) -> None:
    dense = {
        parameter: torch.empty_like(parameter) if take or parameter.grad is None else parameter.grad.to_dense()
        for parameter, kind in kinds.items()
        if kind is not None
    }
    broadcast_all(list(dense.values()), group, source)
    for parameter, sparse_dim in kinds.items() if take else ():
        gradient = dense.get(parameter)
        parameter.grad = gradient.to_sparse(sparse_dim) if gradient is not None and sparse_dim else gradient


def _kind(gradient: Tensor | None) -> int | None:
    """Return None where there is no gradient, else the number of its sparse dimensions."""
    return None if gradient is None else gradient.sparse_dim() if gradient.is_sparse else 0


def _pack_state(trainer: Trainer, parameters: list[nn.Parameter], has_own_gradients: bool) -> Packed:
    state: dict[str, Any] = {
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "progress": manual_step_progress(trainer).state_dict(),
        # What is still being accumulated on each rank by itself stays there.
        "gradients": None if has_own_gradients else [_kind(parameter.grad) for parameter in parameters],
    }
    packed = pack(state)
    strange = {place: value for place, value in packed.left_out.items() if not isinstance(value, _CODE)}
    if not strange:
        return packed
    what = Packed(None, [], strange).name_left_out()
    problem = (
        "`ddp_join` under manual optimization sends the state of optimizers and schedulers to ranks without data, and"
        f" it holds {what}, which is neither a number nor a tensor."
        ' Use `uneven_inputs="stop"`.'
    )
    return pack({"problem": problem})
