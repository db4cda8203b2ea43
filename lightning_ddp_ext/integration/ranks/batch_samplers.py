"""Batch samplers of users, and the samplers in them, where Lightning injects samplers of its own."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_ddp_ext._compat.loaders import replace_preparation


class _GivenBatchSampler(BatchSampler):
    """A batch sampler that Lightning makes anew with another sampler, because it is not torch's class itself."""


def keep_batch_samplers(trainer: Trainer, preparing: Callable[[], AbstractContextManager[None]]) -> None:
    """Let loaders that were given a batch sampler keep the size of their batches and the sampler inside.

    Lightning 2.6.6 makes such a loader anew. If the batch sampler is one of torch's class itself, it puts a sampler in
    its place, so that a batch is one sample. And it does not look for a sampler in any batch sampler: a user's
    `DistributedSampler` there is replaced, and what a weighted one would draw is not.

    Args:
        trainer: The Trainer.
        preparing: Makes a context that is put around Lightning's own work on a loader.
    """
    replace_preparation(trainer, _show_samplers, preparing)


def _show_samplers(loader: DataLoader[Any]) -> DataLoader[Any]:
    given: Any = loader.batch_sampler
    if given is None or loader.batch_size is not None:  # which torch makes from the size
        return loader
    shown = copy.copy(loader)  # torch refuses to set what follows
    if getattr(given, "sampler", None) is not None:
        vars(shown)["sampler"] = given.sampler
    if type(given) is BatchSampler:
        given = vars(shown)["batch_sampler"] = copy.copy(given)
        given.__class__ = _GivenBatchSampler
    return shown
