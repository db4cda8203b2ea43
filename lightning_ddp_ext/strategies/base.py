"""Code that all strategies of the package share."""

import contextlib
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._compat.lightning import OneTrainerStrategy
from lightning_ddp_ext.errors import CheckpointRefusedError


class Registered(OneTrainerStrategy):
    """Part of a strategy that has a name.

    Attributes:
        strategy_name: The name; empty for a class that only others derive from.
    """

    strategy_name = ""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the name known to Lightning, unless it is."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)


_NAMED = 3  # in a message
_GLOBAL = re.compile(r"GLOBAL (\S+)")  # how torch names what it refuses
_UNREADABLE = re.compile("PytorchStreamReader|TorchScript|magic number")
_REMEDY = "Pass `weights_only=False` to `trainer.fit` if you trust whoever wrote it."


class WeightsOnlyLoadMixin(Strategy):
    """Loads checkpoints with `weights_only=True`, to stand before Lightning's strategy in the bases of one.

    Lightning leaves the choice to torch, which runs the code in files that come from a URL.
    """

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint.

        Args:
            checkpoint_path: The file.
            weights_only: Whether to refuse anything but tensors and plain values; None does.

        Returns:
            What is in it.

        Raises:
            CheckpointRefusedError: If it holds something else, or is no checkpoint.
        """
        if weights_only is False:
            return super().load_checkpoint(checkpoint_path, weights_only)
        try:
            return super().load_checkpoint(checkpoint_path, weights_only=True)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            if not is_refusal(error):
                raise
            raise refusal(checkpoint_path, error) from error


def is_refusal(error: Exception) -> bool:
    """Tell whether torch has raised an error because of what is in a file."""
    return isinstance(error, EOFError | pickle.UnpicklingError) or bool(_UNREADABLE.search(str(error)))


def refusal(path: str | Path, error: Exception) -> CheckpointRefusedError:
    """Say what in a checkpoint cannot be loaded with `weights_only=True`.

    Args:
        path: The file.
        error: What torch has raised.

    Returns:
        An error that names what is refused.
    """
    names = _unsafe_names(path) or list(dict.fromkeys(_GLOBAL.findall(str(error))))
    if not names:
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        return CheckpointRefusedError(
            f"`ckpt_path={path}` cannot be read as a checkpoint of tensors and plain values ({reason}).",
            "Give a file that `trainer.save_checkpoint` wrote.",
        )
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    listed = ", ".join(f"`{name}`" for name in names[:_NAMED])
    return CheckpointRefusedError(
        f"`ckpt_path={path}` holds {listed}{more}: loading that would run code from the file, and `weights_only=True`"
        " allows tensors and plain values only.",
        _REMEDY,
        names,
    )


def _unsafe_names(path: str | Path) -> list[str]:
    """List what a checkpoint would import or call; it is only looked at, not run."""
    # Files in torch's old format, and those that are none, cannot be listed.
    with contextlib.suppress(Exception), get_filesystem(path).open(str(path), "rb") as file:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    return []


def widened(tensor: Any, reduce_op: dist.ReduceOp | str | None) -> Any:
    """Return whole numbers as floating-point ones if their mean is wanted, which Lightning would cut off."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    is_whole = isinstance(tensor, Tensor) and not tensor.is_floating_point() and not tensor.is_complex()
    return tensor.double() if is_mean and is_whole else tensor
