"""Errors raised once a run has been set up.

Wrong arguments raise `TypeError` or `ValueError` in the constructor; what can only be known later raises one of:

    DDPExtError (RuntimeError)
    |-- UnsupportedFeatureError   a Trainer feature or launch that the strategy cannot do right
    |-- BatchSplitError           a batch that cannot be cut into chunks, or whose size is ambiguous
    |-- NetworkInterfaceError     a network interface that this host does not have
    `-- ReplicaMismatchError      ranks that were not set up alike, or are no replicas of each other any more
"""


class DDPExtError(RuntimeError):
    """Base of every error this package raises after construction."""


class UnsupportedFeatureError(DDPExtError):
    """The Trainer asks for something that the strategy refuses because it could not be done right."""


class BatchSplitError(DDPExtError):
    """A batch has no unambiguous batch size, or holds an entry that cannot be cut."""


class NetworkInterfaceError(DDPExtError):
    """The chosen network interface does not exist on this host."""


class ReplicaMismatchError(DDPExtError):
    """Ranks were not set up alike, or their parameters, buffers or optimizer states differ."""
