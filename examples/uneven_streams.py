"""Two ranks read streams of different length, in batches with different numbers of tokens: exact, and nothing hangs.

Run it with `python examples/uneven_streams.py`. The length of a stream is unknown before its end. Rank 0 has 9 batches
per epoch and then makes shadow steps, with the same gradient as rank 1. The weight of a batch is its number of tokens.
With Lightning's `ddp`, rank 0 would continue with the next epoch while rank 1 is still in this one. The last line
weights by samples instead of tokens, for comparison.
"""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.callbacks import JoinReport

BATCHES = [9, 23]  # of each rank's stream
LONGEST = 20  # tokens of a sequence

Batch = tuple[Tensor, Tensor, Tensor]  # inputs, targets and the mask of tokens without padding


def batches(rank: int) -> Iterator[Batch]:
    """Read a rank's stream: batches of 4 sequences of different lengths, in float64."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(BATCHES[rank]):
        inputs = torch.randn(4, LONGEST, 3, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, LONGEST + 1, (4, 1), generator=generator)
        yield inputs, inputs.sin().cumsum(1).sum(2), torch.arange(LONGEST) < lengths


class Stream(IterableDataset[Batch]):
    """The streams of the given ranks, concatenated batch by batch."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the longest stream has ended."""
        for of_ranks in zip_longest(*map(batches, self.ranks)):
            given = [batch for batch in of_ranks if batch is not None]
            inputs, targets, is_token = (torch.cat(part) for part in zip(*given, strict=True))
            yield inputs, targets, is_token


class Tagger(pl.LightningModule):
    """Predicts a number for each token; independent of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 16, batch_first=True)
        self.head = nn.Linear(16, 1)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return this rank's stream."""
        alone = self.trainer.world_size == 1
        return DataLoader(Stream(range(len(BATCHES)) if alone else [self.trainer.global_rank]), batch_size=None)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the mean over tokens."""
        inputs, targets, is_token = batch
        predictions = self.head(self.recurrent(inputs)[0]).squeeze(2)
        loss: Tensor = (predictions - targets)[is_token].square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=count_tokens(batch))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam, whose state would go stale on a rank that stops."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def count_tokens(batch: Batch) -> int:
    """Return the number of tokens without padding."""
    return int(batch[2].sum())


def train(strategy: DDPJoinStrategy | str, devices: int) -> tuple[Tensor, pl.Trainer, JoinReport]:
    """Train for three epochs from the same start; return all parameters as one vector, the Trainer and its report."""
    pl.seed_everything(0, verbose=False)
    module, report = Tagger(), JoinReport(table=False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=3, callbacks=[report],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return nn.utils.parameters_to_vector(module.parameters()).detach(), trainer, report


def main() -> None:
    """Train on two ranks; Lightning runs this file again for the second rank."""
    torch.set_num_threads(1)
    by_tokens, trainer, report = train(DDPJoinStrategy(weight_by=count_tokens), devices=2)
    by_samples, _, _ = train(DDPJoinStrategy(weight_by="samples"), devices=2)
    by_rank = [torch.empty_like(by_tokens) for _ in range(2)]
    dist.all_gather(by_rank, by_tokens)
    dist.barrier()  # torch 2.6 may hang where a group is destroyed right after a collective on tensors
    dist.destroy_process_group()
    if not trainer.is_global_zero:
        return
    alone, alone_trainer, _ = train("auto", devices=1)
    for record in report.records[-2:]:
        print(f"rank {record.rank}: {record.batches} batches, then {record.shadow_steps} shadow steps in an epoch")
    for name, run in (("one process", alone_trainer), ("two ranks", trainer)):
        print(f"{name}: loss {float(run.callback_metrics['loss']):.6f} after {run.global_step} steps")
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    to_one_process = float((by_tokens - alone).abs().max())
    print(f"largest difference of a parameter: between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    control = float((by_samples - alone).abs().max())
    print(f"if batches count their samples instead of their tokens: to one process {control:.1e}")
    if between_ranks != 0 or to_one_process > 1e-9 or control < 1e-4:
        raise SystemExit("the runs do not compare as they should")


if __name__ == "__main__":
    main()
