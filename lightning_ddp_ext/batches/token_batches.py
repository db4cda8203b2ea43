"""Batches of sequences with a limit on their tokens instead of their number."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler


class TokenBudgetBatchSampler(Sampler[list[int]]):
    """Puts sequences of similar length into batches of at most `max_tokens` tokens, and deals batches out to ranks.

    Each sequence is in exactly one batch of one rank per epoch: nothing is dropped or repeated, so that some ranks may
    have one batch less than others. Pass it as `DataLoader(dataset, batch_sampler=...)` and train with
    `strategy="ddp_join"` and `weight_by="tokens"`: the gradient equals the one of a single process on all batches.

    Sequences are sorted by length and cut into batches. In each epoch, sequences of equal length change places and the
    batches are in a new order, the same on all ranks. The number of batches is the same in every epoch. The number of
    ranks is read from `torch.distributed` when an epoch begins; it is 1 if `torch.distributed` is not initialised.

    Args:
        lengths: The number of tokens of each sequence of the dataset.
        max_tokens: Most tokens of a batch.
        is_padded: Whether rows are padded to the longest, and `max_tokens` includes the padding; False for packing.
        shuffle: Whether to change the order in each epoch.
        seed: Seed of the order, the same on all ranks.

    Raises:
        ValueError: If there is no sequence, a length is not positive, or a sequence has more than `max_tokens` tokens.

    Examples:
        >>> sampler = TokenBudgetBatchSampler([5, 1, 2, 5], max_tokens=8, shuffle=False)
        >>> list(sampler)
        [[1, 2], [0], [3]]
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        max_tokens: int,
        is_padded: bool = True,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if self._lengths.dim() != 1 or not len(self._lengths):
            raise ValueError(
                f"`lengths` must be a sequence of numbers of tokens, got the shape {[*self._lengths.shape]}."
            )
        shortest, longest = int(self._lengths.argmin()), int(self._lengths.argmax())
        if self._lengths[shortest] < 1:
            raise ValueError(
                f"`lengths` must be at least 1, got {int(self._lengths[shortest])} for sequence {shortest}. Leave the"
                " sequence out."
            )
        if self._lengths[longest] > max_tokens:
            raise ValueError(
                f"`max_tokens` is {max_tokens}, and sequence {longest} has {int(self._lengths[longest])} tokens. Raise"
                " `max_tokens`, or shorten the sequence."
            )
        self._sizes = _cut(sorted(self._lengths.tolist()), max_tokens, is_padded)
        self._shuffle = shuffle
        # Trainers set the epoch of a batch sampler's sampler, and leave loaders with a distributed sampler as they are.
        indices: Any = range(len(self._lengths))
        self.sampler: DistributedSampler[int] = DistributedSampler(indices, 1, 0, shuffle, seed)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator()
        generator.manual_seed(self.sampler.seed + self.sampler.epoch)
        mixed = torch.arange(len(self._lengths))
        if self._shuffle:
            mixed = torch.randperm(len(self._lengths), generator=generator)
        batches = torch.split(mixed[self._lengths[mixed].argsort(stable=True)], self._sizes)
        order = torch.randperm(len(batches), generator=generator).tolist() if self._shuffle else range(len(batches))
        rank, world_size = _rank_and_world_size()
        return (batches[place].tolist() for place in order[rank::world_size])

    def __len__(self) -> int:
        rank, world_size = _rank_and_world_size()
        return len(range(rank, len(self._sizes), world_size))


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _cut(lengths: Sequence[int], max_tokens: int, is_padded: bool) -> list[int]:
    """Return the sizes of the batches into which sequences in ascending order of length are cut."""
    sizes, size, tokens = [], 0, 0
    for length in lengths:
        tokens = length * (size + 1) if is_padded else tokens + length
        if tokens > max_tokens:
            sizes.append(size)
            size, tokens = 0, length
        size += 1
    return [*sizes, size]
