"""Connection, reduction and safe loading of checkpoints of all strategies, also of Lightning's DDP and FSDP."""

import contextlib
import inspect
import os
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, Strategy
from typing_extensions import override

from lightning_ddp_ext._import_names import DISTRIBUTIONS
from lightning_ddp_ext._validation import as_timeout, check_choice
from lightning_ddp_ext.clusters.process_group_options import Connection, RankMixin, choose_start_method, device_type_of
from lightning_ddp_ext.consistency import describe_versions
from lightning_ddp_ext.distributed.backends import DEFAULT_TIMEOUT
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
    return describe_versions(DISTRIBUTIONS["lightning.pytorch"])


class ConnectedStrategy(RankMixin, WeightsOnlyLoadMixin, ParallelStrategy):
    """Mixin that creates the process group by a `Connection` before Lightning, which keeps the group it finds."""

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        init_method: str | None = None,
        network_interface: str | None = None,
        **options: Any,
    ) -> None:
        if "start_method" in options:  # FSDP has no such option
            options["start_method"] = choose_start_method(options["start_method"])
        self._connection = Connection(
            backend=process_group_backend,
            timeout=DEFAULT_TIMEOUT if timeout is None else as_timeout("timeout", timeout),
            init_method=init_method,
            network_interface=network_interface,
        )
        self._connection.check_arguments()
        options |= {"process_group_backend": process_group_backend, "timeout": self._connection.timeout}
        super().__init__(**options)

    @override
    def _configure_launcher(self) -> None:
        self._connection.check_launch(self._strategy)
        super()._configure_launcher()

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
