"""Fine-tune a causal language model with LoRA on two ranks: a mean over all tokens, whatever the padding.

Run it with `python examples/finetune_language_model.py`; it needs `transformers` and `peft`, and downloads nothing.
Each byte of a text is a token. A batch holds as many texts as fit in 400 tokens, so ranks have different numbers of
texts, tokens and batches. With `weight_by="tokens"`, the gradient is that of one process on the texts of both ranks,
padded or packed. The last line weighs batches by their texts instead, for comparison.
"""

import inspect
import itertools
import json
import textwrap
from collections.abc import Callable, Sequence

import lightning.pytorch as pl
import peft
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPJoinStrategy, TokenBudgetBatchSampler

IGNORED = -100
TextBatch = dict[str, Tensor]


def texts() -> list[Tensor]:
    """Return the lines of two modules of Python as bytes."""
    lines = "\n".join(inspect.getsource(module) for module in (json, textwrap)).splitlines()
    return [torch.tensor(list(line.encode()[:120])) for line in lines if len(line) > 1]


def pad(rows: Sequence[Tensor]) -> TextBatch:
    """Collate texts into rows with padding, which has no labels."""
    labels = pad_sequence(list(rows), batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp(min=0), "labels": labels, "attention_mask": (labels != IGNORED).long()}


def pack(rows: Sequence[Tensor]) -> TextBatch:
    """Collate texts into one row without padding; the first token of a text has no label."""
    labels = [torch.cat([row.new_tensor([IGNORED]), row[1:]]) for row in rows]
    positions = [torch.arange(len(row)) for row in rows]
    named = {"input_ids": list(rows), "labels": labels, "position_ids": positions}
    return {name: torch.cat(parts)[None] for name, parts in named.items()}


class Finetuning(pl.LightningModule):
    """GPT-2 from a configuration, with LoRA and gradient checkpointing; independent of the strategy."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=120, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        base = transformers.GPT2LMHeadModel(config)
        base.gradient_checkpointing_enable()
        lora = peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)
        self.model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False)

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Compute the mean over the tokens that have one before them."""
        batch = dict(batch)
        labels = batch.pop("labels")
        logits = self.model(**batch, use_cache=False).logits  # HuggingFace's loss is the same, in 32 bits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for the LoRA weights."""
        return torch.optim.AdamW((weight for weight in self.parameters() if weight.requires_grad), lr=1e-2)


def train(
    strategy: DDPJoinStrategy | str, devices: int, collate: Callable[[Sequence[Tensor]], TextBatch] = pad
) -> tuple[Tensor, pl.Trainer]:
    """Train for an epoch from the same start; return the LoRA weights as one vector, and the Trainer."""
    pl.seed_everything(0, verbose=False)
    module, data = Finetuning(), texts()
    batches: TokenBudgetBatchSampler | list[list[int]]
    batches = TokenBudgetBatchSampler([len(text) for text in data], max_tokens=400)
    if devices == 1:  # the batches of both ranks as one
        of_both = list(batches)
        batches = [[*itertools.chain(*of_both[step : step + 2])] for step in range(0, len(of_both), 2)]
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, precision="64-true", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_sampler=batches, collate_fn=collate))  # type: ignore[arg-type]
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    return nn.utils.parameters_to_vector(trained).detach(), trainer


def main() -> None:
    """Train on two ranks; Lightning runs this file again for the second rank."""
    torch.set_num_threads(1)
    by_tokens, trainer = train(DDPJoinStrategy(weight_by="tokens"), devices=2)
    packed, _ = train(DDPJoinStrategy(weight_by="tokens"), devices=2, collate=pack)
    by_texts, _ = train(DDPJoinStrategy(weight_by="samples"), devices=2)
    by_rank = [torch.empty_like(by_tokens) for _ in range(2)]
    dist.all_gather(by_rank, by_tokens)
    dist.destroy_process_group()
    if not trainer.is_global_zero:
        return
    alone, alone_trainer = train("auto", devices=1)
    for name, run in (("one process", alone_trainer), ("two ranks", trainer)):
        print(f"{name}: loss {float(run.callback_metrics['loss']):.6f} after {run.global_step} steps")
    between_ranks = float((by_rank[0] - by_rank[1]).abs().max())
    to_one_process, with_packing, control = (float((run - alone).abs().max()) for run in (by_tokens, packed, by_texts))
    print(f"largest difference of a weight: between the ranks {between_ranks}, to one process {to_one_process:.1e}")
    print(f"with packed rows: to one process {with_packing:.1e}")
    print(f"if batches count their texts instead of their tokens: to one process {control:.1e}")
    if between_ranks != 0 or max(to_one_process, with_packing) > 1e-9 or control < 1e-4:
        raise SystemExit("the runs do not compare as they should")


if __name__ == "__main__":
    main()
