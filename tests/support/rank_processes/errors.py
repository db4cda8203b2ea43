"""What `run_processes` raises once processes have been started.

RuntimeError
├── RankError           a rank raised, left with a non-zero code, was killed, or returned what cannot be pickled
└── RankTimeoutError    the hard limit passed before every rank had finished
"""


class RankError(RuntimeError):
    """A rank failed; the message starts with the first failure and then describes every rank."""


class RankTimeoutError(RuntimeError):
    """The hard limit passed; the message shows the last lines and the Python stack of every rank."""
