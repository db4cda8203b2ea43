"""Streams of text: each process reads files of its own, as long as there are any."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.demo.byte_text import ByteWindows
from lightning_ddp_ext.demo.limits import check_seed, check_sizes

_NO_TARGET = -100  # what torch's cross-entropy leaves out


def count_tokens(batch: dict[str, Tensor]) -> int:
    """Count the bytes of a batch that are to be predicted, those of the padding left out: for `weight_by`."""
    return int((batch["targets"] != _NO_TARGET).sum())


class Paragraphs(IterableDataset[Tensor]):
    """The paragraphs of text files, as bytes; nobody knows how many there are before they have been read.

    Args:
        files: What to read.
        block_size: Bytes after which a paragraph is cut.
    """

    def __init__(self, files: Sequence[Path], block_size: int) -> None:
        self.files = files
        self.block_size = block_size

    def __iter__(self) -> Iterator[Tensor]:
        """Yield pieces of 2 to `block_size` + 1 bytes."""
        for file in self.files:
            for paragraph in file.read_bytes().split(b"\n\n"):
                text = torch.frombuffer(bytearray(paragraph + b"\n"), dtype=torch.uint8).long()
                yield from (piece for piece in torch.split(text, self.block_size + 1) if len(piece) > 1)


def pad(pieces: Sequence[Tensor]) -> dict[str, Tensor]:
    """Make a batch of pieces of different lengths; the padding has nothing to predict."""
    return {
        "inputs": pad_sequence([piece[:-1] for piece in pieces], batch_first=True),
        "targets": pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=_NO_TARGET),
    }


class StdlibStream(LightningDataModule):
    """Modules of the standard library as streams: each process trains on files of its own.

    Files are dealt out to the processes in turn. They differ in size, so that processes have different numbers of
    batches, and batches have different numbers of bytes.

    Args:
        batch_size: Paragraphs per batch of a process.
        block_size: Bytes after which a paragraph is cut.
        files: How many files to train on; two more are for validation, and two for testing.
        seed: Seed of the choice of files.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(self, batch_size: int = 8, block_size: int = 128, files: int = 10, seed: int = 1) -> None:
        super().__init__()
        check_sizes(batch_size=batch_size, block_size=block_size, files=files)
        check_seed(seed)
        self.batch_size = batch_size
        self.block_size = block_size
        self.files = files
        self.seed = seed

    def setup(self, stage: str) -> None:
        """Choose files."""
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        order = torch.randperm(len(files), generator=torch.Generator().manual_seed(self.seed)).tolist()
        chosen = [files[index] for index in order]
        self.val_data, self.test_data = (ByteWindows(_read(two), self.block_size) for two in (chosen[:2], chosen[2:4]))
        self.train_files = chosen[4 : 4 + self.files]

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Return the stream of this process."""
        trainer = self.trainer
        rank, world_size = (0, 1) if trainer is None else (trainer.global_rank, trainer.world_size)
        stream = Paragraphs(self.train_files[rank::world_size], self.block_size)
        return DataLoader(stream, self.batch_size, collate_fn=pad)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the validation batches."""
        return DataLoader(self.val_data, self.batch_size)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the test batches."""
        return DataLoader(self.test_data, self.batch_size)

    def concatenate_batches(self, batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Make one batch of several, padded to the longest of all pieces."""
        fillings = {"inputs": 0, "targets": _NO_TARGET}
        return {
            name: pad_sequence([row for batch in batches for row in batch[name]], True, filling)
            for name, filling in fillings.items()
        }


def _read(files: Sequence[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
