"""Whether the gradient of a batch follows from the gradients of its parts, and if not, at which line."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy

from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.verification.differences import FINER, Culprit, Differences
from lightning_ddp_ext.verification.draws import Draws
from lightning_ddp_ext.verification.gradient_fit import GradientFit
from lightning_ddp_ext.verification.operations import Line, Recording
from lightning_ddp_ext.verification.relations import Relation
from lightning_ddp_ext.verification.replay import BatchReplay, ReplayedStep, find_batch_norms
from lightning_ddp_ext.verification.states import find_states

_LEAST = 1e-6  # relative difference of gradients that is reported


@dataclass(frozen=True, slots=True)
class StepFinding:
    """What the parts of a batch say about a training step.

    Attributes:
        weight_by: The `weight_by` whose mean or sum of the parts' gradients is the gradient of the batch; None if none
            is: then a function has to return what `divided_at` says, or `culprit` is the reason.
        divided_at: Line that computes what the mean of the loss divides by, or that adds up samples.
        weights: The weights of the parts' gradients, if any fit.
        culprit: The first operation at which samples influence each other.
        batch_norms: Names of the layers of batch normalisation, which is left out: it used its running statistics.
        difference: Of the gradients, relative to the norm of the gradient of the batch.
        tolerance: Largest relative difference that rounding explains.
        parameter: The parameter whose gradient differs most.
        states: Attributes that keep something of the batch for the next step, and the lines that set them.
        draws: What draws random numbers that the parts of a batch and ranks cannot repeat; empty if nothing does.
    """

    weight_by: str | None
    divided_at: Line | None
    weights: tuple[float, ...] | None
    culprit: Culprit | None
    batch_norms: tuple[str, ...]
    difference: float
    tolerance: float
    parameter: str
    states: list[tuple[str, Line | None]]
    draws: str


def check_step(replay: BatchReplay, whole: Any, parts: Sequence[Any], sizes: Sequence[int]) -> StepFinding:
    """Compare the step on a batch with the step on its parts, of `sizes` samples. Batches are before their transfer."""
    run = partial(replay.run, transferred=False, normalizes=False)
    of_whole = run(whole, record=Recording)
    if not any(one.any() for _, one in of_whole.gradients):
        raise ImpossibleError("the gradient of the first batch is zero, so that there is nothing to compare")
    recording = of_whole.recording
    assert recording is not None
    taken, of_parts, draws = recording.draws.taken, [], []
    bounds = [sum(sizes[:place]) / sum(sizes) for place in range(len(sizes) + 1)]
    for part, share in zip(parts, pairwise(bounds), strict=True):
        draws.append(Draws(taken, *share))
        of_parts.append(run(part, record=partial(Recording, draws=draws[-1])))
    if not all(one.is_matched for one in draws):
        replay.foreign_draws = "the number of random numbers that the step draws does not follow the samples"
    elif replay.foreign_draws:
        random.seed(1)
        numpy.random.seed(1)
        again = run(whole, record=partial(Recording, draws=Draws(taken)))
        if GradientFit(of_whole.gradients, [again.gradients]).difference([1.0]) <= replay.tolerance:
            replay.foreign_draws = ""  # which have no influence
    running = {operation.module.partition(" ")[0] for operation in recording.operations}
    names = {id(part): name for name, part in replay.module.named_modules()}
    batch_norms = [name for one in find_batch_norms(replay.module) if (name := names[id(one)]) in running]
    states = find_states(partial(run, whole), of_whole, of_parts[0], replay.tolerance)
    return _find(replay, of_whole, of_parts, sizes, tuple(batch_norms), states)


def _find(
    replay: BatchReplay,
    whole: ReplayedStep,
    parts: Sequence[ReplayedStep],
    sizes: Sequence[int],
    batch_norms: tuple[str, ...],
    states: list[tuple[str, Line | None]],
) -> StepFinding:
    if any(len(part.gradients) != len(whole.gradients) for part in parts):
        steps = Culprit(
            None, "the number of optimizer steps depends on the samples", "take equally many steps for all batches"
        )
        return StepFinding(None, None, None, steps, batch_norms, math.inf, _LEAST, "", states, replay.foreign_draws)
    fit = GradientFit(whole.gradients, [part.gradients for part in parts])
    by_samples = tuple(size / sum(sizes) for size in sizes)
    differences = Differences(whole, parts, sizes)
    known: dict[str, tuple[float, ...]] = {"samples": by_samples, "sum": (1.0,) * len(sizes)}
    tolerance = max(replay.tolerance, min(differences.precision**0.5, 0.01), _LEAST)
    weight_by, divided_at, culprit = None, None, None
    fitted: tuple[float, ...] | None = None
    for name, weights in known.items():
        if fit.difference(weights) <= tolerance:
            weight_by, fitted = name, weights
            divided_at = differences.find_first(Relation("sum")) if name == "sum" else None
            break
    else:
        for weights, line in differences.origin.items():
            if fit.difference(weights) <= tolerance:
                divided_at, fitted = line, weights
                break
        else:
            if fit.fitted is not None and min(fit.fitted) >= 0 and math.isclose(sum(fit.fitted), 1, rel_tol=tolerance):
                fitted = tuple(fit.fitted) if fit.difference(fit.fitted) <= tolerance else None
            divided_at = (
                None
                if fitted is None
                else Differences(whole, parts, sizes, known=fitted).find_first(Relation("mean", fitted))
            )
        if divided_at is None:
            finer = (Differences(whole, parts, sizes, rounding) for rounding in FINER)
            culprit = next(filter(None, (one.find() for one in chain([differences], finer))), None)
    difference = fit.difference(by_samples)
    return StepFinding(
        weight_by,
        divided_at,
        fitted,
        culprit,
        batch_norms,
        difference,
        tolerance,
        fit.worst(by_samples)[0],
        states,
        replay.foreign_draws,
    )
