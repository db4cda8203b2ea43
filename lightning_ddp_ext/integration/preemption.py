"""Leaving training together when a process is told to end."""

from collections.abc import Callable

from lightning.pytorch import Trainer

from lightning_ddp_ext._compat.lightning import replace_sigterm_handling


class Departure:
    """Lets all ranks leave the training loop after the same batch, when any of them has received SIGTERM.

    The signal only sets a flag, which travels with the next gradient synchronisation. Lightning communicates inside the
    signal handler and before every batch instead; where a signal interrupts another collective, that hangs.

    Args:
        trainer: Whose loops are to end.
        forward_signal: Passes a signal on to the processes that this one has started.
    """

    def __init__(self, trainer: Trainer, forward_signal: Callable[[int], None]) -> None:
        self.wanted = False
        self._forward_signal = forward_signal
        self._set_received = replace_sigterm_handling(trainer, self._receive)

    def agree(self) -> None:
        """End training after this batch; to be called on every rank in the same step."""
        self._set_received()

    def _receive(self, signum: int) -> None:
        if not self.wanted:
            self.wanted = True
            self._forward_signal(signum)
