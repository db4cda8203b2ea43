"""Whether the gradient of a batch follows from the gradients of its parts, and if not, at which line."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from lightning_ddp_ext._compat.torch import STRUCTURE
from lightning_ddp_ext._lightning import LambdaCallback, LightningModule, Trainer, is_overridden
from lightning_ddp_ext.batches.weights import WeightBy, WeightRule
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.errors import ImpossibleError, describe_error
from lightning_ddp_ext.resume.rng_state import seed_generators
from lightning_ddp_ext.verification.operations import Line, Recording, is_own_file
from lightning_ddp_ext.verification.relations import (
    ROUNDINGS,
    Culprit,
    Differences,
    GradientFit,
    Weights,
    find_precision,
)
from lightning_ddp_ext.verification.replay import BatchReplay, ReplayedStep, find_batch_norms
from lightning_ddp_ext.verification.report import Check, Verdict, join_names
from lightning_ddp_ext.verification.runs import Stopped, fit
from lightning_ddp_ext.verification.samples import Samples

NAME, WEIGHT = "gradient of a batch", "`weight_by`"
_UNEXPLAINED = "does not follow from its parts"
_LEAST = 1e-6  # relative difference of gradients that is reported
DRAW_BEFORE = "draw it in the collate function, whose batch is cut, or switch it off for this check"
_BY_FUNCTION = "set `weight_by` to a function that returns this number, and give it to `verify` for the proof"
_LEAST_SEEDS, _MOST_SEEDS = 3, 50
_MISSING = object()


@dataclass(slots=True)
class FirstStep:
    """The first training step, as its parts show it."""

    weight_by: WeightBy | None  # of a strategy that has the gradient of one process; None if there is none
    tolerance: float  # largest relative difference that rounding explains
    draws: str  # what draws random numbers that the parts and ranks cannot repeat; empty if nothing does
    states: list[tuple[str, Line | None]]  # attributes that keep something for the next step, and who sets them
    checks: list[Check] = field(default_factory=list)

    def add(
        self, verdict: Verdict, text: str, line: Line | None = None, remedy: str = "", *, name: str = NAME,
        compared: bool = True,
    ) -> None:  # fmt: skip
        """Add a check."""
        self.checks.append(Check(name, verdict, text, str(line or ""), remedy, compared))


def check_first_step(module: LightningModule, samples: Samples, given: WeightBy | None, precision: Any) -> FirstStep:
    """Check the first step of a run of one process, and the `given` weights of its parts."""
    found: list[FirstStep] = []

    def check(trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        norms = find_batch_norms(pl_module)
        for part in norms.values():
            part.eval()  # in the replayed steps, too
        replay = BatchReplay(trainer, pl_module, batch, batch_idx)
        assert replay.batch is not None
        with replay.training_unaffected():
            found.append(_check_step(replay, samples, given, norms))
        raise Stopped

    callbacks = [LambdaCallback(on_train_batch_start=check)]
    loader = samples.loader(samples.sizes(), None, 1)
    fit(module, loader, callbacks=callbacks, traces=False, precision=precision, devices=1)
    if not found:
        raise ImpossibleError("training ended before its first step")
    return found[0]


def _check_step(replay: BatchReplay, samples: Samples, given: WeightBy | None, norms: Collection[str]) -> FirstStep:
    """Compare the step on a batch with the step on its parts. Batches are before their transfer."""
    sizes = samples.sizes()
    whole, parts = samples.cut(sizes)
    run = partial(replay.run, transferred=False)
    of_whole = run(whole, record=Recording)
    if not any(one.any() for _, one in of_whole.gradients):
        raise ImpossibleError("the gradient of the first batch is zero, so that there is nothing to compare")
    assert of_whole.recording is not None
    bounds = pairwise(sum(sizes[:place]) / sum(sizes) for place in range(len(sizes) + 1))
    record = partial(Recording, whole=of_whole.recording.taken)
    bounded = zip(parts, bounds, strict=True)
    of_parts = [run(part, record=partial(record, begin=begin, end=end)) for part, (begin, end) in bounded]
    ended: Iterable[ReplayedStep] = (of_whole, of_parts[0])
    if is_overridden("on_train_batch_end", replay.module):
        ended = (run(batch, ends=True) for batch in (whole, parts[0]))
    states = _find_states(partial(run, whole, ends=True), ended, replay.tolerance)
    draws = replay.foreign_draws or ("the step draws a random order of samples" if of_whole.recording.permutes else "")
    if not all(one.recording is not None and one.recording.is_matched for one in of_parts):
        draws = "the number of random numbers that the step draws does not follow the samples"
    elif draws:
        line = _find_use_of_draws(partial(run, whole), of_whole, replay.tolerance)
        draws = "" if line is None else f"{draws}, used at {line}"
    found = FirstStep(None, replay.tolerance, draws, states)
    if any(len(part.gradients) != len(of_whole.gradients) for part in of_parts):
        text = f"{_UNEXPLAINED}: the number of optimizer steps depends on the samples"
        found.add("finding", text, remedy="take equally many steps for all batches")
    else:
        _compare(found, of_whole, of_parts, parts, sizes, given)
    if norms and any("batch_norm" in operation.name for operation in of_whole.operations):
        text = f"each device normalises its own samples: {join_names([f'`{name}`' for name in norms])}"
        remedy = "`sync_batchnorm=True` normalises the samples of all devices"
        found.add("note", text, remedy=remedy, name="batch normalisation")
    return found


def _find_use_of_draws(run: Callable[..., ReplayedStep], before: ReplayedStep, tolerance: float) -> str | None:
    """Return the first line with other results for another seed, if that changes the gradient.

    Some seeds are tried, and more for about a second, because a random choice may be rare.
    """
    assert before.recording is not None
    started = time.monotonic()
    for seed in range(1, 1 + _MOST_SEEDS):
        if seed > _LEAST_SEEDS and time.monotonic() - started > 1.0:
            break
        seed_generators(seed)
        again = run(record=partial(Recording, whole=before.recording.taken))
        if not GradientFit(before.gradients, [again.gradients]).difference([1.0]) <= tolerance:
            pairs = [*zip(before.operations, again.operations, strict=False)]
            pairs = [pairs[place] for place in sorted(before.leading) if place < len(pairs)]
            different = (one.line for one, other in pairs if _text(one.results) != _text(other.results))
            return str(next(different, None) or "an unknown line")
    return None


def _weigh(weight_by: WeightBy, batches: Sequence[Any], sizes: Sequence[int]) -> Weights:
    """Return the factors of the gradients of batches under a `weight_by`."""
    rule = WeightRule(weight_by, lambda text: None)
    return tuple(rule.normalize([rule.weigh(*one) for one in zip(batches, sizes, strict=True)]))


def _compare(
    found: FirstStep, whole: ReplayedStep, parts: list[ReplayedStep], batches: list[Any], sizes: list[int],
    given: WeightBy | None,
) -> None:  # fmt: skip
    """Add what the gradients of the parts say about the gradient of the batch, and about the `given` weights."""
    fit = GradientFit(whole.gradients, [part.gradients for part in parts])
    find_differences = cache(partial(Differences, whole, parts, sizes))
    found.tolerance = tolerance = max(found.tolerance, min(find_precision(whole) ** 0.5, 0.01), _LEAST)
    by: dict[WeightBy, Weights] = {one: _weigh(one, batches, sizes) for one in ("samples", "sum")}
    with suppress(TypeError, ValueError):  # a batch without labels of tokens
        by["tokens"] = _weigh("tokens", batches, sizes)
    try:
        shares = None if given is None else _weigh(given, batches, sizes)
    except Exception as error:
        text = f"the given `weight_by` fails: {describe_error(error)}. Leave it out: `verify` names the one that fits"
        raise ImpossibleError(text) from error

    def fits(weights: Weights | None) -> bool:
        return weights is not None and fit.difference(weights) <= tolerance

    def find_divisor() -> Line | None:
        fitted = fit.fitted or (-1.0,)
        is_mean = min(fitted) >= 0 and math.isclose(sum(fitted), 1, rel_tol=tolerance)
        origin = find_differences(ROUNDINGS[0]).origin
        weights = next(filter(fits, [*origin, shares, *by.values(), fitted if is_mean else None]), None)
        if weights is None:
            return None
        return origin.get(weights) or find_differences(ROUNDINGS[0], weights).find_first("mean", weights)

    name = next((one for one, weights in by.items() if fits(weights)), None)
    found.weight_by = given if fits(shares) else name
    remedy = f'set `weight_by="{name}"`' if name else _BY_FUNCTION
    if name == "samples":
        remedy = "leave `weight_by` out"
        found.add("ok", f"the mean of its parts by samples, up to {fit.difference(by['samples']):.0e}")
    elif name == "sum":
        text = "the sum of its parts: the loss is a sum, of which `ddp` takes the mean"
        found.add("finding", text, find_differences(ROUNDINGS[0]).find_first("sum"), remedy)
    elif (line := find_divisor()) is not None or found.weight_by is not None:
        text = "a mean over something other than samples" + (": this line has what it divides by" if line else "")
        found.add("finding", text, line, remedy)
    elif found.draws:
        found.add("note", f"not compared with its parts: {found.draws}", remedy=DRAW_BEFORE, compared=False)
        return
    else:
        culprits = (find_differences(rounding).find() for rounding in ROUNDINGS)
        hidden = f"most in `{fit.worst(by['samples'])[0]}`, in code that hides operations, or hardly above rounding"
        culprit = next(filter(None, culprits), Culprit(None, hidden))
        found.add("finding", f"{_UNEXPLAINED}: {culprit.meaning}", culprit.line, culprit.remedy)
        return
    if shares is not None and not fits(shares):
        factors = join_names([f"{share:.2f}" for share in shares])
        text = f"`weight_by={value_to_text(given)}` does not fit: it gives the parts of the batch the factors {factors}"
        found.add("finding", text, remedy=remedy, name=WEIGHT)


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
        after, of_part = (
            {(name, key): value for name, part in step.module.named_modules()
             for key, value in vars(part).items() if key not in STRUCTURE}
            for step in ended
        )  # fmt: skip
        changed = [place for place, value in after.items() if _text(value) != _text(of_part.get(place))]
        following = run_after(changed).gradients if changed else []
        for place in changed:
            without = run_after([one for one in changed if one != place]).gradients
            if GradientFit(following, [without]).difference([1.0]) > tolerance:
                found.append((".".join(filter(None, place)), _find_setter(run, place)))
    except ImpossibleError:  # a step that cannot run again
        return []
    return found


def _text(value: Any) -> str:
    return value_to_text([*value] if isinstance(value, deque) else value)


def _find_setter(run: Callable[..., ReplayedStep], place: _Place) -> Line | None:
    """Return the first line after which an attribute has another value."""
    last: Line | None = None
    read: Callable[[], str] = str
    before = ""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal last
        if not is_own_file(frame.f_code.co_filename):
            return None
        last = Line(frame.f_code.co_filename, frame.f_lineno) if read() == before else last
        return trace

    def prepare(module: nn.Module) -> None:
        nonlocal read, before
        own = vars(module.get_submodule(place[0]))
        read = lambda: _text(own.get(place[1], _MISSING))  # noqa: E731
        before = read()
        sys.settrace(trace)

    try:
        run(prepare=prepare)
    finally:
        sys.settrace(None)
    return None if read() == before else last
