"""Worker processes of loaders that outlive a signal to the processes of a run."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

_SEEDS_WORKERS = "PL_SEED_WORKERS"  # what `seed_everything(workers=True)` leaves for Lightning


@dataclass(frozen=True)
class _Shielded:
    """Initialises a worker, in a process group of its own.

    torchrun, `timeout` and some schedulers signal whole groups. A worker that ends of that takes its rank along before
    the rank has saved. The rank itself can still end it.
    """

    initialize: Callable[[int], object] | None
    requeue_signal: signal.Signals

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        signal.signal(self.requeue_signal, signal.SIG_IGN)
        if self.initialize is not None:
            self.initialize(worker_id)


def shield_workers(loader: object, rank: int, requeue_signal: signal.Signals) -> None:
    """Let the workers of a loader go on when the processes of a run are told to end, until their rank ends them.

    Args:
        loader: What Lightning is about to use; nothing is done if it has no workers.
        rank: This rank, for the seeds that Lightning gives workers that have no `worker_init_fn`.
        requeue_signal: The signal after which a job is requeued.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers or isinstance(loader.worker_init_fn, _Shielded):
        return
    initialize = loader.worker_init_fn
    if initialize is None and int(os.environ.get(_SEEDS_WORKERS, 0)):
        initialize = partial(pl_worker_init_function, rank=rank)
    loader.worker_init_fn = _Shielded(initialize, requeue_signal)
