"""Checks whether several devices train what one device trains, and names the line that is the reason if not."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_ddp_ext._lightning import DDPStrategy, LightningModule
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.batches.weights import WeightBy
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.errors import ImpossibleError, with_remedy_for_cuda
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.ddp_checkpoint import DDPCheckpointStrategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy
from lightning_ddp_ext.verification.processes import FailedError, TooLateError, run_forked
from lightning_ddp_ext.verification.relations import relative_difference
from lightning_ddp_ext.verification.report import Check, Report, join_names
from lightning_ddp_ext.verification.runs import STEPS, Outcome, Run, compare_steps, draw_indices, fit, trace_alone
from lightning_ddp_ext.verification.samples import Samples, draw_samples
from lightning_ddp_ext.verification.step_check import DRAW_BEFORE, NAME, WEIGHT, FirstStep, check_first_step

_KINDS: dict[str, type[ExplicitDDPStrategy]] = {
    "balanced_ddp": BalancedDDPStrategy, "ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy,
}  # fmt: skip
Progress = Callable[[str], None]
_LEAST, _GROWTH = 1e-6, 1000  # rounding in the gradient of the second step: at least, and relative to the first
_LOGGED = 1e-6  # difference of logged values that is rounding
_SHARE, _SLOWER = 1 / 6, 10.0  # time of a run of ranks: at least, of all time, and relative to a run of one process
_PER_RANK = "`ddp` takes the mean over ranks: divide by the mean of the ranks' numbers, not by their sum"
_QUEUE = (
    ". Let a queue of earlier samples, as in MoCo, take the samples of all ranks (`all_gather`): with a queue per rank,"
    " each rank compares its samples with its own earlier ones only"
)
_UNUSED = "; plain `ddp` ends with an error, because the module has unused parameters"
_SUMS = "use a metric that adds up sums and counts over ranks, such as torchmetrics' `MeanMetric` with `weight`"


def verify(
    module: LightningModule,
    data: Any = None,
    *,
    strategy: str | ExplicitDDPStrategy | None = None,
    weight_by: WeightBy | None = None,
    limit: float = 120.0,
    progress: Progress = lambda text: None,
) -> Report:
    """Check on this machine's CPUs whether several devices train what one device trains.

    The module trains in forks of this process, for a few steps on at most 12 samples each: nothing of this process, of
    the module or of the data changes.

    Args:
        module: The module, as for `trainer.fit`.
        data: A `LightningDataModule`, a loader, or other iterable of batches; None for the `train_dataloader` of the
            module. A `DataLoader` with a collate function gives parts of a batch without any cutting.
        strategy: The strategy to check besides `ddp`: `"ddp_join"`, `"balanced_ddp"`, `"ddp_checkpoint"` or an object
            of their classes. None for the one that fits the data.
        weight_by: Its `weight_by`, if it is no object; None for the one that fits the first step.
        limit: Seconds after which all processes are ended.
        progress: Called with a line on each check that begins.

    Returns:
        The checks, and the strategy to use.

    Raises:
        ImpossibleError: If nothing can be checked, such as if the step fails, with the reason.
    """
    started = time.monotonic()
    try:
        verifier = _Verifier(module, data, strategy, weight_by, limit, progress)
        checks = verifier.run()
    except ImpossibleError as error:
        raise ImpossibleError(with_remedy_for_cuda(str(error))) from error
    return Report(checks, verifier.use(), verifier.plain, time.monotonic() - started)


def _incomparable(name: str, reason: str, remedy: str = "") -> Check:
    return Check(name, "note", f"not compared: {reason}", remedy=remedy, compared=False)


class _Verifier:
    """The checks of a module on some samples."""

    _step: FirstStep
    _weight_by: WeightBy | None  # that fits the first step, or was given

    def __init__(
        self, module: LightningModule, data: Any, strategy: Any, weight_by: WeightBy | None, limit: float,
        progress: Progress,
    ) -> None:  # fmt: skip
        self._module, self._data, self._seconds, self._progress = module, data, limit, progress
        self._deadline = time.monotonic() + limit
        self._given = None if isinstance(strategy, str) else strategy
        self._name = next((one for one, kind in _KINDS.items() if strategy == one or isinstance(strategy, kind)), None)
        if strategy is not None and self._name is None:
            choices = ", ".join(map(repr, _KINDS))
            raise ImpossibleError(f"`strategy` must be one of {choices} or of their classes, got {strategy!r}")
        self._given_weight: WeightBy | None = getattr(strategy, "weight_by", weight_by)  # of an object, its own
        self._asked: WeightBy | None = self._given_weight or (None if strategy is None else "samples")
        self._samples, self._validation, problem = draw_samples(module, data)
        self._notes = [] if problem is None else [_incomparable("validation", problem)]
        self._limit = math.inf  # seconds of a run
        self._communicates = False  # the step does
        self._ddp = "ddp"  # the name of the strategy that trains the module
        self._is_divided = False  # a stream that gives each rank other samples
        self._gathers = False  # ranks exchange what the step needs, and `ddp` trains as one process
        self.plain = ""  # Lightning's strategy that trains as one process

    def _fork(self, functions: Sequence[Callable[[], Any]], are_ranks: bool = False) -> list[Any]:
        return run_forked(functions, min(self._deadline, time.monotonic() + self._limit), are_ranks)

    def _fork_first(
        self, groups: Iterable[Sequence[Callable[[], Any]]], then: str, are_ranks: bool = False
    ) -> tuple[list[Any], list[str]]:
        """Return the results of the first functions that do not fail, and the errors of the ones before."""
        errors: list[str] = []
        for functions in groups:
            try:
                return self._fork(functions, are_ranks), errors
            except ImpossibleError as error:
                errors.append(str(error))
        raise ImpossibleError(then.join(dict.fromkeys(errors)))

    def run(self) -> list[Check]:
        """Run all checks."""
        self._progress("one step on a batch and on its parts")
        self._check_step()
        checks = [*self._step.checks, *self._check_samples(), *self._notes]
        self._progress("two steps in one process")
        started = time.monotonic()
        tries = [self._validation, []] if self._validation else [[]]
        trainings = [[partial(self._train_alone, one)] for one in tries]
        (alone,), errors = self._fork_first(trainings, "; and without validation: ")
        self._validation = tries[len(errors)]
        checks += [_incomparable("validation", f"with it, training ends with an error: {one}") for one in errors]
        self._limit = max(_SHARE * self._seconds, _SLOWER * (time.monotonic() - started))
        for name, run in self._runs():
            self._progress(f"two steps on {len(run.sizes)} ranks of `{name}`")
            found = [*self._check_run(name, run, alone)]
            known = {(check.name, check.where) for check in checks}
            checks += [check for check in found if (check.name, check.where) not in known]
            findings = {check.name for check in found if check.verdict == "finding"}
            if "step of a rank" in findings or (name != "ddp" and f"`{name}` on {len(run.sizes)} ranks" in findings):
                self._weight_by = None  # no strategy mends a step that is different on ranks
        proved = {check.name for check in checks if check.verdict == "ok"}
        if f"`{self._ddp}` on 2 ranks" in proved and all(check.verdict != "finding" for check in checks):
            self.plain = f'strategy="{self._ddp}"'
        if self._gathers and checks[0].verdict == "finding":
            # Such as a contrastive loss over features that ranks gather.
            text = f"{checks[0].text}; `{self._ddp}` trains as one process"
            checks[0] = replace(checks[0], verdict="ok", remedy="", text=text)
        elif self._weight_by and self._weight_by == self._asked and f"`{name}` on 2 ranks" in proved:
            for place, check in enumerate(checks):
                if check.verdict == "finding" and check.name in (NAME, f"`{self._ddp}` on 2 ranks"):
                    text = f"`{self.use()}` trains as one process; plain `ddp` does not: {check.text}"
                    checks[place] = replace(check, verdict="ok", remedy="", text=text)
        elif checks[0].verdict == "finding" and any(check.remedy == _PER_RANK for check in checks):
            checks[0] = replace(checks[0], remedy=_PER_RANK)
        return checks

    def _check_step(self) -> None:
        check = partial(check_first_step, self._module, self._samples, self._given_weight)
        checks = [[partial(check, one)] for one in ("64-true", "32-true")]
        (self._step,), errors = self._fork_first(checks, "; and in single precision: ")
        self._precision = "32-true" if errors else "64-true"
        self._notes += [Check("precision", "note", f"single, because in double precision, {one}") for one in errors]
        self._weight_by = self._step.weight_by or self._asked
        is_wrong = any(check.name == WEIGHT for check in self._step.checks)
        if is_wrong and (self._step.weight_by is None or self._given is not None):
            self._weight_by = None

    def _train_alone(self, validation: Sequence[Samples]) -> Outcome:
        loaders = [one.loader(one.sizes(), None, 1) for one in validation]
        loader = self._samples.loader(self._samples.sizes(), None, STEPS)
        return fit(self._module, loader, loaders, devices=1, precision=self._precision)

    def _check_samples(self) -> Iterable[Check]:
        """Compare what the samplers of two ranks give."""
        for number, one in enumerate(self._validation):
            if one.length is not None and one.length % 2:
                text = f"`ddp` repeats samples of validation loader {number} so that all ranks have equally many"
                remedy = "use `balanced_ddp` or `ddp_join`, under which ranks validate each sample once"
                yield Check("samples of validation", "note", text, remedy=remedy)
        if self._name == "balanced_ddp":
            return  # it divides the samples itself
        self._progress("the samples of two ranks")
        draws = [[partial(draw_indices, self._module, self._data, one)] * 2 for one in (True, False)]
        try:  # Lightning refuses to replace some samplers
            found, _ = self._fork_first(draws, "; and with its own samplers: ", are_ranks=True)
        except ImpossibleError as error:
            yield _incomparable("samples of ranks", str(error))
            return
        ours, theirs = ({one for one in walk(batches) if not isinstance(one, list | tuple)} for batches, _ in found)
        self._is_divided = self._samples.is_stream and not ours & theirs
        if len(ours & theirs) > 1:  # one may fill up the last batch
            text = f"both ranks get {len(ours & theirs)} of {len(ours | theirs)} samples"
            remedy = "let each rank have other samples, such as every second one, or use `balanced_ddp`"
            yield Check("samples of ranks", "finding", text, str(found[0][1] or ""), remedy)

    def _runs(self) -> Iterable[tuple[str, Run]]:
        """Return the runs, until one rules a strategy out: Lightning's `ddp` on equal parts, and the one that fits."""
        first, *others = sizes = self._samples.sizes()
        halves = [(one, [sum(one.sizes()) // 2] * 2) for one in self._validation]
        yield "ddp", Run(DDPStrategy, [sum(sizes) // 2] * 2, validation=halves)
        name, kind = self._recommended
        shares = kind is BalancedDDPStrategy
        for parts in ([first, sum(others)], sizes)[: len(others)]:
            if self._weight_by is None:
                return
            ones = [1] * (len(parts) - 1)
            validation = [(one, [*ones, sum(one.sizes()) - len(ones)]) for one in self._validation]
            make: Any = partial(kind, weight_by=self._weight_by, **({"split": parts} if shares else {}))
            yield name, Run(make if self._given is None else lambda: self._given, parts, shares, validation)

    def _check_run(self, strategy: str, run: Run, alone: Outcome) -> Iterable[Check]:
        name = f"`{strategy}` on {len(run.sizes)} ranks"
        try:
            outcomes = self._train(strategy, run, alone)
            name = name.replace("ddp", self._ddp) if strategy == "ddp" else name
        except TooLateError as error:
            if not error.is_deadlock:
                self._weight_by = None
                self._gathers = False
                yield _incomparable(name, f"too slow for `--limit {self._seconds:g}`", "give more time with `--limit`")
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
        is_equal = wrong is None and outcomes[0].difference is None and not self._unmatched(outcomes)
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
        self, name: str, strategy: str, outcomes: Sequence[Outcome], alone: Outcome, wrong: tuple[int, float] | None
    ) -> Check:
        """Compare ranks with each other, and with one process."""
        first, unmatched = outcomes[0], self._unmatched(outcomes)
        if first.difference is not None:
            text = f"ranks end with different values: {first.difference}"
            return Check(name, "finding", text, remedy=f"compute it from values that all ranks share{_QUEUE}")
        if wrong is None:
            self._gathers |= strategy == "ddp" and first.communicates
            reason = unmatched or ("" if first.gradients else f"no optimizer step in {STEPS} batches")
            if reason:
                return Check(name, "note", f"equal to one process, but that proves nothing: {reason}", compared=False)
            permitted = _UNUSED if strategy == "ddp" != self._ddp else ""
            return Check(name, "ok", f"ranks are identical, and train as one process{permitted}")
        step, difference = wrong
        whole = first.gradients[0] * len(outcomes)
        if self._communicates and relative_difference(whole, alone.gradients[0]) <= self._step.tolerance:
            text = "the gradient is the one of one process, divided by the number of ranks"
            return Check(name, "finding", text, remedy=_PER_RANK)
        if unmatched:
            text = f"ranks are identical; not compared with one process: {unmatched}"
            return Check(name, "note", text, remedy=DRAW_BEFORE if self._step.draws else "", compared=False)
        if strategy == "ddp" and self._step.checks[0].verdict != "ok":
            return Check(name, "note", "ranks are identical, but not as one process, for the reason in the first row")
        text = f"the gradient of step {step + 1} differs by {difference:.1e} from one process"
        states = self._step.states
        if not step or not states:
            return Check(name, "finding", text)
        text += f": each rank keeps its own {join_names([f'`{state}`' for state, _ in states])}"
        remedy = f"make it a buffer that all ranks change alike, such as by a mean over ranks{_QUEUE}"
        return Check(name, "finding", text, str(states[0][1] or ""), remedy)

    def _train(self, strategy: str, run: Run, alone: Outcome) -> list[Outcome]:
        """Return the outcomes of a run; if plain `ddp` refuses a module, of `ddp` that permits unused parameters."""
        train = partial(run.train, self._module, self._samples, self._precision, alone.draws)
        try:
            return self._fork([partial(train, rank) for rank in range(len(run.sizes))], are_ranks=True)
        except FailedError as error:
            if strategy != "ddp" or self._ddp != "ddp" or "unused parameters" not in str(error):
                raise
        self._ddp = "ddp_find_unused_parameters_true"
        permitting = partial(DDPStrategy, find_unused_parameters=True)
        return self._train(strategy, replace(run, make_strategy=permitting), alone)

    def _check_ranks(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Iterable[Check]:
        """Compare the step of each rank with the step of one process on the same samples."""
        communicates = outcomes[0].communicates
        trace = partial(trace_alone, self._module, self._samples, sizes, self._precision, communicates)
        alone = self._fork([partial(trace, rank) for rank in range(len(sizes))])
        for rank, (own, other) in enumerate(zip(outcomes, alone, strict=True)):
            if (found := compare_steps(own, other)) is not None:
                text = f"rank {rank} of {len(sizes)} computes something else than one process on the same samples"
                remedy = "leave out what depends on ranks, their number, or random numbers of a rank"
                yield Check("step of a rank", "finding", text, found, remedy)
                return

    @property
    def _recommended(self) -> tuple[str, Any]:
        """Name and class of the given strategy, or the one that fits: `balanced_ddp` divides samples itself."""
        divides = self._samples.are_collated and not self._is_divided
        name = self._name or ("balanced_ddp" if divides else "ddp_join")
        return name, _KINDS[name]

    def use(self) -> str:
        """Return the arguments of the Trainer to use; empty if there are none, or nothing was proved in time."""
        if self._weight_by is None:
            return f'strategy="{self._ddp}"' if self._gathers else ""
        name, kind = self._recommended
        if self._weight_by == "samples":
            return f'strategy="{name}"'
        weight = f'"{self._weight_by}"' if isinstance(self._weight_by, str) else value_to_text(self._weight_by)
        return f"strategy={kind.__name__}(weight_by={weight})"


def _check_logged(outcomes: Sequence[Outcome], run: Run, alone: Outcome | None) -> Iterator[Check]:
    """Compare the logged values of ranks, and the ones that all ranks share with one process, if it trains alike."""
    monitored, expected = outcomes[0].monitored, {} if alone is None else alone.logged

    def find_line(key: str) -> str:
        """Return the line that logs a key, which may end with what Lightning appends."""
        names = (key, key.removesuffix("_step"), key.removesuffix("_epoch"), key.partition("/dataloader_idx")[0])
        return next((str(line or "") for name, line in outcomes[0].lines.items() if name in names), "")

    others: dict[tuple[str, str], list[str]] = {}  # keys that nothing monitors, by finding and remedy
    for key in {key: None for one in outcomes for key in one.logged}:
        values = [one.logged[key] for one in outcomes if key in one.logged]
        shown = ", ".join(f"{value:.4g}" for value in values)
        if len({*values}) == 1 and len(values) == len(outcomes):
            reference = expected.get(key, values[0])
            if math.isclose(values[0], reference, rel_tol=_LOGGED, abs_tol=_LOGGED):
                continue
            text = f"is {values[0]:.4g} on ranks, but {reference:.4g} in one process"
            note = "{} differ from one process", _SUMS
        elif run.shares:  # the run of `ddp` has shown it
            continue
        elif len(values) < len(outcomes):
            text, note = "only some ranks log it", ("only some ranks log {}", "log it on all ranks if it is monitored")
        else:
            text, remedy = f"each rank has its own value: {shown}", "log it with `sync_dist=True`"
            note = "each rank has its own {}; the logger writes the values of rank 0", remedy
        if key in monitored:
            yield Check(f"logged `{key}`", "finding", f"it is monitored, and {text}", find_line(key), note[1])
        else:
            others.setdefault(note, []).append(key)
    for (text, remedy), keys in others.items():
        names = join_names([f"`{key}`" for key in keys])
        yield Check("logged values", "note", text.format(names), find_line(keys[0]), remedy)
