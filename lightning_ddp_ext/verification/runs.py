"""Short training runs of forked ranks, and of one process on the same samples."""

import os
import random
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset
from typing_extensions import override

from lightning_ddp_ext._lightning import (
    Callback,
    LightningDataModule,
    LightningEnvironment,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning_ddp_ext.batches.containers import walk
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.verification.draws import Drawn, Draws
from lightning_ddp_ext.verification.held_optimizers import flat_gradient
from lightning_ddp_ext.verification.operations import GROUPS, Line, Recording, find_lines
from lightning_ddp_ext.verification.processes import note_time
from lightning_ddp_ext.verification.replay import BatchReplay, NoDropout, find_batch_norms, switch_dropout_off
from lightning_ddp_ext.verification.samples import Samples

STEPS = 2
_MOST_BATCHES, _MOST_OF_STREAM = 1000, 64  # of an epoch whose samples are compared


class Traced(NamedTuple):
    """An operation that leads to a loss."""

    name: str = ""
    lines: tuple[Line, ...] = ()  # the innermost first
    fingerprint: str = ""  # of the results
    is_outside: bool = False  # see `Operation`
    is_shared: bool = False  # it communicates, or depends on an operation that does


Trace = list[Traced]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank has at the end of a run.

    Attributes:
        tensors: Parameters, buffers and optimizer states, by name.
        gradients: The gradient that each optimizer step has got, as a vector in float64.
        logged: Logged values, by key.
        rates: Learning rates at the end.
        lines: Lines that have logged the keys.
        monitored: Keys that a scheduler or a callback reads.
        traces: Of the first step, with random numbers of Python and numpy that are those of this rank: with the random
            numbers of torch of one process, and with others.
        draws: Random numbers of the steps of training and validation.
        is_matched: Whether these are the ones of one process.
    """

    tensors: dict[str, Tensor]
    gradients: list[Tensor]
    logged: dict[str, float]
    rates: list[float]
    lines: dict[str, Line | None]
    monitored: set[str]
    traces: tuple[Trace, Trace]
    draws: list[list[Drawn]]
    is_matched: bool

    @property
    def communicates(self) -> bool:
        """Whether the first step communicates."""
        return any(one.name.startswith(GROUPS) for one in self.traces[0])


class Stopped(Exception):
    """Ends a run whose result is known."""


class _Watch(Callback):
    """Watches a run: traces the first step, and notes who logs which value."""

    def __init__(self, stops: bool, make_draws: Callable[[int], Draws]) -> None:
        self._make_draws = make_draws
        self.draws: list[Draws] = []
        self.traces: tuple[Trace, Trace] = [], []
        self.lines: dict[str, Line | None] = {}
        self.monitored: set[str] = set()
        self.gradients: list[Tensor] = []
        self._stops = stops

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append(torch.cat([flat_gradient(one) for one in pl_module.parameters()]))

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        log = pl_module.log

        def noting(name: str, *args: Any, **kwargs: Any) -> None:
            self.lines.setdefault(name, next(iter(find_lines()), None))
            log(name, *args, **kwargs)

        pl_module.log = noting  # type: ignore[method-assign]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        for part in find_batch_norms(pl_module):
            part.eval()  # its statistics are those of a part by nature
        if batch_idx == 0:
            self._look_at_first(trainer, pl_module, batch, batch_idx)
        self._begin_draws()

    @override
    def on_validation_batch_start(self, *_: Any) -> None:
        self._begin_draws()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.draws[-1].__exit__(None, None, None)

    @override
    def on_validation_batch_end(self, *_: Any) -> None:
        self.draws[-1].__exit__(None, None, None)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        note_time(exception)

    def _begin_draws(self) -> None:
        self.draws.append(self._make_draws(len(self.draws)))
        self.draws[-1].__enter__()

    def _look_at_first(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        replay, rank = BatchReplay(trainer, pl_module, batch, batch_idx), trainer.global_rank
        self.traces = _trace(replay, rank, 0), _trace(replay, rank, 1 + rank)
        if self._stops:
            raise Stopped
        monitors = [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        monitors += [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        self.monitored.update(filter(None, monitors))


def _trace(replay: BatchReplay, seed: int, torch_seed: int) -> Trace:
    """Return the operations of the step that lead to its loss."""
    with replay.training_unaffected():
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(torch_seed)
        step = replay.run(replay.batch, record=Recording, refuses_collectives=False)
    assert step.recording is not None
    leading, shared = step.recording.leading_to(step.losses), set[int]()
    found = []
    for place, one in enumerate(step.recording.operations):
        if one.communicates or one.sources & shared:
            shared.add(place)
        if place in leading or one.communicates:
            text = value_to_text(one.results) if one.is_computed else ""
            found.append(Traced(one.name, one.lines, text, one.is_outside, place in shared))
    return found


class StepDifference(NamedTuple):
    """The first operation of a rank that one process does not do alike."""

    line: Line | None  # None if no line of the user leads to it
    is_outside: bool = False  # only results differ, of an operation that `is_outside`


def find_difference(own: Outcome, alone: Outcome) -> StepDifference | None:
    """Find the first operation of a rank that one process does not do alike; None if there is none.

    With other random numbers of torch, results may differ, but not which operations there are.
    """
    for number, (ours, theirs) in enumerate(zip(own.traces, alone.traces, strict=True)):
        before: tuple[Line, ...] = ()
        longer, shorter = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
        for one, other in zip_longest(longer, shorter, fillvalue=Traced()):
            if one[:2] != other[:2]:  # the outermost line that is different
                pairs = (zip_longest(reversed(one.lines), reversed(near)) for near in (before, other.lines))
                line = next((line for line, another in chain(*pairs) if line and line != another), None)
                # The number of operations on shared values may depend on the number of ranks.
                return None if one.is_shared else StepDifference(line)
            if one.fingerprint != other.fingerprint and not number and not one.is_shared:
                return StepDifference(next(iter(one.lines), None), one.is_outside)
            before = one.lines
    return None


def draw_indices(
    module: LightningModule, data: Any, rank: int, ranks: int, port: int, replaces: bool
) -> tuple[list[Any], Line | None]:
    """Return the samples that a rank gets in an epoch under `ddp`, and the line of the sampler or stream they are from.

    If Lightning `replaces` samplers, as by default, each rank gets samples of its own. Samples are indices, or hashes
    of what a stream gives.
    """
    launch(rank, ranks, port)
    trainer = quiet_trainer(
        callbacks=[_Draw()],
        strategy="ddp",
        devices=ranks,
        plugins=[LightningEnvironment()],
        use_distributed_sampler=replaces,
    )
    with suppress(Stopped):
        trainer.fit(
            module, **({"datamodule": data} if isinstance(data, LightningDataModule) else {"train_dataloaders": data})
        )
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
    return drawn, code and Line(code.co_filename, code.co_firstlineno)


class _Draw(Callback):
    """Ends a run before its first step."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise Stopped


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer of CPUs that trains one epoch, and writes nothing but into a temporary folder."""
    return Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tempfile.gettempdir(),
        **{"limit_val_batches": 0, **options},
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """A run of some ranks.

    Attributes:
        make_strategy: Returns the strategy.
        sizes: Numbers of samples of the parts.
        shares: Whether the strategy divides whole batches itself.
        validation: Samples of the validation loaders, and the sizes of their parts.
    """

    make_strategy: Callable[[], Any]
    sizes: Sequence[int]
    shares: bool = False
    validation: Sequence[tuple[Samples, Sequence[int]]] = ()

    def ranks(
        self, module: LightningModule, samples: Samples, precision: Any, drawn: list[list[Drawn]]
    ) -> list[Callable[[], Outcome]]:
        """Return what each rank does, with the random numbers of one process."""
        port = free_port()
        return [
            partial(self._train, module, samples, precision, drawn, rank, port) for rank in range(len(self.sizes))
        ]  # fmt: skip

    def _train(
        self,
        module: LightningModule,
        samples: Samples,
        precision: Any,
        drawn: list[list[Drawn]],
        rank: int,
        port: int,
    ) -> Outcome:
        def make_draws(place: int) -> Draws:
            sizes = self.sizes if self.shares or place < STEPS else self.validation[place - STEPS][1]
            return Draws(drawn[place], sum(sizes[:rank]) / sum(sizes), sum(sizes[: rank + 1]) / sum(sizes))

        ranks = len(self.sizes)
        launch(rank, ranks, port)
        place = None if self.shares else rank
        loader = samples.loader(self.sizes, place, STEPS)
        options = {"strategy": self.make_strategy(), "devices": ranks, "plugins": [LightningEnvironment()]}
        options["use_distributed_sampler"] = False
        validation = [own.loader(sizes, place, 1) for own, sizes in self.validation]
        return fit(module, loader, precision, validation, make_draws=make_draws, **options)


def fit(
    module: LightningModule,
    loader: Any,
    precision: Any,
    validation: Sequence[Any] = (),
    stops: bool = False,
    make_draws: Callable[[int], Draws] = lambda place: Draws(),
    **options: Any,
) -> Outcome:
    """Train in this process without dropout, and validate; if it `stops`, only trace the first step."""
    seed_everything(0, verbose=False)
    switch_dropout_off(module)
    watch = _Watch(stops, make_draws)
    options |= {"limit_val_batches": 1.0} if validation else {}
    trainer = quiet_trainer(callbacks=[watch], precision=precision, **options)
    with NoDropout(), suppress(Stopped):
        # A step without `dataloader_idx` is for a single loader.
        trainer.fit(module, loader, validation if len(validation) > 1 else next(iter(validation), None))
    tensors = {f"`{name}`": one.detach().cpu() for name, one in module.state_dict().items() if isinstance(one, Tensor)}
    for number, optimizer in enumerate(trainer.optimizers):
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, Tensor):
                    tensors[f"`{key}` of parameter {index} of optimizer {number}"] = value.detach().cpu()
    logged = {key: float(value) for key, value in trainer.callback_metrics.items() if value.numel() == 1}
    rates = [float(group.get("lr", 0.0)) for one in trainer.optimizers for group in one.param_groups]
    return Outcome(
        tensors, watch.gradients, logged, rates, watch.lines, watch.monitored, watch.traces,
        [one.taken for one in watch.draws], all(one.is_matched for one in watch.draws),
    )  # fmt: skip


def launch(rank: int, ranks: int, port: int) -> None:
    """Set the variables of Lightning's launcher."""
    values = {"MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="127.0.0.1")


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
