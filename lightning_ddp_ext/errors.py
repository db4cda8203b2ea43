"""Errors raised once a run has been set up.

Wrong arguments raise `TypeError` or `ValueError` in the constructor; what can only be known later raises one of:

    DDPExtError (RuntimeError)
    |-- UnsupportedFeatureError        a Trainer feature or launch that the strategy cannot do right
    |-- ActivationCheckpointingError   a policy that finds no module, or a module that cannot be recomputed
    |-- BatchSplitError                a batch that cannot be cut into chunks, or whose size is ambiguous
    |-- RanksOutOfStepError            ranks that synchronise gradients a different number of times
    |-- UnsynchronizedGradientsError   an optimizer step with gradients that are this rank's own
    `-- NetworkInterfaceError          a network interface that this host does not have
    |-- UnsupportedFeatureError   a Trainer feature or launch that the strategy cannot do right
    |-- BatchSplitError           a batch that cannot be cut into chunks, or whose size is ambiguous
    |-- NetworkInterfaceError     a network interface that this host does not have
    `-- ReplicaMismatchError      ranks that were not set up alike, or are no replicas of each other any more
"""


class DDPExtError(RuntimeError):
    """Base of every error this package raises after construction."""


class UnsupportedFeatureError(DDPExtError):
    """The Trainer asks for something that the strategy refuses because it could not be done right."""


class ActivationCheckpointingError(DDPExtError):
    """A policy finds no module whose forward pass could be recomputed, or a forward pass cannot be."""


class BatchSplitError(DDPExtError):
    """A batch has no unambiguous batch size, or holds an entry that cannot be cut.

    Args:
        problem: What is wrong.
        remedy: What to do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem


class RanksOutOfStepError(DDPExtError):
    """Ranks have synchronised their gradients a different number of times."""


class UnsynchronizedGradientsError(DDPExtError):
    """An optimizer is about to step with gradients that have not been synchronised: ranks would drift apart."""


class NetworkInterfaceError(DDPExtError):
    """The chosen network interface does not exist on this host."""


class ReplicaMismatchError(DDPExtError):
    """Ranks were not set up alike, or their parameters, buffers or optimizer states differ."""
