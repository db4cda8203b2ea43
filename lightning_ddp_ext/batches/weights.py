"""Weights of batches and of their parts, for combining losses, gradients and logged values, and counters of samples."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_ddp_ext._validation import as_number
from lightning_ddp_ext.errors import WarnOnce

Labels = str | int | Callable[[Any], Tensor | Sequence[Tensor]]

_IGNORED = -100  # by default, in torch's losses
_OF_DECODERS = ("decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")  # of encoder-decoder models


@dataclass
class TokenCount:
    """Weight of a batch whose loss is a mean over tokens: the number of labels that the loss does not ignore.

    `weight_by="tokens"` means `TokenCount()`.

    HuggingFace's causal language models get their inputs as labels, and predict the next token: the loss leaves out the
    first label of each row. This is assumed if all labels that are not ignored are equal to `input_ids`. The strategy
    says once what it has found.

    If the batch is on an accelerator, the host waits once per batch for the number of tokens.

    Args:
        labels: The key, attribute or index of the labels in a batch, or a function that returns them: one tensor of
            integers, or a sequence of tensors.
        ignore_index: The label that the loss ignores.
        shift: Whether the loss leaves out the first label of each row, along the last dimension; None to find out.

    Raises:
        ValueError: In training, if a batch has no such labels, or only some batches have labels equal to `input_ids`.

    Examples:
        >>> import torch
        >>> labels = torch.tensor([[5, 6, 7, -100], [5, 6, -100, -100]])
        >>> TokenCount()({"labels": labels})
        5.0
        >>> TokenCount()({"labels": labels, "input_ids": labels.clamp(min=0)})
        3.0
    """

    labels: Labels = "labels"
    ignore_index: int = _IGNORED
    shift: bool | None = None
    _is_shifted: bool | None = field(default=None, init=False, repr=False, compare=False)  # as the batches have shown

    def __call__(self, batch: Any) -> float:
        """Return the number of labels of a batch that count."""
        labels = _find_labels(batch, self.labels, type(self).__name__)
        is_causal = len(labels) == 1 and all(_entry(batch, name) is None for name in _OF_DECODERS)
        inputs = _entry(batch, "input_ids") if is_causal else None
        is_comparable = isinstance(inputs, Tensor) and inputs.shape == labels[0].shape
        numbers = [self._count(part, inputs if is_comparable else None) for part in labels]
        every, later, differing = map(int, torch.stack(numbers).sum(dim=0).tolist())  # the host waits here
        if not every:
            return 0.0
        return float(later if self._find_shift(is_shifted=not differing) else every)

    @property
    def finding(self) -> str | None:
        """A description of the weights, or None before the first batch."""
        shift = self._is_shifted if self.shift is None else self.shift
        if shift is None:
            return None
        labels = f"`{self.labels}`" if isinstance(self.labels, str | int) else "labels"
        first = " and the first of each row, as the loss of a causal language model" if shift else ""
        if shift and self.shift is None:
            first += "; if the model is none, pass `TokenCount(shift=False)`"
        return f"The weight of a batch is its number of {labels} without {self.ignore_index}{first}"

    def _count(self, labels: Tensor, inputs: Tensor | None) -> Tensor:
        """Return the numbers of labels that count: all, all but the first of each row, all that differ from inputs."""
        counted = labels != self.ignore_index
        later = counted[..., 1:] if counted.dim() else counted
        differing = counted if inputs is None else counted & (inputs != labels)
        return torch.stack([counted.sum(), later.sum(), differing.sum()])

    def _find_shift(self, is_shifted: bool) -> bool:
        if self.shift is not None:
            return self.shift
        if self._is_shifted and not is_shifted:
            raise ValueError(
                "`weight_by` counts tokens: in earlier batches, all labels were equal to `input_ids`, as for a"
                " causal language model, and in this batch they are not. Pass `TokenCount(shift=True)` if the loss"
                " leaves out the first label of each row, else `TokenCount(shift=False)`."
            )
        if self._is_shifted is None:
            self._is_shifted = is_shifted
        return self._is_shifted


@dataclass
class ClassWeights:
    """Weight of a batch whose loss is a mean with class weights: the sum of the class weights of its labels.

    `torch.nn.CrossEntropyLoss(weight=...)` and `NLLLoss(weight=...)` divide by this sum.

    The host waits for the sum once per batch, if the batch is on an accelerator.

    Args:
        weight: The class weights, of shape (classes,).
        labels: The key, attribute or index of the labels in a batch, or a function that returns them: one tensor of
            integers, or a sequence of tensors. By default the second entry of a pair.
        ignore_index: The label that the loss ignores.

    Raises:
        ValueError: If `weight` is not a vector; in training, if a batch has no such labels.

    Examples:
        >>> import torch
        >>> ClassWeights(torch.tensor([1.0, 3.0]))((torch.zeros(4, 8), torch.tensor([0, 1, 1, 0])))
        8.0
    """

    weight: Tensor
    labels: Labels = 1
    ignore_index: int = _IGNORED

    def __post_init__(self) -> None:
        if not isinstance(self.weight, Tensor) or self.weight.dim() != 1:
            shape = list(self.weight.shape) if isinstance(self.weight, Tensor) else type(self.weight).__name__
            raise ValueError(f"`weight` must be a tensor with one weight per class, got {shape}.")
        self.weight = self.weight.detach().cpu().double()  # not every device has float64

    def __call__(self, batch: Any) -> float:
        """Return the sum of the class weights of the labels of a batch."""
        total = 0.0
        for part in _find_labels(batch, self.labels, type(self).__name__):
            part = part.cpu()
            total += float(self.weight[part[part != self.ignore_index].long()].sum())
        return total


def _find_labels(batch: Any, labels: Labels, name: str) -> Sequence[Tensor]:
    found = labels(batch) if callable(labels) else _entry(batch, labels)
    parts = [found] if isinstance(found, Tensor) else found
    is_sequence = isinstance(parts, Sequence) and not isinstance(parts, str | bytes)
    if not is_sequence or not parts or not all(map(_are_labels, parts)):
        got = "None" if found is None else f"a {found.dtype} tensor" if isinstance(found, Tensor) else f"{type(found)}"
        where = "its function" if callable(labels) else f"{labels!r}"
        raise ValueError(
            f"`weight_by` counts labels, and {where} of a batch of type {type(batch).__name__} is {got}. Pass"
            f" `{name}(labels=...)` with the key, attribute or index of a tensor of integers, or with a function"
            " `batch -> labels`."
        )
    return parts


def _are_labels(part: object) -> bool:
    return isinstance(part, Tensor) and not part.is_floating_point() and not part.is_complex()


def _entry(batch: Any, name: str | int) -> Any:
    """Return an entry of a batch by its key, attribute or index; None if there is none."""
    if isinstance(name, int):
        return batch[name] if isinstance(batch, list | tuple) and -len(batch) <= name < len(batch) else None
    if isinstance(batch, Mapping):
        return batch.get(name)
    return getattr(batch, name, None)


_Name = Literal["samples", "tokens", "equal", "sum"]
_MEANINGS = {
    "samples": "a mean over samples",
    "tokens": "a mean over tokens",
    "equal": "a mean over parts of equal weight",
    "sum": "a sum",
}
WeightBy = _Name | Callable[[Any], float]


class WeightRule:
    """A checked `weight_by`: the weight of a batch or chunk, and whether losses are added up or averaged.

    `inform` is called once with a sentence on the weights, if a batch has to show what they are.
    """

    def __init__(self, weight_by: WeightBy, inform: Callable[[str], None]) -> None:
        names = get_args(_Name)
        if isinstance(weight_by, type):
            raise TypeError(
                f"`weight_by` is the class `{weight_by.__name__}`. Use an object: `{weight_by.__name__}()`."
            )
        if not callable(weight_by) and weight_by not in names:
            raise ValueError(
                f"`weight_by` must be one of {', '.join(map(repr, names))} or a callable `batch -> float`, got"
                f' {weight_by!r}. Use "samples" for a loss that is a mean over samples.'
            )
        self.is_sum = weight_by == "sum"  # losses are sums: gradients are added up, not averaged
        self.is_by_samples = weight_by == "samples"
        self.meaning = _MEANINGS[weight_by] if isinstance(weight_by, str) else "a mean over what `weight_by` counts"
        self.function = TokenCount() if weight_by == "tokens" else weight_by if callable(weight_by) else None
        self.of_any_batch = None if self.is_by_samples or self.function is not None else 1.0  # None if batches differ
        self._inform: Callable[[str], None] | None = inform
        self._warn = WarnOnce()

    def weigh(self, batch: Any, samples: float) -> float:
        """Return the weight of a batch or chunk with this number of samples."""
        if self.function is None:
            return self.of_any_batch or float(samples)
        given = self.function(batch)
        weight = as_number(given)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight_by` returned {given!r} for a batch. Return a finite number of at least 0, such as its number"
                " of samples or tokens."
            )
        if self._inform is not None and isinstance(self.function, TokenCount) and self.function.finding is not None:
            self._inform(f"{self.function.finding}.")
            self._inform = None
        return weight

    def normalize(self, weights: Sequence[float]) -> list[float]:
        """Return the factors of the parts' losses: the weights of sums, else divided by their total; all may be 0."""
        total = 1.0 if self.is_sum else sum(weights)
        return [weight / total if total else 0.0 for weight in weights]

    def warn_of_skip(self, part: str) -> None:
        """Warn, the first time only, that `training_step` has returned None on `part`, such as `"rank 1"`."""
        self._warn(
            f"`training_step` returned None on {part}, whose samples have no weight in the gradient of this step."
            " Ignore this if it is on purpose. Log with `sync_dist=True` before returning None, if at all."
        )


class SampleCounters:
    """Recognises numbers that each part of a batch has raised by its number of samples.

    With parts of one sample, a counter of samples looks like a counter of steps: earlier steps decide.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def recognise(self, key: Hashable, raised: Sequence[float], sizes: Sequence[float]) -> bool:
        """Return True if the number called `key` counts samples, given by how much each part has raised it."""
        if list(raised) != list(sizes) or (set(sizes) == {1} and key not in self._known):
            return False
        self._known.add(key)
        return True
