"""Short training runs of forked ranks, and of one process on the same samples."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset
from typing_extensions import override

from lightning_ddp_ext._lightning import (
    Callback,
    LambdaCallback,
    LightningDataModule,
    LightningEnvironment,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning_ddp_ext._output import logged_numbers
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.consistency import find_difference, name_training_state, value_to_text
from lightning_ddp_ext.resume.rng_state import SeededRng, find_loader_rngs, seed_all
from lightning_ddp_ext.verification.operations import GROUPS, Drawn, Draws, Line, Recording, find_lines, is_own_file
from lightning_ddp_ext.verification.processes import launch_variables, note_time
from lightning_ddp_ext.verification.replay import BatchReplay, NoDropout, find_batch_norms, flat_gradient
from lightning_ddp_ext.verification.samples import Samples

STEPS = 2
_SEEDS = 994186, 1471999  # whose first numbers of Python, numpy and torch are near 0 and near 1
_MOST_BATCHES, _MOST_OF_STREAM = 1000, 64  # of an epoch whose samples are compared


class Traced(NamedTuple):
    """An operation that leads to a loss."""

    name: str = ""
    lines: tuple[Line, ...] = ()  # the innermost first
    fingerprint: str = ""  # of the results
    is_shared: bool = False  # it communicates, or depends on an operation that does


@dataclass(slots=True)
class Outcome:
    """Results of a process at the end of a run."""

    gradients: list[Tensor] = field(default_factory=list)  # of the optimizer steps, as vectors in float64
    difference: str | None = None  # of the training state between ranks
    logged: dict[str, float] = field(default_factory=dict)
    lines: dict[str, Line | None] = field(default_factory=dict)  # that have logged the keys
    monitored: set[str] = field(default_factory=set)  # keys that a scheduler or a callback reads
    # Of the first step: with the random numbers of one process, and with others.
    traces: tuple[list[Traced], ...] = ()
    draws: list[list[Drawn]] = field(default_factory=list)  # of the steps of training and validation
    is_matched: bool = True  # the draws are the ones of one process

    @property
    def communicates(self) -> bool:
        """Whether the first step communicates."""
        return any(one.name.startswith(GROUPS) for trace in self.traces[:1] for one in trace)


class Stopped(Exception):
    """Ends a run whose result is known."""


def stop(*_: Any) -> None:
    """End a run."""
    raise Stopped


class _Watch(Callback):
    """Watches a run: traces the first step, notes who logs which value, and compares ranks at the end."""

    def __init__(self, traces: bool, stops: bool, make_draws: Callable[[int], Draws]) -> None:
        self.found = Outcome()
        self._traces, self._stops, self._make_draws = traces, stops, make_draws
        self._draws = Draws()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.found.gradients.append(torch.cat([flat_gradient(one) for one in pl_module.parameters()]))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log = pl_module.log

        def noting(name: str, *args: Any, **kwargs: Any) -> None:
            self.found.lines.setdefault(name, next(iter(find_lines()), None))
            log(name, *args, **kwargs)

        pl_module.log = noting  # type: ignore[method-assign]
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        monitors += [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        self.found.monitored.update(filter(None, monitors))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for part in find_batch_norms(pl_module).values():
            part.eval()  # by nature it has the statistics of a part
        if batch_idx == 0:
            seed_all(find_loader_rngs([pl_module]), 0)  # alike, even if ranks have seeded them
        if batch_idx == 0 and self._traces:
            replay, rank = BatchReplay(trainer, pl_module, batch, batch_idx), trainer.global_rank
            self.found.traces = _trace(replay, None), _trace(replay, _SEEDS[rank % 2])
            if self._stops:
                raise Stopped
        self.on_validation_batch_start()

    @override
    def on_validation_batch_start(self, *_: Any) -> None:
        self._draws = self._make_draws(len(self.found.draws))
        self._draws.__enter__()

    @override
    def on_validation_batch_end(self, *_: Any) -> None:
        self._draws.__exit__(None, None, None)
        self.found.draws.append(self._draws.taken)
        self.found.is_matched &= self._draws.is_matched

    on_train_batch_end = on_validation_batch_end  # type: ignore[assignment]  # any arguments

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if dist.is_initialized():
            difference = find_difference(name_training_state(pl_module, trainer.optimizers))
            self.found.difference = None if difference is None else difference.text

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        note_time(exception)


def _trace(replay: BatchReplay, seed: int | None) -> list[Traced]:
    """Return the operations of the step that lead to its loss; without a seed of this rank, with fingerprints."""
    with replay.training_unaffected(), SeededRng(seed or 0).drawing():
        step = replay.run(replay.batch, record=Recording, refuses_collectives=False)
    leading, shared = step.leading, set[int]()
    found = []
    for place, one in enumerate(step.operations):
        is_collective = one.name.startswith(GROUPS)
        if is_collective or one.sources & shared:
            shared.add(place)
        if place in leading or is_collective:
            text = value_to_text(one.results) if one.is_computed and seed is None else ""
            found.append(Traced(one.name, one.lines, text, place in shared))
    return found


def compare_steps(own: Outcome, alone: Outcome) -> str | None:
    """Return the line of the first operation of a rank that one process does not do alike; None if there is none.

    With other random numbers, results may differ, but not which operations there are.
    """
    for ours, theirs in zip(own.traces, alone.traces, strict=True):
        before: tuple[Line, ...] = ()
        longer, shorter = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
        for one, other in zip_longest(longer, shorter, fillvalue=Traced()):
            if one[:2] != other[:2]:  # the outermost line that is different
                pairs = (zip_longest(reversed(one.lines), reversed(near)) for near in (before, other.lines))
                line = next((line for line, another in chain(*pairs) if line and line != another), None)
                # The number of operations on shared values may depend on the number of ranks.
                inner = next(iter(one.lines), None)
                shown = line if line is None or inner in (None, line) else Line(inner.file, inner.number, caller=line)
                return None if one.is_shared else str(shown or "")
            if one.fingerprint != other.fingerprint and not one.is_shared:
                return str(next(iter(one.lines), ""))
            before = one.lines
    return None


def draw_indices(module: LightningModule, data: Any, replaces: bool) -> tuple[list[Any], Line | None]:
    """Return the samples that one of two ranks gets in an epoch, and the line of the sampler or stream they are from.

    If Lightning `replaces` samplers, as by default, each rank gets other samples. Samples are indices, or hashes
    of what a stream gives.
    """
    own = {"devices": 2, "plugins": [LightningEnvironment()], "use_distributed_sampler": replaces}
    trainer = quiet_trainer(callbacks=[LambdaCallback(on_train_start=stop)], strategy="ddp", **own)
    with suppress(Stopped):
        trainer.fit(module, **{"datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders": data})
    loader: Any = trainer.train_dataloader
    sampler = getattr(loader, "batch_sampler", None)
    source: Any = loader.dataset
    if isinstance(source, IterableDataset):
        drawn = [value_to_text([*walk(one)]) for one in islice(source, _MOST_OF_STREAM)]
    elif sampler is None:
        return [], None
    else:
        drawn = [*islice(sampler, _MOST_BATCHES)]
        source = getattr(sampler, "sampler", sampler) if type(sampler) is BatchSampler else sampler
    code = getattr(type(source).__iter__, "__code__", None)
    return drawn, Line(code.co_filename, code.co_firstlineno) if code and is_own_file(code.co_filename) else None


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer that trains one epoch on CPUs by default, and writes nothing but into a temporary folder."""
    return Trainer(**{
        "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
        "default_root_dir": tempfile.gettempdir(), "limit_val_batches": 0, **options,
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """A run of some ranks."""

    make_strategy: Callable[[], Any]
    sizes: Sequence[int]  # numbers of samples of the parts
    shares: bool = False  # the strategy divides whole batches itself
    validation: Sequence[tuple[Samples, Sequence[int]]] = ()  # samples of the loaders, and the sizes of their parts

    def train(
        self, module: LightningModule, samples: Samples, precision: Any, drawn: list[list[Drawn]], rank: int
    ) -> Outcome:
        """Train one rank, with the random numbers that one process has drawn."""

        def make_draws(place: int) -> Draws:
            sizes = self.sizes if self.shares or place < STEPS else self.validation[place - STEPS][1]
            return Draws(drawn[place], sum(sizes[:rank]) / sum(sizes), sum(sizes[: rank + 1]) / sum(sizes))

        place = None if self.shares else rank
        validation = [own.loader(sizes, place, 1) for own, sizes in self.validation]
        return fit(
            module, samples.loader(self.sizes, place, STEPS), validation, make_draws=make_draws, precision=precision,
            traces=not self.shares, strategy=self.make_strategy(), devices=len(self.sizes),
            plugins=[LightningEnvironment()],
        )  # fmt: skip


def trace_alone(
    module: LightningModule, samples: Samples, sizes: Sequence[int], precision: Any, communicates: bool, part: int
) -> Outcome:
    """Trace the first step of one process on a part of the samples; of one rank if the step communicates."""
    options: dict[str, Any] = {}
    if communicates:
        os.environ.update(launch_variables(1, port=0), LOCAL_RANK="0")
        options = {"strategy": "ddp", "plugins": [LightningEnvironment()]}
    return fit(module, samples.loader(sizes, part, 1), stops=True, devices=1, precision=precision, **options)


def fit(
    module: LightningModule,
    loader: Any,
    validation: Sequence[Any] = (),
    *,
    traces: bool = True,
    stops: bool = False,
    callbacks: Sequence[Callback] = (),
    make_draws: Callable[[int], Draws] = lambda place: Draws(),
    **options: Any,
) -> Outcome:
    """Train in this process without dropout, and validate; if it `stops`, only trace the first step."""
    seed_everything(0, verbose=False)
    watch = _Watch(traces, stops, make_draws)
    options = {"limit_val_batches": 1.0 if validation else 0, "use_distributed_sampler": False, **options}
    trainer = quiet_trainer(callbacks=[*callbacks, watch], **options)
    with NoDropout(module), suppress(Stopped):
        # A step without `dataloader_idx` is for a single loader.
        trainer.fit(module, loader, validation if len(validation) > 1 else next(iter(validation), None))
    watch.found.logged = logged_numbers(trainer)
    return watch.found
