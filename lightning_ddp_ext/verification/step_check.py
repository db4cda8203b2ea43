"""Whether the gradient of a batch follows from the gradients of its parts, and if not, at which line."""

import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import STRUCTURE
from lightning_ddp_ext._lightning import LambdaCallback, LightningModule, Trainer, is_overridden
from lightning_ddp_ext.batches.label_counts import TokenCount
from lightning_ddp_ext.batches.weights import WeightBy
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.verification.operations import Line, Recording, is_own_file
from lightning_ddp_ext.verification.relations import (
    FINER,
    Culprit,
    Differences,
    Weights,
    fit_weights,
    relative_difference,
)
from lightning_ddp_ext.verification.replay import BatchReplay, Gradients, ReplayedStep, find_batch_norms
from lightning_ddp_ext.verification.report import Check, join_names
from lightning_ddp_ext.verification.runs import Stopped, quiet_trainer
from lightning_ddp_ext.verification.samples import Samples

NAME = "gradient of a batch"
_LEAST = 1e-6  # relative difference of gradients that is reported
_LEAST_SEEDS, _MOST_SEEDS = 3, 50
_MISSING = object()


class GradientFit:
    """Compares weighted sums of the gradients of the parts with the gradient of the whole batch."""

    def __init__(self, whole: Gradients, parts: Sequence[Gradients]) -> None:
        self._names, self._numbers = [name for name, _ in whole], [len(one) for _, one in whole]
        self._whole = torch.cat([one for _, one in whole])
        self._parts = torch.stack([torch.cat([one for _, one in part]) for part in parts], dim=1)

    @cached_property
    def fitted(self) -> Weights | None:
        """The weights with the least difference; None if they are not unique, or fit any gradient."""
        used = int(((self._parts != 0).any(1) | (self._whole != 0)).sum())
        is_finite = self._parts.isfinite().all() and self._whole.isfinite().all()
        return fit_weights(self._parts, self._whole) if used > self._parts.shape[1] and is_finite else None

    def difference(self, weights: Sequence[float]) -> float:
        """Return the norm of the difference between weighted parts and whole, relative to the norm of the whole."""
        return relative_difference(self._sum(weights), self._whole)

    def worst(self, weights: Sequence[float]) -> tuple[str, float]:
        """Return the parameter with the largest part of the difference, and its relative difference."""
        pairs = zip(*(torch.split(vector, self._numbers) for vector in (self._sum(weights), self._whole)), strict=True)
        by_name = dict(zip(self._names, pairs, strict=True))
        name = max(by_name, key=lambda name: float((by_name[name][0] - by_name[name][1]).norm()))
        return name, relative_difference(*by_name[name])

    def _sum(self, weights: Sequence[float]) -> Tensor:
        return self._parts @ torch.tensor(weights, dtype=torch.float64)


@dataclass(slots=True)
class FirstStep:
    """The first training step, as its parts show it."""

    weight_by: WeightBy | None  # of a strategy that has the gradient of one process; None if there is none
    tolerance: float  # largest relative difference that rounding explains
    draws: str  # what draws random numbers that the parts and ranks cannot repeat; empty if nothing does
    states: list[tuple[str, Line | None]]  # attributes that keep something for the next step, and who sets them
    checks: list[Check] = field(default_factory=list)


def check_first_step(module: LightningModule, samples: Samples, precision: Any) -> FirstStep:
    """Check the first step of a run of one process."""
    found: list[FirstStep] = []
    sizes = samples.sizes()

    def check(trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        replay = BatchReplay(trainer, pl_module, batch, batch_idx)
        assert replay.batch is not None
        with replay.training_unaffected():
            found.append(_check_step(replay, *samples.cut(sizes), sizes))
        raise Stopped

    callbacks = [LambdaCallback(on_train_batch_start=check)]
    with suppress(Stopped):
        quiet_trainer(callbacks=callbacks, precision=precision, devices=1).fit(module, samples.loader(sizes, None, 1))
    if not found:
        raise ImpossibleError("training ended before its first step")
    return found[0]


def _check_step(replay: BatchReplay, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> FirstStep:
    """Compare the step on a batch with the step on its parts, of `sizes` samples. Batches are before their transfer."""
    run = partial(replay.run, transferred=False, normalizes=False)
    of_whole = run(whole, record=Recording)
    if not any(one.any() for _, one in of_whole.gradients):
        raise ImpossibleError("the gradient of the first batch is zero, so that there is nothing to compare")
    assert of_whole.recording is not None
    taken, of_parts = of_whole.recording.taken, []
    bounds = [sum(sizes[:place]) / sum(sizes) for place in range(len(sizes) + 1)]
    for part, (begin, end) in zip(parts, pairwise(bounds), strict=True):
        of_parts.append(run(part, record=partial(Recording, whole=taken, begin=begin, end=end)))
    ended: Iterable[ReplayedStep] = (of_whole, of_parts[0])
    if is_overridden("on_train_batch_end", replay.module):
        ended = (run(batch, ends=True) for batch in (whole, parts[0]))
    states = _find_states(partial(run, whole, ends=True), ended, replay.tolerance)
    if not all(one.recording is not None and one.recording.is_matched for one in of_parts):
        replay.foreign_draws = "the number of random numbers that the step draws does not follow the samples"
    elif replay.foreign_draws:
        line = _find_use_of_draws(partial(run, whole), of_whole, replay.tolerance)
        replay.foreign_draws = "" if line is None else f"{replay.foreign_draws}, used at {line}"
    found = FirstStep(None, _LEAST, replay.foreign_draws, states)
    if any(len(part.gradients) != len(of_whole.gradients) for part in of_parts):
        meaning = "the number of optimizer steps depends on the samples"
        _add_culprit(found, Culprit(None, meaning, "take equally many steps for all batches"))
    else:
        _compare(found, of_whole, of_parts, sizes, _count_tokens(parts), replay.tolerance)
    running = {operation.module.partition(" ")[0] for operation in of_whole.operations}
    names = {id(part): name for name, part in replay.module.named_modules()}
    batch_norms = [f"`{name}`" for one in find_batch_norms(replay.module) if (name := names[id(one)]) in running]
    if batch_norms:
        text = f"each device normalises its own samples: {join_names(batch_norms)}"
        remedy = "`sync_batchnorm=True` normalises the samples of all devices"
        found.checks.append(Check("batch normalisation", "note", text, remedy=remedy))
    return found


def _find_use_of_draws(run: Callable[..., ReplayedStep], before: ReplayedStep, tolerance: float) -> str | None:
    """Return the first line with other results for another seed of Python and numpy, if that changes the gradient.

    Some seeds are tried, and more for about a second, because a random choice may be rare.
    """
    assert before.recording is not None
    started = time.monotonic()
    for seed in range(1, 1 + _MOST_SEEDS):
        if seed > _LEAST_SEEDS and time.monotonic() - started > 1.0:
            break
        random.seed(seed)
        numpy.random.seed(seed)
        again = run(record=partial(Recording, whole=before.recording.taken))
        if not GradientFit(before.gradients, [again.gradients]).difference([1.0]) <= tolerance:
            pairs = zip(before.operations, again.operations, strict=False)
            different = (one.line for one, other in pairs if _text(one.results) != _text(other.results))
            return str(next(different, None) or "an unknown line")
    return None


def _count_tokens(parts: Sequence[Any]) -> Sequence[float]:
    try:
        return [TokenCount()(part) for part in parts]
    except (TypeError, ValueError):
        return ()


def _compare(
    found: FirstStep,
    whole: ReplayedStep,
    parts: Sequence[ReplayedStep],
    sizes: Sequence[int],
    tokens: Sequence[float],
    tolerance: float,
) -> None:
    """Add what the gradients of the parts say about the gradient of the batch."""
    fit = GradientFit(whole.gradients, [part.gradients for part in parts])
    by_samples = tuple(size / sum(sizes) for size in sizes)
    differences = Differences(whole, parts, sizes)
    found.tolerance = tolerance = max(tolerance, min(differences.precision**0.5, 0.01), _LEAST)

    def fits(weights: Weights | None) -> bool:
        return weights is not None and fit.difference(weights) <= tolerance

    if fits(by_samples):
        found.weight_by = "samples"
        text = f"the mean of its parts by samples, up to {fit.difference(by_samples):.0e}"
        found.checks.append(Check(NAME, "ok", text))
        return
    if fits((1.0,) * len(sizes)):
        found.weight_by, line = "sum", differences.find_first("sum")
        text = "the sum of its parts: the loss is a sum, of which `ddp` takes the mean"
        found.checks.append(Check(NAME, "finding", text, str(line or ""), 'set `weight_by="sum"`'))
        return
    weights, divided_at = next((one for one in differences.origin.items() if fits(one[0])), (None, None))
    if weights is None and fits(fit.fitted) and min(fit.fitted or ()) >= 0:
        weights = fit.fitted if math.isclose(sum(fit.fitted or ()), 1, rel_tol=tolerance) else None
        if weights is not None:
            divided_at = Differences(whole, parts, sizes, known=weights).find_first("mean", weights)
    if divided_at is not None:
        shares = [count / (sum(tokens) or 1.0) for count in tokens]
        if shares and all(abs(one - other) < 1e-6 for one, other in zip(shares, weights or (), strict=True)):
            found.weight_by = "tokens"
        value = "to a function that returns this number" if found.weight_by is None else ""
        remedy = f"set `weight_by` {value}" if value else 'set `weight_by="tokens"`'
        text = "a mean over something other than samples: this line has what it divides by"
        found.checks.append(Check(NAME, "finding", text, str(divided_at), remedy))
    elif found.draws:
        text = f"not compared with its parts: {found.draws}"
        found.checks.append(Check(NAME, "note", text, compared=False))
    else:
        finer = (Differences(whole, parts, sizes, rounding) for rounding in FINER)
        culprit = next(filter(None, (one.find() for one in (differences, *finer))), None)
        hidden = f"most in `{fit.worst(by_samples)[0]}`, in code that hides operations, or hardly above rounding"
        _add_culprit(found, culprit or Culprit(None, hidden))


def _add_culprit(found: FirstStep, culprit: Culprit) -> None:
    text = f"does not follow from its parts: {culprit.meaning}"
    found.checks.append(Check(NAME, "finding", text, str(culprit.line or ""), culprit.remedy))


# ---------------------------------------------------------------- attributes that keep something for the next step

_Place = tuple[str, str]  # name of a module, and of its attribute


def _find_states(
    run: Callable[..., ReplayedStep], ended: Iterable[ReplayedStep], tolerance: float
) -> list[tuple[str, Line | None]]:
    """Return the attributes that depend on the batch and change the gradient of the next step, and who sets them.

    `run` runs the step on the whole batch, on a module that `prepare` changes before; it has `ended` on the whole batch
    and on a part.
    """

    def run_after(places: Sequence[_Place]) -> ReplayedStep:
        def prepare(module: nn.Module) -> None:
            for (name, key), value in ((place, after[place]) for place in places):
                own = value.detach().clone() if isinstance(value, Tensor) else value
                setattr(module.get_submodule(name), key, own.copy() if hasattr(own, "copy") else own)

        return run(prepare=prepare)

    found = []
    try:
        after, of_part = (dict(_attributes(step.module)) for step in ended)
        changed = [place for place, value in after.items() if _text(value) != _text(of_part.get(place))]
        following = run_after(changed).gradients if changed else []
        for place in changed:
            without = run_after([one for one in changed if one != place]).gradients
            if GradientFit(following, [without]).difference([1.0]) > tolerance:
                found.append((".".join(filter(None, place)), _find_setter(run, place)))
    except ImpossibleError:  # a step that cannot run again
        return []
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[_Place, Any]]:
    for name, part in module.named_modules():
        yield from (((name, key), value) for key, value in vars(part).items() if key not in STRUCTURE)


def _text(value: Any) -> str:
    return value_to_text([*value] if isinstance(value, deque) else value)


def _find_setter(run: Callable[..., ReplayedStep], place: _Place) -> Line | None:
    """Return the first line after which an attribute has another value."""
    last: Line | None = None
    is_changed = False
    own: dict[str, Any] = {}
    before = ""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal last, is_changed
        if is_changed or not is_own_file(frame.f_code.co_filename):
            return None
        is_changed = _text(own.get(place[1], _MISSING)) != before
        last = last if is_changed else Line(frame.f_code.co_filename, frame.f_lineno)
        return trace

    def prepare(module: nn.Module) -> None:
        nonlocal own, before
        own = vars(module.get_submodule(place[0]))
        before = _text(own.get(place[1], _MISSING))
        sys.settrace(trace)

    try:
        run(prepare=prepare)
    finally:
        sys.settrace(None)
    return last if is_changed else None
