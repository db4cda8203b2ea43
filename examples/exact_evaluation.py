"""The test results of two ranks are equal to the results of one process, for any number of samples.

Run it with `python examples/exact_evaluation.py`. Lightning's `ddp` gives every rank equally many samples, and repeats
some if the number is odd; a metric cannot recognise these. `ddp_join` gives every sample to exactly one rank. Only the
name of the strategy differs.
"""

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

import lightning_ddp_ext  # noqa: F401  registers "ddp_join"

SIZES = [7, 20, 51]  # samples of the test data


class Detector(pl.LightningModule):
    """Classifies two kinds of points."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.auroc = BinaryAUROC()  # keeps lists of all scores, whose lengths differ between ranks

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the loss and the area under the ROC curve."""
        points, labels = batch
        logits = self.layer(points).squeeze(1)
        self.auroc.update(logits, labels)
        loss = functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        self.log("loss", loss, sync_dist=True)
        self.log("auroc", self.auroc)


def points(samples: int) -> TensorDataset:
    """Generate two kinds of points that overlap, in float64."""
    generator = torch.Generator().manual_seed(4)
    labels = torch.randint(2, (samples,), generator=generator)
    noise = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(noise + labels[:, None], labels)


def test(strategy: str, devices: int, samples: int) -> tuple[Tensor, pl.Trainer]:
    """Test in batches of 4; return the loss and the area under the curve."""
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.test(Detector(), DataLoader(points(samples), batch_size=4), verbose=False)
    return torch.stack([trainer.callback_metrics[key].double() for key in ("loss", "auroc")]), trainer


def main() -> None:
    """Test on two ranks; Lightning runs this file again for the second rank."""
    torch.set_num_threads(1)
    results = {(name, samples): test(name, 2, samples) for name in ("ddp_join", "ddp") for samples in SIZES}
    joined = torch.stack([results["ddp_join", samples][0] for samples in SIZES])
    by_rank = [torch.empty_like(joined) for _ in range(2)]
    dist.all_gather(by_rank, joined)
    dist.barrier()  # torch 2.6 may hang where a group is destroyed right after a collective on tensors
    dist.destroy_process_group()
    if not results["ddp", SIZES[0]][1].is_global_zero:
        return
    alone = torch.stack([test("auto", 1, samples)[0] for samples in SIZES])
    padded = torch.stack([results["ddp", samples][0] for samples in SIZES])
    print("samples, strategy:       loss      AUROC")
    for index, samples in enumerate(SIZES):
        for name, values in (("one process", alone), ("ddp_join", joined), ("ddp", padded)):
            print(f"{samples:7}, {name + ':':12} {values[index][0]:.8f} {values[index][1]:.8f}")
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    to_one_process = float((joined - alone).abs().max())
    print(f"largest difference of ddp_join: between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    control = float((padded - alone).abs().max())
    print(f"largest difference of ddp: to one process {control:.1e}")
    if between_ranks != 0 or to_one_process > 1e-9 or control < 1e-4:
        raise SystemExit("the runs do not compare as they should")


if __name__ == "__main__":
    main()
