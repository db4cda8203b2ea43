"""Checks whether several devices train what one device trains, and names the line that is the reason if not."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext._lightning import (
    DDPStrategy,
    LightningEnvironment,
    LightningModule,
)
from lightning_ddp_ext.errors import ImpossibleError
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.verification.first_step import FirstStep, check_first_step, check_gradient
from lightning_ddp_ext.verification.logged_values import check_logged
from lightning_ddp_ext.verification.processes import TooLateError, run_forked
from lightning_ddp_ext.verification.report import Check, Report, join_names, show_line
from lightning_ddp_ext.verification.runs import (
    STEPS,
    Outcome,
    Run,
    draw_indices,
    find_difference,
    fit,
    free_port,
    launch,
)
from lightning_ddp_ext.verification.samples import Samples, draw_samples

Progress = Callable[[str], None]
_LEAST, _GROWTH = 1e-6, 1000  # rounding in the gradient of the second step: at least, and beside that of the first
_LEAST_LIMIT, _SLOWER = 20.0, 10.0  # seconds of a run of ranks, and beside those of a run of one process
_EACH_ONCE = "use `balanced_ddp` or `ddp_join`, under which ranks validate each sample once"
_PER_RANK = "`ddp` takes the mean over ranks: divide by the mean of the ranks' numbers, not by their sum"
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


def _trace_alone(
    module: LightningModule, samples: Samples, sizes: Sequence[int], part: int, precision: Any, communicates: bool
) -> Outcome:
    """Trace the first step of one process on a part of the samples; of one rank if the step communicates."""
    options: dict[str, Any] = {}
    if communicates:
        launch(0, 1, free_port())
        options = {"strategy": "ddp", "plugins": [LightningEnvironment()], "use_distributed_sampler": False}
    return fit(module, samples.loader(sizes, part, 1), precision, stops=True, devices=1, **options)


class _Verifier:
    """The checks of a module on some samples."""

    def __init__(
        self,
        module: LightningModule,
        data: Any,
        samples: Samples,
        validation: list[Samples],
        notes: list[Check],
        deadline: float,
        progress: Progress,
    ) -> None:
        self._data, self._validation, self._notes = data, validation, notes
        self._module, self._samples, self._deadline, self._progress = module, samples, deadline, progress
        self._limit = math.inf  # seconds of a run
        self._precision = _PRECISIONS[0]
        self._step: FirstStep | None = None
        self._weight_by: str | None = None
        self._communicates = False  # the step does
        self._ddp = "ddp"  # the name of the strategy that trains the module
        self._is_divided = False  # a stream that gives each rank samples of its own
        self.equal: list[str] = []  # strategies that train as one process

    def _fork(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        return run_forked(functions, min(self._deadline, time.monotonic() + self._limit))

    def run(self) -> list[Check]:
        """Run all checks."""
        self._progress("one step on a batch and on its parts")
        for precision in _PRECISIONS:
            self._precision = precision
            try:
                (self._step,) = self._fork([partial(check_first_step, self._module, self._samples, precision)])
                break
            except ImpossibleError:
                if precision == _PRECISIONS[-1]:
                    raise
        assert self._step is not None
        self._weight_by = self._step.weight_by
        checks = [*check_gradient(self._step), *self._check_samples(), *self._check_validation_samples()]
        checks += self._notes
        self._progress("two steps in one process")
        started = time.monotonic()
        try:
            (alone,) = self._fork([self._train_alone])
        except ImpossibleError as error:
            if not self._validation:
                raise
            self._validation = []
            text = f"not compared: with it, training ends with an error: {error}"
            checks.append(Check("validation", "note", text, compared=False))
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
        if self._gathers and checks[0].verdict == "finding":
            # Such as a contrastive loss over features that ranks gather.
            checks[0] = replace(
                checks[0], verdict="ok", remedy="", text=f"{checks[0].text}; `{self._ddp}` trains as one process"
            )
        elif checks[0].verdict == "finding" and any(check.remedy == _PER_RANK for check in checks):
            checks[0] = replace(checks[0], remedy=_PER_RANK)
        return checks

    def _train_alone(self) -> Outcome:
        loader = self._samples.loader(self._samples.sizes(), None, STEPS)
        validation = [one.loader(one.sizes(), None, 1) for one in self._validation]
        return fit(self._module, loader, self._precision, validation, devices=1)

    def _check_samples(self) -> Iterable[Check]:
        """Compare what the samplers of two ranks give."""
        self._progress("the samples of two ranks")
        draw = partial(draw_indices, self._module, self._data, ranks=2)
        for replaces in (True, False):  # Lightning refuses to replace some samplers
            port = free_port()
            try:
                found = self._fork([partial(draw, rank, port=port, replaces=replaces) for rank in (0, 1)])
                break
            except ImpossibleError as error:
                problem = str(error)
        else:
            yield Check("samples of ranks", "note", f"not compared: {problem}", compared=False)
            return
        (one, line), (other, _) = found
        ours, theirs = ({index for batch in batches for index in _flat(batch)} for batches in (one, other))
        self._is_divided = self._samples.is_stream and not ours & theirs
        if len(ours & theirs) > 1:  # one may fill up the last batch
            yield Check(
                "samples of ranks", "finding", f"both ranks get {len(ours & theirs)} of {len(ours | theirs)} samples",
                show_line(line), "let each rank have other samples, such as every second one, or use `balanced_ddp`",
            )  # fmt: skip

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
        assert self._step is not None
        name = f"`{strategy}` on {len(run.sizes)} ranks"
        try:
            outcomes = self._train(strategy, run, alone)
            name = name.replace("ddp", self._ddp) if strategy == "ddp" else name
        except TooLateError as error:
            if time.monotonic() >= self._deadline and not error.communicates:
                self._weight_by = None
                text, remedy = "not compared: the time limit is over", "give more time with `limit`"
                yield Check(name, "note", text, remedy=remedy, compared=False)
                return
            place, line = next(iter(error.waiting.items()))
            text = f"training does not end: rank {place} waits for others that have gone on"
            yield Check(
                "step of a rank", "finding", text, show_line(line), "let all ranks make the same collective calls"
            )
            yield Check(name, "note", "not compared: training does not end", compared=False)
            return
        except ImpossibleError as error:
            yield Check(name, "finding", f"training ends with an error: {error}")
            return
        first, *others = outcomes
        self._communicates |= first.communicates
        different = [key for key in first.tensors if any(not _same(first.tensors, one.tensors, key) for one in others)]
        differences = [_relative(*both) for both in zip(first.gradients, alone.gradients, strict=False)]
        if len(first.gradients) != len(alone.gradients):
            differences.append(math.inf)
        allowed = [self._step.finding.tolerance, max([_LEAST, *(_GROWTH * one for one in differences[:1])])]
        wrong = next((step for step, one in enumerate(differences) if not one <= allowed[min(step, 1)]), None)
        unmatched = self._step.finding.draws
        if not unmatched and not all(one.is_matched for one in outcomes):
            unmatched = "ranks draw other random numbers than one process"
        if not run.shares and not (first.communicates and wrong is None):
            yield from self._check_ranks(outcomes, run.sizes)
        factor = first.gradients[0] * len(run.sizes)
        is_divided = first.communicates and _relative(factor, alone.gradients[0]) <= allowed[0]
        if different:
            remedy = "compute them from values that all ranks share"
            yield Check(name, "finding", f"ranks end with different values of {join_names(different)}", remedy=remedy)
        elif wrong is None:
            self.equal.append(strategy)
            yield Check(name, "ok", "ranks are identical, and train as one process")
        elif first.rates != alone.rates and wrong > 0:
            pairs = zip(first.rates, alone.rates, strict=True)
            one, other = next(both for both in pairs if both[0] != both[1])
            text = f"ranks are identical, with a learning rate of {one:g}; in one process it is {other:g}"
            yield Check(name, "note", text, compared=False)
        elif is_divided:
            text = "the gradient is the one of one process, divided by the number of ranks"
            yield Check(name, "finding", text, remedy=_PER_RANK)
        elif unmatched:
            yield Check(
                name, "note", f"ranks are identical; not compared with one process: {unmatched}", compared=False
            )
        elif strategy == "ddp" and self._weight_by != "samples":
            text = "ranks are identical; not compared with one process, for the reason above"
            yield Check(name, "note", text, compared=False)
        else:
            text = f"the gradient of step {wrong + 1} differs by {differences[wrong]:.1e} from one process"
            states = self._step.finding.states if wrong else []
            if states:
                text += f": each rank keeps its own {join_names([f'`{state}`' for state, _ in states])}"
            remedy = "make it a buffer that all ranks change alike, such as by a mean over ranks" if states else ""
            yield Check(name, "finding", text, show_line(states[0][1]) if states else "", remedy)
        yield from check_logged(outcomes, run, alone if strategy in self.equal and not unmatched else None)

    def _train(self, strategy: str, run: Run, alone: Outcome) -> list[Outcome]:
        """Return the outcomes of a run; if plain `ddp` refuses a module, of `ddp` that permits unused parameters."""
        train = partial(run.ranks, self._module, self._samples, self._precision, alone.draws)
        try:
            return self._fork(train())
        except TooLateError:
            raise
        except ImpossibleError:
            if strategy != "ddp":
                raise
            permitting = partial(DDPStrategy, find_unused_parameters=True)
            outcomes = self._fork(replace(run, make_strategy=permitting).ranks(*train.args))
            self._ddp = "ddp_find_unused_parameters_true"
            return outcomes

    def _check_ranks(self, outcomes: Sequence[Outcome], sizes: Sequence[int]) -> Iterable[Check]:
        """Compare the step of each rank with the step of one process on the same samples."""
        assert self._step is not None
        communicates = outcomes[0].communicates
        trace = partial(_trace_alone, self._module, self._samples, sizes)
        alone = self._fork([partial(trace, rank, self._precision, communicates) for rank in range(len(sizes))])
        for rank, (own, other) in enumerate(zip(outcomes, alone, strict=True)):
            found = find_difference(own, other)
            if found is not None and found.is_outside and self._step.finding.draws:
                continue  # as noise of each sample that numpy has drawn
            if found is not None:
                yield Check(
                    "step of a rank", "finding",
                    f"rank {rank} of {len(sizes)} computes something else than one process on the same samples",
                    show_line(found.line), "leave out what depends on ranks, their number, or random numbers of a rank",
                )  # fmt: skip
                return

    @property
    def _recommended(self) -> tuple[str, Any]:
        """Name and class of the strategy that fits the data: `balanced_ddp` divides the samples of all ranks itself."""
        divides = self._samples.are_collated and not self._is_divided
        return ("balanced_ddp", BalancedDDPStrategy) if divides else ("ddp_join", DDPJoinStrategy)

    @property
    def _gathers(self) -> bool:
        """Whether ranks exchange what a step needs, so that `ddp` trains as one process."""
        return self._communicates and "ddp" in self.equal

    def use(self) -> str:
        """Return the arguments of the Trainer to use."""
        if self._weight_by is None:
            return f'strategy="{self._ddp}"' if self._gathers else ""
        name, kind = self._recommended
        if self._weight_by == "samples":
            return f'strategy="{name}"'
        return f'strategy={kind.__name__}(weight_by="{self._weight_by}")'


def _flat(batch: Any) -> Iterable[Any]:
    """Return the indices of a batch."""
    return (one for index in batch for one in _flat(index)) if isinstance(batch, list | tuple) else [batch]


def _relative(one: Tensor, other: Tensor) -> float:
    """Return the norm of a difference, relative to the norm of the other vector."""
    return float((one - other).norm() / other.norm().clamp(min=torch.finfo(other.dtype).tiny))


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], key: str) -> bool:
    return key in other and torch.equal(one[key], other[key])
