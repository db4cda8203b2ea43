"""Fine-tune a language model with a loop of Fabric on two ranks that have different amounts of text.

Run it with `python examples/fabric_loop.py`; it needs `transformers` and downloads nothing. The loop is the usual one:
gradient accumulation, clipping, a scheduler, evaluation and checkpoints. The lines with `ours` are the difference to
`Fabric(strategy="ddp")`, which would hang here, since rank 0 has more batches than rank 1. The last lines compare the
result with one process on the batches of both ranks, and with equal weights for all batches.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from lightning.fabric import Fabric, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_ddp_ext.fabric import DDPJoinStrategy  # ours

IGNORED = -100
ACCUMULATED = 2
TextBatch = dict[str, Tensor]


def batches(rank: int) -> list[list[Tensor]]:
    """Return batches of random texts: 12 on rank 0, and 7 with shorter texts on rank 1."""
    generator = torch.Generator().manual_seed(rank)

    def text() -> Tensor:
        length = int(torch.randint(4, 40 - 25 * rank, (), generator=generator))
        return torch.randint(1, 64, (length,), generator=generator)

    return [[text() for _ in range(4)] for _ in range(12 - 5 * rank)]


def pad(texts: Sequence[Tensor]) -> TextBatch:
    """Pad texts to one length; padding has no label."""
    labels = pad_sequence(list(texts), batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels != IGNORED).long()}


def token_loss(model: nn.Module, batch: TextBatch) -> Tensor:
    """Compute the mean over the tokens that have one before them."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def train(fabric: Fabric, data: list[list[Tensor]], accumulated: int, folder: Path) -> Tensor:
    """Train for two epochs, and return the parameters."""
    seed_everything(0, verbose=False)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer, 1.0, 0.1, total_iters=12)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=None, collate_fn=pad), use_distributed_sampler=False)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            is_accumulating = (number + 1) % accumulated != 0 and number + 1 != len(loader)
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = token_loss(model, batch)
                fabric.backward(loss / accumulated)
            if is_accumulating:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        fabric.print(f"epoch {epoch}: loss {fabric.all_reduce(loss.detach()):.4f} in the last step")
        fabric.save(folder / "last.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def on_ranks(weight_by: str, folder: Path) -> tuple[Fabric, Tensor]:
    """Train on two ranks; Fabric runs this file again for the second one."""
    strategy = DDPJoinStrategy(weight_by=weight_by)  # ours
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2, precision="64-true")
    fabric.launch()
    return fabric, train(fabric, batches(fabric.global_rank), ACCUMULATED, folder)


def main() -> None:
    """Compare two ranks with each other and with one process."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # Fabric converts the output of a module to it
    with tempfile.TemporaryDirectory() as folder:
        fabric, by_tokens = on_ranks("tokens", Path(folder))
        _, by_batches = on_ranks("equal", Path(folder))
        by_rank = fabric.all_gather(by_tokens)
        dist.destroy_process_group()
        if fabric.global_rank:
            return
        data = [batches(rank) for rank in range(2)]
        windows = [
            [batch for own in data for batch in own[first : first + ACCUMULATED]] for first in range(0, 12, ACCUMULATED)
        ]
        whole = [[text for batch in window for text in batch] for window in windows]
        alone = train(Fabric(accelerator="cpu", devices=1, precision="64-true"), whole, 1, Path(folder))
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    to_one_process = float((by_tokens - alone).abs().max())
    control = float((by_batches - alone).abs().max())
    print(f"largest difference of a parameter: between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    print(f"with equal weights for all batches: to one process {control:.1e}")
    if between_ranks != 0 or to_one_process > 1e-9 or control < 1e-4:
        raise SystemExit("the runs do not compare as they should")


if __name__ == "__main__":
    main()
