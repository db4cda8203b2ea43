"""Errors raised after construction, besides the `TypeError` and `ValueError` of constructors, and warnings."""

import re
import warnings
from collections.abc import Sequence
from contextlib import suppress


class DDPExtError(RuntimeError):
    """Base class of all errors that this package raises after construction."""


class UnsupportedFeatureError(DDPExtError):
    """The Trainer is configured with a feature or launch that the strategy does not support."""


class BatchSplitError(DDPExtError):
    """The batch size is ambiguous, or the batch holds an entry that cannot be split.

    Args:
        problem: Description of the batch.
        remedy: Remedy, as a sentence.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem


class ActivationCheckpointingError(DDPExtError):
    """The policy matches no module, or a module cannot be recomputed."""


class UnsynchronizedGradientsError(DDPExtError):
    """An optimizer is about to step with gradients that are not synchronised, so that ranks would diverge."""


class RanksOutOfStepError(DDPExtError):
    """Ranks synchronise different batches or backward passes, or could after an error, or gather different tensors."""


class RankJoinedError(DDPExtError):
    """A step issues a collective that needs a rank without data."""


class UnevenInputsError(DDPExtError):
    """Ranks have different amounts of data although every rank needs the same, or a loader ends before its length."""


class LoggedKeysError(DDPExtError):
    """Ranks log different keys with `sync_dist=True`, whose values would be added to each other."""


class OtherRankError(DDPExtError):
    """Another rank failed, ended, stalled or did not arrive within the time limit."""


class ReplicaMismatchError(DDPExtError):
    """Ranks have different setups, or their parameters, buffers or optimizer states differ."""


class CheckpointRefusedError(DDPExtError):
    """Loading the checkpoint would run code, or the file is not a checkpoint.

    Args:
        problem: Description of the file.
        remedy: Remedy, as a sentence.
        names: Names that loading would import or call.
    """

    def __init__(self, problem: str, remedy: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"{problem} {remedy}")
        self.problem = problem
        self.names = tuple(names)


class ClusterError(DDPExtError):
    """The processes of a cluster job are not the ranks of the run."""


class BackendError(DDPExtError):
    """The communication backend is missing in this torch, or does not suit the devices or the launcher."""


class RendezvousError(DDPExtError):
    """The ranks did not find each other within the time limit, or have different settings."""


class NetworkInterfaceError(DDPExtError):
    """The network interface is missing on a node, or does not reach the other nodes."""


class ImpossibleError(Exception):
    """Reason why a run or a batch cannot be checked."""


class WarnOnce:
    """Warns of a problem the first time only."""

    has_warned = False

    def __call__(self, message: str) -> None:
        """Warn the caller of the function that calls this."""
        if not self.has_warned:
            self.has_warned = True
            warnings.warn(message, UserWarning, stacklevel=3)


def text_of(error: BaseException) -> str:
    """Return the text of any exception, empty if its own `__str__` fails."""
    with suppress(Exception):
        return str(error)
    return ""


def with_remedy_for_cuda(text: str) -> str:
    """Return the text of an error on a CPU, as a remedy if it says that CUDA is missing."""
    if re.search(r"(?i)\bcuda\b|nvidia", text) is None:
        return text
    remedy = "create tensors on `self.device` instead of `.cuda()`"
    return f"the module needs CUDA, but `verify` runs on CPUs: {remedy} ({text})"


def describe_error(error: Exception) -> str:
    """Return class and first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(".")
