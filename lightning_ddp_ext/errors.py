"""Errors raised once a run has been set up.

Wrong arguments raise `TypeError` or `ValueError` in the constructor; what can only be known later raises one of:

    DDPExtError (RuntimeError)
    |-- UnsupportedFeatureError        a Trainer feature or launch that the strategy cannot do right
    |-- BatchSplitError                a batch that cannot be cut into chunks, or whose size is ambiguous
    |-- ActivationCheckpointingError   a policy that finds no module, or a module that cannot be recomputed
    |-- UnsynchronizedGradientsError   an optimizer step with gradients that are this rank's own
    |-- RanksOutOfStepError            ranks that synchronise gradients of different backward passes
    |-- RankJoinedError                a collective that needs a rank which has run out of data
    |-- UnevenInputsError              ranks with different amounts of data where that is refused
    |-- LoggedKeysError                ranks that log different keys, or in another order
    |-- OtherRankError                 another rank that failed, is gone, gives no sign of life, or did not come
    |-- ReplicaMismatchError           ranks that were not set up alike, or are no replicas of each other any more
    |-- CheckpointRefusedError         a checkpoint that holds more than tensors and plain values
    |-- ClusterError                   a job whose processes are not those that the run needs
    |-- BackendError                   a communication backend that this installation or launch cannot use
    |-- RendezvousError                processes of a run that do not find each other
    `-- NetworkInterfaceError          a network interface that a host lacks, or that does not reach the other hosts
"""

from collections.abc import Sequence


class DDPExtError(RuntimeError):
    """Base of every error this package raises after construction."""


class UnsupportedFeatureError(DDPExtError):
    """The Trainer asks for something that the strategy refuses because it could not be done right."""


class BatchSplitError(DDPExtError):
    """A batch has no unambiguous batch size, or holds an entry that cannot be cut.

    Args:
        problem: What is wrong.
        remedy: What to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem


class ActivationCheckpointingError(DDPExtError):
    """A policy finds no module whose forward pass could be recomputed, or a forward pass cannot be."""


class UnsynchronizedGradientsError(DDPExtError):
    """An optimizer is about to step with gradients that have not been synchronised: ranks would drift apart."""


class RanksOutOfStepError(DDPExtError):
    """Ranks synchronise the gradients of different batches or backward passes, or might after an error."""


class RankJoinedError(DDPExtError):
    """A step issues a collective that needs a rank which has run out of data."""


class UnevenInputsError(DDPExtError):
    """Ranks have different amounts of data where that is refused, or a loader has fewer batches than it announced."""


class LoggedKeysError(DDPExtError):
    """Ranks log different keys with `sync_dist=True`, which would be added up with each other."""


class OtherRankError(DDPExtError):
    """Another rank has failed, is gone, gives no sign of life, or did not come in time; this one ends with it."""


class ReplicaMismatchError(DDPExtError):
    """Ranks were not set up alike, or their parameters, buffers or optimizer states differ."""


class CheckpointRefusedError(DDPExtError):
    """A checkpoint holds something whose loading would run code, or is no checkpoint.

    Args:
        problem: What is wrong.
        remedy: What to do about it.
        names: What loading it would import or call.
    """

    def __init__(self, problem: str, remedy: str, names: Sequence[str] = ()) -> None:
        super().__init__(f"{problem} {remedy}")
        self.problem = problem
        self.names = tuple(names)


class ClusterError(DDPExtError):
    """The processes that a cluster has started, or will start, are not those that the run needs."""


class BackendError(DDPExtError):
    """The communication backend is not part of this torch, or does not suit the devices or the launcher."""


class RendezvousError(DDPExtError):
    """The processes of a run did not find each other within the time limit, or disagree about the run."""


class NetworkInterfaceError(DDPExtError):
    """The chosen network interface does not exist on a host, or does not reach the other hosts."""
