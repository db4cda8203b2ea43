"""Checks whether several devices train what one device trains, and names the line that is the reason if not."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_ddp_ext._lightning import DDPStrategy, LightningModule
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.verification.processes import FailedError, TooLateError, run_forked
from lightning_ddp_ext.verification.report import Check, Report, join_names
from lightning_ddp_ext.verification.runs import (
    STEPS,
    Outcome,
    Run,
    compare_steps,
    draw_indices,
    fit,
    relative_difference,
    trace_alone,
)
from lightning_ddp_ext.verification.samples import Samples, draw_samples
from lightning_ddp_ext.verification.step_check import FirstStep, check_first_step

Progress = Callable[[str], None]
_LEAST, _GROWTH = 1e-6, 1000  # rounding in the gradient of the second step: at least, and relative to the first
_LOGGED = 1e-6  # difference of logged values that is rounding
_LEAST_LIMIT, _SLOWER = 20.0, 10.0  # seconds of a run of ranks, and relative to a run of one process
_EACH_ONCE = "use `balanced_ddp` or `ddp_join`, under which ranks validate each sample once"
_PER_RANK = "`ddp` takes the mean over ranks: divide by the mean of the ranks' numbers, not by their sum"
_SUMS = "use a metric that adds up sums and counts over ranks, such as torchmetrics' `MeanMetric` with `weight`"
_PRECISIONS = ("64-true", "32-true")  # a module that cannot run in double precision is checked in single precision


def verify(
    module: LightningModule, data: Any = None, *, limit: float = 120.0, progress: Progress = lambda text: None
) -> Report:
    """Check on this machine's CPUs whether several devices train what one device trains.

    The module trains in forks of this process, for a few steps on at most 12 samples each: nothing of this process, of
    the module or of the data changes.

    Args:
        module: The module, as for `trainer.fit`.
        data: A `LightningDataModule`, a loader, or other iterable of batches; None for the `train_dataloader` of the
            module. A `DataLoader` with a collate function gives parts of a batch without any cutting.
        limit: Seconds after which all processes are ended.
        progress: Called with a line on each check that begins.

    Returns:
        The checks, and the strategy to use.

    Raises:
        ImpossibleError: If nothing can be checked, such as if the step fails, with the reason.
    """
    started = time.monotonic()
    verifier = _Verifier(module, data, *draw_samples(module, data), started + limit, progress)
    checks = verifier.run()
    return Report(checks, verifier.use(), time.monotonic() - started)


def _incomparable(name: str, reason: str, remedy: str = "") -> Check:
    return Check(name, "note", f"not compared: {reason}", remedy=remedy, compared=False)


class _Verifier:
    """The checks of a module on some samples."""

    _step: FirstStep

    def __init__(
        self,
        module: LightningModule,
        data: Any,
        samples: Samples,
        validation: list[Samples],
        problem: str | None,
        deadline: float,
        progress: Progress,
    ) -> None:
        self._data, self._validation = data, validation
        self._module, self._samples, self._deadline, self._progress = module, samples, deadline, progress
        self._notes = [] if problem is None else [_incomparable("validation", problem)]
        self._limit = math.inf  # seconds of a run
        self._precision = _PRECISIONS[0]
        self._weight_by: str | None = None
        self._communicates = False  # the step does
        self._ddp = "ddp"  # the name of the strategy that trains the module
        self._is_over = False  # the time limit
        self._is_divided = False  # a stream that gives each rank other samples
        self._equal: list[str] = []  # strategies that train as one process

    def _fork(self, functions: Sequence[Callable[[], Any]], are_ranks: bool = False) -> list[Any]:
        return run_forked(functions, min(self._deadline, time.monotonic() + self._limit), are_ranks)

    def run(self) -> list[Check]:
        """Run all checks."""
        self._progress("one step on a batch and on its parts")
        self._check_step()
        checks = [*self._step.checks, *self._check_samples(), *self._check_validation_samples(), *self._notes]
        self._progress("two steps in one process")
        started = time.monotonic()
        try:
            (alone,) = self._fork([self._train_alone])
        except ImpossibleError as error:
            if not self._validation:
                raise
            self._validation = []
            checks.append(_incomparable("validation", f"with it, training ends with an error: {error}"))
            (alone,) = self._fork([self._train_alone])
        self._limit = max(_LEAST_LIMIT, _SLOWER * (time.monotonic() - started))
        for name, run in self._runs():
            self._progress(f"two steps on {len(run.sizes)} ranks of `{name}`")
            found = [*self._check_run(name, run, alone)]
            known = {(check.name, check.where) for check in checks}
            checks += [check for check in found if (check.name, check.where) not in known]
            findings = {check.name for check in found if check.verdict == "finding"}
            if "step of a rank" in findings or (name != "ddp" and f"`{name}` on {len(run.sizes)} ranks" in findings):
                self._weight_by = None  # no strategy mends a step that is different on ranks
                break
            if self._is_over:
                break
        if self._gathers and checks[0].verdict == "finding":
            # Such as a contrastive loss over features that ranks gather.
            text = f"{checks[0].text}; `{self._ddp}` trains as one process"
            checks[0] = replace(checks[0], verdict="ok", remedy="", text=text)
        elif checks[0].verdict == "finding" and any(check.remedy == _PER_RANK for check in checks):
            checks[0] = replace(checks[0], remedy=_PER_RANK)
        return checks

    def _check_step(self) -> None:
        for self._precision in _PRECISIONS:
            try:
                (self._step,) = self._fork([partial(check_first_step, self._module, self._samples, self._precision)])
                break
            except ImpossibleError:
                if self._precision == _PRECISIONS[-1]:
                    raise
        self._weight_by = self._step.weight_by

    def _train_alone(self) -> Outcome:
        loader = self._samples.loader(self._samples.sizes(), None, STEPS)
        validation = [one.loader(one.sizes(), None, 1) for one in self._validation]
        return fit(self._module, loader, validation, devices=1, precision=self._precision)

    def _check_samples(self) -> Iterable[Check]:
        """Compare what the samplers of two ranks give."""
        self._progress("the samples of two ranks")
        draw = partial(draw_indices, self._module, self._data, 2)
        try:
            found = self._fork([partial(draw, replaces=True)] * 2, are_ranks=True)
        except ImpossibleError:  # Lightning refuses to replace some samplers
            try:
                found = self._fork([partial(draw, replaces=False)] * 2, are_ranks=True)
            except ImpossibleError as error:
                yield _incomparable("samples of ranks", str(error))
                return
        ours, theirs = ({one for one in walk(batches) if not isinstance(one, list | tuple)} for batches, _ in found)
        self._is_divided = self._samples.is_stream and not ours & theirs
        if len(ours & theirs) > 1:  # one may fill up the last batch
            text = f"both ranks get {len(ours & theirs)} of {len(ours | theirs)} samples"
            remedy = "let each rank have other samples, such as every second one, or use `balanced_ddp`"
            yield Check("samples of ranks", "finding", text, str(found[0][1] or ""), remedy)

    def _check_validation_samples(self) -> Iterable[Check]:
        for number, one in enumerate(self._validation):
            if one.length is not None and one.length % 2:
                text = f"`ddp` repeats samples of validation loader {number} so that all ranks have equally many"
                yield Check("samples of validation", "note", text, remedy=_EACH_ONCE)

    def _runs(self) -> Iterable[tuple[str, Run]]:
        """Return the runs: Lightning's own `ddp` on equal parts, and the strategy that may be recommended."""
        halves = [(one, [sum(one.sizes()) // 2] * 2) for one in self._validation]
        number = sum(self._samples.sizes())
        yield "ddp", Run(DDPStrategy, [number // 2] * 2, validation=halves)
        if self._weight_by is None:
            return
        name, kind = self._recommended
        sizes, shares = self._samples.sizes(), kind is BalancedDDPStrategy
        unequal = [(one, [one.sizes()[0], sum(one.sizes()[1:])]) for one in self._validation]
        thirds = [(one, [1, 1, sum(one.sizes()) - 2]) for one in self._validation]
        of_two = [sizes[0], number - sizes[0]], unequal
        for parts, validation in (of_two, (sizes, thirds))[: len(sizes) - 1]:
            make = partial(kind, weight_by=self._weight_by, **({"split": parts} if shares else {}))
            yield name, Run(make, parts, shares, validation)

    def _check_run(self, strategy: str, run: Run, alone: Outcome) -> Iterable[Check]:
        name = f"`{strategy}` on {len(run.sizes)} ranks"
        try:
            outcomes = self._train(strategy, run, alone)
            name = name.replace("ddp", self._ddp) if strategy == "ddp" else name
        except TooLateError as error:
            if time.monotonic() >= self._deadline and not error.communicates:
                self._is_over = True
                yield _incomparable(name, "the time limit is over", "give more time with `limit`")
                return
            text = f"training does not end: rank {error.place} waits for others that have gone on"
            remedy = "let all ranks make the same collective calls"
            yield Check("step of a rank", "finding", text, str(error.line or ""), remedy)
            yield _incomparable(name, "training does not end")
            return
        except FailedError as error:
            text = f"training ends with an error: {error}"
            yield Check(name, "finding", text, str(error.line or ""), error.remedy)
            return
        self._communicates |= outcomes[0].communicates
        wrong = self._find_wrong_step(outcomes[0], alone)
        if not run.shares and not (outcomes[0].communicates and wrong is None):
            yield from self._check_ranks(outcomes, run.sizes)
        yield self._compare(name, strategy, outcomes, alone, wrong)
        is_equal = strategy in self._equal and not self._unmatched(outcomes)
        yield from _check_logged(outcomes, run, alone if is_equal else None)

    def _unmatched(self, outcomes: Sequence[Outcome]) -> str:
        """Return why random numbers of ranks differ from the ones of one process; empty if they are."""
        is_matched = all(one.is_matched for one in outcomes)
        return self._step.draws or ("" if is_matched else "ranks draw other random numbers than one process")

    def _find_wrong_step(self, own: Outcome, alone: Outcome) -> tuple[int, float] | None:
        """Return the first optimizer step with another gradient than in one process, and the relative difference."""
        found = [relative_difference(*both) for both in zip(own.gradients, alone.gradients, strict=False)]
        if len(own.gradients) != len(alone.gradients):
            found.append(math.inf)
        allowed = [self._step.tolerance, max([_LEAST, *(_GROWTH * one for one in found[:1])])]
        return next(((step, one) for step, one in enumerate(found) if not one <= allowed[min(step, 1)]), None)

    def _compare(
        self,
        name: str,
        strategy: str,
        outcomes: Sequence[Outcome],
        alone: Outcome,
        wrong: tuple[int, float] | None,
    ) -> Check:
        """Compare ranks with each other, and with one process."""
        first, unmatched = outcomes[0], self._unmatched(outcomes)
        if first.difference is not None:
            remedy = "compute it from values that all ranks share"
            return Check(name, "finding", f"ranks end with different values: {first.difference}", remedy=remedy)
        if not first.gradients and not alone.gradients:
            text = f"ranks are identical; not compared with one process: no optimizer step in {STEPS} batches"
            return Check(name, "note", text, compared=False)
        if wrong is None:
            self._equal.append(strategy)
            if unmatched:
                return Check(name, "note", f"equal to one process by chance: {unmatched}", compared=False)
            return Check(name, "ok", "ranks are identical, and train as one process")
        step, difference = wrong
        if first.rates != alone.rates and step > 0:
            pairs = zip(first.rates, alone.rates, strict=True)
            one, other = next(both for both in pairs if both[0] != both[1])
            text = f"ranks are identical, with a learning rate of {one:g}; in one process it is {other:g}"
            return Check(name, "note", text, compared=False)
        whole = first.gradients[0] * len(outcomes)
        if self._communicates and relative_difference(whole, alone.gradients[0]) <= self._step.tolerance:
            text = "the gradient is the one of one process, divided by the number of ranks"
            return Check(name, "finding", text, remedy=_PER_RANK)
        if not unmatched and strategy == "ddp" and self._weight_by != "samples":
            unmatched = "its gradient is no mean over samples, see above"
        if unmatched:
            text = f"ranks are identical; not compared with one process: {unmatched}"
            return Check(name, "note", text, compared=False)
        text = f"the gradient of step {step + 1} differs by {difference:.1e} from one process"
        states = self._step.states
        if not step or not states:
            return Check(name, "finding", text)
        text += f": each rank keeps its own {join_names([f'`{state}`' for state, _ in states])}"
        remedy = "make it a buffer that all ranks change alike, such as by a mean over ranks"
        return Check(name, "finding", text, str(states[0][1] or ""), remedy)

    def _train(self, strategy: str, run: Run, alone: Outcome) -> list[Outcome]:
        """Return the outcomes of a run; if plain `ddp` refuses a module, of `ddp` that permits unused parameters."""
        given = self._module, self._samples, self._precision, alone.draws
        try:
            return self._fork(run.ranks(*given), are_ranks=True)
        except FailedError:
            if strategy != "ddp":
                raise
            permitting = replace(run, make_strategy=partial(DDPStrategy, find_unused_parameters=True))
            outcomes = self._fork(permitting.ranks(*given), are_ranks=True)
            self._ddp = "ddp_find_unused_parameters_true"
            return outcomes

    def _check_ranks(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Iterable[Check]:
        """Compare the step of each rank with the step of one process on the same samples."""
        communicates = outcomes[0].communicates
        trace = partial(trace_alone, self._module, self._samples, sizes, self._precision, communicates)
        alone = self._fork([partial(trace, rank) for rank in range(len(sizes))])
        for rank, (own, other) in enumerate(zip(outcomes, alone, strict=True)):
            found = compare_steps(own, other)
            if found is not None:
                text = f"rank {rank} of {len(sizes)} computes something else than one process on the same samples"
                remedy = "leave out what depends on ranks, their number, or random numbers of a rank"
                yield Check("step of a rank", "finding", text, found, remedy)
                return

    @property
    def _recommended(self) -> tuple[str, Any]:
        """Name and class of the strategy that fits the data: `balanced_ddp` divides the samples of all ranks itself."""
        divides = self._samples.are_collated and not self._is_divided
        return ("balanced_ddp", BalancedDDPStrategy) if divides else ("ddp_join", DDPJoinStrategy)

    @property
    def _gathers(self) -> bool:
        """Whether ranks exchange what a step needs, so that `ddp` trains as one process."""
        return self._communicates and "ddp" in self._equal

    def use(self) -> str:
        """Return the arguments of the Trainer to use; empty if there are none, or nothing was proved in time."""
        if self._is_over:
            return ""
        if self._weight_by is None:
            return f'strategy="{self._ddp}"' if self._gathers else ""
        name, kind = self._recommended
        if self._weight_by == "samples":
            return f'strategy="{name}"'
        return f'strategy={kind.__name__}(weight_by="{self._weight_by}")'


def _check_logged(outcomes: Sequence[Outcome], run: Run, alone: Outcome | None) -> Iterator[Check]:
    """Compare the logged values of ranks, and the ones that all ranks share with one process, if it trains alike."""
    lines, monitored = outcomes[0].lines, outcomes[0].monitored
    expected = {} if alone is None else alone.logged
    own, changed, partly = [], [], []
    for key in {key: None for one in outcomes for key in one.logged}:
        finding = partial(Check, f"logged `{key}`", "finding", where=str(_line_of(lines, key) or ""))
        values = [one.logged[key] for one in outcomes if key in one.logged]
        is_partial = len(values) < len(outcomes)
        if len({*values}) == 1 and not is_partial:
            reference = expected.get(key, values[0])
            if math.isclose(values[0], reference, rel_tol=_LOGGED, abs_tol=_LOGGED):
                continue
            changed.append(key)
            text = f"it is monitored, and is {values[0]:.4g} on ranks, but {reference:.4g} in one process"
            remedy = _SUMS
        elif run.shares:  # the run of `ddp` has shown it
            continue
        elif is_partial:
            partly.append(key)
            text, remedy = "it is monitored, but only some ranks log it", "log it on all ranks"
        else:
            own.append(key)
            shown = ", ".join(f"{value:.4g}" for value in values)
            text, remedy = f"it is monitored, and each rank has its own value: {shown}", "log it with `sync_dist=True`"
        if key in monitored:
            yield finding(text=text, remedy=remedy)
    for keys, text, remedy in (
        (partly, "only some ranks log {}", "log them on all ranks if anything is to monitor them"),
        (own, "each rank has its own {}; the logger writes the values of rank 0", "log them with `sync_dist=True`"),
        (changed, "{} differ from one process", _SUMS),
    ):
        keys = [key for key in keys if key not in monitored]
        if keys:
            text = text.format(join_names([f"`{key}`" for key in keys]))
            yield Check("logged values", "note", text, str(_line_of(lines, keys[0]) or ""), remedy)


def _line_of(lines: Mapping[str, Any], key: str) -> Any:
    """Return the line that logs a key, which may end with what Lightning appends."""
    return next((line for name, line in lines.items() if key in (name, f"{name}_step", f"{name}_epoch")
                 or key.startswith(f"{name}/dataloader_idx")), None)  # fmt: skip
