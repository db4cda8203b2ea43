"""Text as bytes: the source code of Python's standard library, and a small transformer that predicts the next byte."""

import math
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

_BYTES = 256


class _Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        output: Tensor = hidden + self.feed_forward(hidden)
        return output


class ByteTransformer(LightningModule):
    """A decoder-only transformer over bytes.

    Args:
        width: Model width.
        depth: Number of blocks.
        heads: Attention heads per block.
        block_size: Longest sequence, in bytes.
        learning_rate: First learning rate of AdamW; it falls to zero along a cosine.

    Raises:
        ValueError: If `width` is not divisible by `heads`.
    """

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, block_size: int = 1024, learning_rate: float = 2e-3
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"`width` must be divisible by `heads`, got {width} and {heads}. Use for example 128 and 4."
            )
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.byte_embedding = nn.Embedding(_BYTES, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Predict the next byte at each position of (batch, length); returns logits (batch, length, 256)."""
        positions = torch.arange(inputs.size(1), device=inputs.device)
        hidden = self.byte_embedding(inputs) + self.position_embedding(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy per byte, in nats."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss on validation text."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss on test text."""
        loss = self._loss(batch)
        self.log("test_loss", loss, sync_dist=True)
        self.log("test_bits_per_byte", loss / math.log(2), sync_dist=True)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["inputs"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW with a cosine learning rate."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a text, each with the next byte as target."""

    def __init__(self, text: Tensor, block_size: int) -> None:
        self.text = text
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block_size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.text[index * self.block_size : (index + 1) * self.block_size + 1].long()
        return {"inputs": window[:-1], "targets": window[1:]}


class StdlibText(LightningDataModule):
    """The top-level modules of the standard library: 90 % to train, 5 % each to validate and to test.

    Args:
        batch_size: Windows per batch, over all devices of a process.
        block_size: Bytes per window.
        max_bytes: How much of the source to read.
        seed: Seed of the order of files.

    Raises:
        ValueError: If `batch_size` or `block_size` is below 1.
    """

    def __init__(self, batch_size: int = 16, block_size: int = 128, max_bytes: int = 2_000_000, seed: int = 1) -> None:
        super().__init__()
        for name, value in {"batch_size": batch_size, "block_size": block_size}.items():
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}. Leave it out for the default.")
        self.batch_size = batch_size
        self.block_size = block_size
        self.max_bytes = max_bytes
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Read the source files and cut them into windows."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(self.seed)).tolist()
        source = b"".join(files[index].read_bytes() for index in order)[: self.max_bytes]
        text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        train, val, test = text.tensor_split([int(0.9 * len(text)), int(0.95 * len(text))])
        self.train_data = ByteWindows(train, self.block_size)
        self.val_data = ByteWindows(val, self.block_size)
        self.test_data = ByteWindows(test, self.block_size)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the shuffled training batches."""
        return DataLoader(self.train_data, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation batches."""
        return DataLoader(self.val_data, self.batch_size)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the test batches."""
        return DataLoader(self.test_data, self.batch_size)
