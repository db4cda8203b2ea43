"""Byte-level language modelling on the source code of Python's standard library: model and data."""

import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext._lightning import LightningModule, MisconfigurationException, OptimizerLRScheduler
from lightning_ddp_ext.demo import DemoData, check_options, cosine_adamw

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
    """A decoder-only transformer over bytes, for sequences of up to `block_size` bytes."""

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, block_size: int = 1024, learning_rate: float = 2e-3
    ) -> None:
        super().__init__()
        check_options(width=width, depth=depth, heads=heads, block_size=block_size, learning_rate=learning_rate)
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

    def setup(self, stage: str) -> None:
        """Refuse data whose sequences are longer than the position embedding."""
        longest = getattr(getattr(self.trainer, "datamodule", None), "block_size", 0)
        if longest > self.position_embedding.num_embeddings:
            raise MisconfigurationException(
                f"`block_size={self.position_embedding.num_embeddings}` of the model is below `block_size={longest}` of"
                " the data. Leave `model.block_size` out."
            )

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
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the loss on test text."""
        self._evaluate(batch, "test")

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        loss = self._loss(batch)
        self.log(f"{stage}_loss", loss, prog_bar=stage == "val", sync_dist=True)
        self.log(f"{stage}_bits_per_byte", loss / math.log(2), sync_dist=True)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["inputs"])
        return functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW with a cosine learning rate."""
        return cosine_adamw(self, self.learning_rate)


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


class _StdlibData(DemoData):
    """Modules of the standard library in a random order, with windows of text for validation and testing."""

    def __init__(self, batch_size: int, block_size: int, seed: int) -> None:
        super().__init__(batch_size, seed)
        check_options(block_size=block_size)
        self.block_size = block_size

    def shuffled_files(self) -> list[Path]:
        """List the source files in the order of the seed."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(self.seed)).tolist()
        return [files[index] for index in order]


class StdlibText(_StdlibData):
    """The first `max_bytes` of the standard library: 90 % for training, 5 % each for validation and testing."""

    def __init__(self, batch_size: int = 16, block_size: int = 128, max_bytes: int = 2_000_000, seed: int = 1) -> None:
        super().__init__(batch_size, block_size, seed)
        check_options(max_bytes=max_bytes)
        self.max_bytes = max_bytes

    def setup(self, stage: str) -> None:
        """Read the source files and cut them into windows."""
        text = _read(self.shuffled_files())[: self.max_bytes]
        parts = text.tensor_split([int(0.9 * len(text)), int(0.95 * len(text))])
        self.train_data, self.val_data, self.test_data = (ByteWindows(part, self.block_size) for part in parts)
        if min(map(len, parts)) <= self.block_size:
            raise MisconfigurationException(
                f"`max_bytes={self.max_bytes}` is too little text: a twentieth of it is for testing, and has no window"
                f" of `block_size={self.block_size}`. Set a larger `data.max_bytes`."
            )

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the shuffled training batches."""
        return DataLoader(self.train_data, self.batch_size, shuffle=True)


_NO_TARGET = -100  # ignored by torch's cross-entropy


class Paragraphs(IterableDataset[Tensor]):
    """A stream of the paragraphs of text files, in pieces of 2 to `block_size` + 1 bytes."""

    def __init__(self, files: Sequence[Path], block_size: int) -> None:
        self.files = files
        self.block_size = block_size

    def __iter__(self) -> Iterator[Tensor]:
        """Read one file after the other."""
        for file in self.files:
            for paragraph in file.read_bytes().split(b"\n\n"):
                text = torch.frombuffer(bytearray(paragraph + b"\n"), dtype=torch.uint8).long()
                yield from (piece for piece in torch.split(text, self.block_size + 1) if len(piece) > 1)


def pad(pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """Collate pieces of different lengths into a batch whose padding has no targets."""
    return {
        "inputs": pad_sequence([piece[:-1] for piece in pieces], batch_first=True),
        "targets": pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=_NO_TARGET),
    }


class StdlibStream(_StdlibData):
    """The standard library as streams: each rank trains on different files, and has another number of batches."""

    def __init__(self, batch_size: int = 8, block_size: int = 128, files: int = 10, seed: int = 1) -> None:
        super().__init__(batch_size, block_size, seed)
        check_options(files=files)
        self.files = files

    def setup(self, stage: str) -> None:
        """Choose two files for validation, two for testing, and the others for training."""
        files = self.shuffled_files()
        self.val_data, self.test_data = (ByteWindows(_read(two), self.block_size) for two in (files[:2], files[2:4]))
        self.train_files = files[4 : 4 + self.files]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the stream of this rank."""
        rank, world_size = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        stream = Paragraphs(self.train_files[rank::world_size], self.block_size)
        return DataLoader(stream, self.batch_size, collate_fn=pad)


def _read(files: Sequence[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
