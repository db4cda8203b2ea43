"""Taking over what a step with manual optimization has done on another rank."""

from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer

from lightning_ddp_ext._compat.lightning import manual_step_progress
from lightning_ddp_ext.parallel.buckets import broadcast_all
from lightning_ddp_ext.parallel.reducer import GradientReducer


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
    """
    parameters = list(module.parameters())
    has_own_gradients = reducer.unsynchronized(parameters)
    described: list[dict[str, Any]] = [{}]
    if dist.get_rank(group) == source:
        described[0] = {
            "optimizers": [move_data_to_device(optimizer.state_dict(), "cpu") for optimizer in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "progress": manual_step_progress(trainer).state_dict(),
            # What is still being accumulated on each rank by itself stays there.
            "gradients": None if has_own_gradients else [parameter.grad is not None for parameter in parameters],
        }
    dist.broadcast_object_list(described, group=group, group_src=source)
    broadcast_all([*parameters, *module.buffers()], group, source)
    state = described[0]
    if take:
        for optimizer, values in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        for config, values in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(values)
        manual_step_progress(trainer).load_state_dict(state["progress"])
    if state["gradients"] is None:
        return
    for parameter, has_gradient in zip(parameters, state["gradients"], strict=True):
        if take:
            parameter.grad = parameter.detach().clone() if has_gradient else None
    broadcast_all([parameter.grad for parameter in parameters if parameter.grad is not None], group, source)
