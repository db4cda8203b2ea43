"""Connection, reduction and safe loading of checkpoints of all strategies, also of Lightning's DDP and FSDP."""

import contextlib
import inspect
import os
import zipfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_ddp_ext._import_names import DISTRIBUTIONS
from lightning_ddp_ext._lightning import (
    NAME,
    CheckpointIO,
    DDPStrategy,
    FSDPStrategy,
    ParallelStrategy,
    Strategy,
    TorchCheckpointIO,
    get_filesystem,
)
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import check_bucket_cap, check_choice, check_integer
from lightning_ddp_ext.activation_checkpointing import ActivationCheckpointing, ActivationCheckpointingPolicy
from lightning_ddp_ext.batches.sample_counts import BatchSamples
from lightning_ddp_ext.batches.weights import WeightBy, WeightRule
from lightning_ddp_ext.clusters.process_group_options import ConnectedMixin, device_type_of
from lightning_ddp_ext.consistency import compare_setups, describe_arguments, describe_versions
from lightning_ddp_ext.errors import CheckpointRefusedError, UnsupportedFeatureError

_NAMED = 3  # in a message

# Before Lightning 2.6, neither `trainer.fit` nor a strategy takes `weights_only`.
TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(Strategy.load_checkpoint).parameters
_VERSION = "pytorch-lightning_version"  # key in each checkpoint of a Trainer
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_REMEDY = (
    "Pass `weights_only=False` to `trainer.fit` if you trust its author."
    if TAKES_WEIGHTS_ONLY
    else "Allow its classes with `torch.serialization.add_safe_globals` if you trust its author."
)


class WeightsOnlyLoadMixin(Strategy):
    """Mixin before Lightning's class that loads whole checkpoints only, with `weights_only=True` unless it is False.

    Lightning leaves the choice to torch, which runs code from files that come from a URL.
    """

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if not (isinstance(self, FSDPStrategy) and os.path.isdir(checkpoint_path)):  # of shards
            check_checkpoint(checkpoint_path, self.checkpoint_io, allows_code=weights_only is False)
        if weights_only is False or TAKES_WEIGHTS_ONLY:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only is not False)
        else:
            with _weights_only_forced():
                checkpoint = super().load_checkpoint(checkpoint_path)
        if not isinstance(checkpoint, dict) or _VERSION not in checkpoint:
            raise unreadable(checkpoint_path, f"no `{_VERSION}`, which a Trainer writes")
        return checkpoint


@contextlib.contextmanager
def _weights_only_forced() -> Iterator[None]:
    """Have `torch.load` read tensors and plain values only, whatever its caller asks for."""
    given = os.environ.get(_FORCE, "0")
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        os.environ[_FORCE] = given


def check_checkpoint(
    path: str | Path, checkpoint_io: CheckpointIO, allows_code: bool, argument: str = "ckpt_path"
) -> None:
    """Raise `CheckpointRefusedError` unless a file is as `torch.save` wrote it, and loading it runs no code.

    Files that another plugin reads or that torch downloads are not checked.
    """
    reader = getattr(checkpoint_io, "checkpoint_io", checkpoint_io)  # of a plugin that wraps another one
    if str(path).startswith("http") or type(reader).load_checkpoint is not TorchCheckpointIO.load_checkpoint:
        return
    try:
        with get_filesystem(path).open(str(path), "rb") as file, zipfile.ZipFile(file) as archive:
            # torch ignores the checksums, so that a run would continue from a flipped bit.
            if any(part.CRC for part in archive.infolist()) and (damaged := archive.testzip()):
                raise zipfile.BadZipFile(f"the checksum of its part `{damaged}` is wrong")
            file.seek(0)
            names = [] if allows_code else sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except FileNotFoundError:
        return  # Lightning names it
    except Exception as error:  # zipfile and torch raise errors of many kinds
        raise unreadable(path, error, argument) from error
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        listed = ", ".join(f"`{name}`" for name in names[:_NAMED])
        raise CheckpointRefusedError(
            f"`ckpt_path={path}` holds {listed}{more}: loading that would run code from the file, and"
            " `weights_only=True` allows tensors and plain values only.",
            _REMEDY,
            names,
        )


def unreadable(path: str | Path, reason: object, argument: str = "ckpt_path") -> CheckpointRefusedError:
    """Return an error about a file that is damaged or that another program wrote."""
    return CheckpointRefusedError(
        f"`{argument}={path}` cannot be read as a checkpoint: it is cut, overwritten or of another program"
        f" ({' '.join(str(reason).split())}).",
        "Give another file that `trainer.save_checkpoint` or `fabric.save` wrote.",
    )


def describe_versions_of_run() -> dict[str, object]:
    """Describe the versions that all ranks share, with the distribution of Lightning that this module imports."""
    return describe_versions(DISTRIBUTIONS[NAME])


class GradientOptionsMixin:
    """Mixin with the arguments of gradients and batches that the strategies for the Trainer and for Fabric share."""

    def __init__(
        self,
        *args: Any,
        bucket_cap_mb: float = 25.0,
        weight_by: WeightBy = "samples",
        batch_dim: int = 0,
        activation_checkpointing: ActivationCheckpointingPolicy | None = None,
        **options: Any,
    ) -> None:
        check_integer("batch_dim", batch_dim, remedy="Use 0 for batches whose first dimension counts samples.")
        check_bucket_cap(bucket_cap_mb)
        self.bucket_cap_mb, self.weight_by, self.batch_dim = bucket_cap_mb, weight_by, batch_dim
        self._weight_rule = WeightRule(weight_by, rank_zero_info)
        self._samples = BatchSamples(batch_dim)
        self._checkpointing = (
            None if activation_checkpointing is None else ActivationCheckpointing(activation_checkpointing)
        )
        super().__init__(*args, **options)

    def compared_arguments(self) -> dict[str, object]:
        """Return the arguments that must be the same on every rank."""
        return {
            "strategy": type(self),
            "bucket_cap_mb": self.bucket_cap_mb,
            "weight_by": self.weight_by,
            "batch_dim": self.batch_dim,
            "activation_checkpointing": None if self._checkpointing is None else self._checkpointing.policy,
        }

    def compare_ranks(self) -> None:
        """Raise a ReplicaMismatchError on all ranks unless they have the same versions and arguments."""
        compare_setups({**describe_versions_of_run(), **describe_arguments(self.compared_arguments())})


class ConnectedStrategy(ConnectedMixin, WeightsOnlyLoadMixin, ParallelStrategy):
    """Mixin that creates the process group by a `Connection` before Lightning, which keeps the group it finds."""

    def _connect(self) -> None:
        self._strategy.set_world_ranks()
        self._connection.open(self._strategy)

    @property
    def _strategy(self) -> DDPStrategy | FSDPStrategy:
        assert isinstance(self, DDPStrategy | FSDPStrategy)
        return self


class ConnectedDDPStrategy(ConnectedStrategy, DDPStrategy):
    """Lightning's `DDPStrategy` over a chosen network."""

    @override
    def setup_distributed(self) -> None:
        self._connect()
        super().setup_distributed()


class ConnectedFSDPStrategy(ConnectedStrategy, FSDPStrategy):
    """Lightning's `FSDPStrategy` over a chosen network."""

    def __init__(self, *, sharding_strategy: Any = "FULL_SHARD", state_dict_type: str = "full", **options: Any) -> None:
        if not isinstance(sharding_strategy, Enum):  # torch's enumeration is accepted too
            name = sharding_strategy.upper() if isinstance(sharding_strategy, str) else sharding_strategy
            from torch.distributed.fsdp import ShardingStrategy  # takes long, and few programs need it

            check_choice(
                "sharding_strategy", name, [*ShardingStrategy.__members__], "Leave it out to shard everything."
            )
        check_choice("state_dict_type", state_dict_type, ("full", "sharded"), 'Use "full" for one file.')
        super().__init__(sharding_strategy=sharding_strategy, state_dict_type=state_dict_type, **options)

    @override
    def _configure_launcher(self) -> None:
        if device_type_of(self) == "cpu":
            raise UnsupportedFeatureError("`fsdp` shards over accelerators, got the CPU. Use `strategy=ddp` there.")
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None  # as in Lightning's class
        self.accelerator.setup_device(self.root_device)
        self._connect()
        super().setup_environment()


def single_device_strategy() -> str:
    """Return the name by which the Trainer chooses its strategy for one device."""
    return "auto"
