"""Orders to train two ranks that may have different amounts of data.

The first rank has the most data and tells the time.
"""

import gc
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_ext  # noqa: F401  registers our strategies
from measuring.fitting import Classifier, StepTimes, check_ranks, make_trainer
from measuring.models import CASES, load
from measuring.orders import WARM_UP, Orders

RANKS = 2
EVEN, UNEVEN, TAIL = "even", "uneven", "tail"
JOIN, ACCELERATE = "torch's Join", "Accelerate"

_BEFORE = 1 + WARM_UP  # steps that are not counted
_BATCHES_OF_OTHERS: dict[str, Callable[[int], int]] = {
    EVEN: lambda steps: _BEFORE + steps,
    UNEVEN: lambda steps: _BEFORE + steps // 2,
    TAIL: lambda steps: 1,
}


class Talkative(Classifier):
    """Its steps issue collectives: a value is logged and synchronised, and one is gathered."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss of a batch."""
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, sync_dist=True)
        self.all_gather(loss.detach())
        return loss


def train(
    orders: Orders,
    *,
    case: str,
    steps: int,
    way: str,
    amounts: str = EVEN,
    ranks: int = RANKS,
    is_sized: bool = True,
    is_talkative: bool = False,
) -> None:
    """Train an epoch and report the times of the first rank's steps, which has a batch in each.

    `way` is the Trainer's `strategy`, or `JOIN` or `ACCELERATE` for a plain loop. The second rank has as much data as
    the first one, half of it, or one batch, so that all steps that count are in the uneven phase.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, chosen = int(os.environ["LOCAL_RANK"]), CASES[case]
    network = chosen.build()
    torch.manual_seed(1 + rank)
    length = _BATCHES_OF_OTHERS[amounts if rank else EVEN](steps)
    loader = load(length, chosen.batch_size // RANKS, chosen.shape, is_sized)
    times = StepTimes()
    gc.collect()  # otherwise this training clears away the one before
    if way in _PREPARATIONS:
        _train_plainly(network, loader, times, _PREPARATIONS[way])
    else:
        module = (Talkative if is_talkative else Classifier)(network)
        # Batches are those of this rank already.
        trainer = make_trainer(way, times, devices=ranks, max_epochs=1, use_distributed_sampler=False)
        trainer.fit(module, loader)
        if ranks > 1:
            check_ranks(module, len(times.ends))
    orders.reply(times.counted)


def _train_plainly(
    network: nn.Module, loader: Any, times: StepTimes, prepare: Callable[[nn.Module, ExitStack], nn.Module]
) -> None:
    """Train an epoch in a loop without a Trainer."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    with ExitStack() as joining:
        model = prepare(network, joining)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for inputs, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            times.end_step()


def _prepare_join(network: nn.Module, joining: ExitStack) -> nn.Module:
    model = DistributedDataParallel(network)
    joining.enter_context(Join([model]))
    return model


def _prepare_accelerate(network: nn.Module, joining: ExitStack) -> nn.Module:
    from accelerate import Accelerator

    os.environ["RANK"] = os.environ["LOCAL_RANK"]  # all processes are on this host
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)  # Accelerate may have set another number
    model: Any = accelerator.prepare(network)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns where it would do nothing, and ranks would wait for each other
        joining.enter_context(accelerator.join_uneven_inputs([model], even_batches=False))
    return model


_PREPARATIONS = {JOIN: _prepare_join, ACCELERATE: _prepare_accelerate}
