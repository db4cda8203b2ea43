"""Training on ranks: one classifier, its data, runs of named cases on all ranks, and the same run in one process."""

import hashlib
import os
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy
from tests.support import training
from tests.support.processes import run_processes
from tests.support.training import CLASSES, FEATURES, quiet_trainer

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STRATEGIES: dict[str, Callable[..., Any]] = {"ddp_checkpoint": DDPCheckpointStrategy, "ddp_join": DDPJoinStrategy}
COUNTS = (8, 4, 2)  # samples of three ranks, in batches of two
Batch = tuple[Tensor, Tensor, Tensor]


def samples(number: int) -> Batch:
    """Features, labels and indices, the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(number, FEATURES, generator=generator, dtype=torch.float64)
    return features, torch.randint(CLASSES, (number,), generator=generator), torch.arange(number)


class Stream(IterableDataset):
    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class SizedStream(Stream):
    """Announces a number of items, which may be wrong; workers share the items."""

    def __init__(self, items: Sequence[Any], length: int) -> None:
        super().__init__(items)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return iter(self.items if worker is None else self.items[worker.id :: worker.num_workers])


def loader(*counts: int, stream: bool = False) -> DataLoader:
    """Load this rank's samples in batches of two; samples are numbered over all ranks."""
    part = torch.split(torch.arange(sum(counts)), counts)[RANK]
    data = TensorDataset(*(column[part] for column in samples(sum(counts))))
    return DataLoader(Stream(list(data)) if stream else data, batch_size=2)


# ---------------------------------------------------------------- models


class Classifier(training.Classifier):
    """Logs the loss of all ranks; batches are features, labels and indices."""

    def __init__(
        self, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, is_sum: bool = False, **options: Any
    ) -> None:
        super().__init__(optimizer, **{"lr": 0.05, **options})
        self.is_sum = is_sum
        self.seen: list[Any] = []

    def mean_loss(self, batch: Any, **options: Any) -> Tensor:
        return functional.cross_entropy(self.network(batch[0].to(self.network[0].weight.dtype)), batch[1], **options)

    def loss(self, batch: Any) -> Tensor:
        return self.mean_loss(batch, reduction="sum") / 30 if self.is_sum else self.mean_loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.extend(batch[2].tolist())
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.mean_loss(batch), on_step=True, on_epoch=True, sync_dist=True)


Momentum = partial(Classifier, torch.optim.SGD, lr=0.1, momentum=0.9)


class Fused(torch.optim.Optimizer):
    """Steps inside of the backward pass, as LOMO does: no gradient is left when it has ended."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self.update)

    @torch.no_grad()
    def update(self, parameter: Tensor) -> None:
        parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        parameter.grad = None

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class Polyak(torch.optim.SGD):
    """Chooses the size of a step by the loss (Polyak, 1987), with the optimum of the loss taken as 0."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        square = sum(float(parameter.grad.square().sum()) for parameter in parameters)
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.2 * float(loss) / square * parameter.grad
        return loss


class Noisy(torch.optim.SGD):
    """Adds noise before and after its closure has run, as optimizers for sampling do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.add_noise()
        loss = super().step(closure)
        self.add_noise()
        return loss

    def add_noise(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)


class Adversaries(LightningModule):
    """Manual optimization with two optimizers; the generator's gradients pass through the discriminator."""

    def __init__(self, toggle: bool = True, accumulate: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggle, self.accumulate = toggle, accumulate
        self.generator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        for optimizer, make_loss in zip(self.optimizers(), (self.generator_loss, self.discriminator_loss), strict=True):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            if self.accumulate:
                with optimizer.toggle_model(sync_grad=False):
                    self.manual_backward(make_loss(real) / 2)
            self.manual_backward(make_loss(real) / (2 if self.accumulate else 1))
            optimizer.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def generator_loss(self, real: Tensor) -> Tensor:
        return self.discriminator(self.generator(real[:, :2])).sigmoid().log().mean().neg()

    def discriminator_loss(self, real: Tensor) -> Tensor:
        made = self.generator(real[:, :2]).detach()
        return self.discriminator(made).sigmoid().mean() - self.discriminator(real).sigmoid().mean()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.05) for part in (self.generator, self.discriminator)]


# ---------------------------------------------------------------- runs


def digest_of(module: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Hash parameters, buffers and the state of optimizers."""
    tensors = [*module.state_dict().values()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, dict) else [state]
            tensors += [value for value in values if isinstance(value, Tensor)]
    as_bytes = (tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(b"".join(as_bytes)).hexdigest()


class Trace(Callback):
    """Records a run: gradients before every optimizer step, and the state and values of this rank after every batch."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.digests: list[str] = []
        self.steps: list[tuple[int, ...]] = []  # epoch, and numbers of steps; loggers use the last one
        self.metrics: list[dict[str, float]] = []
        self.is_shadow: list[bool] = []
        self.validations: list[tuple[int, float]] = []  # global step and loss
        self.parameters = torch.empty(0)  # after the run

    def __getstate__(self) -> dict[str, Any]:
        methods = ("log", "log_dict")  # of the module; Lightning adds them
        return {name: value for name, value in vars(self).items() if name not in methods}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        flat = [gradient.detach().flatten().cpu() for gradient in gradients if gradient is not None]
        self.gradients.append(torch.cat([torch.empty(0), *flat]))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.digests.append(digest_of(module, *trainer.optimizers))
        self.steps.append(
            (trainer.current_epoch, trainer.global_step, loop.total_batch_idx, loop._batches_that_stepped)
        )
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.is_shadow.append(getattr(trainer.strategy, "is_shadow", False))

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validations.append((trainer.global_step, float(trainer.callback_metrics.get("val_loss", 0.0))))


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    """Make a trainer of one epoch on all ranks, under `ddp_join` unless the options say otherwise."""
    defaults: dict[str, Any] = {
        "strategy": "ddp_join",
        "devices": WORLD_SIZE,
        "precision": "64-true",
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "callbacks": list(callbacks),
    }
    return quiet_trainer(**{**defaults, **options})


def fit(
    module: LightningModule,
    *loaders: Any,
    callbacks: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[Trainer, Trace]:
    """Train on this rank, by default on `COUNTS` samples, or in one process with `**ALONE`."""
    trace = Trace()
    made = trainer(trace, *callbacks, **options)
    made.fit(module, *(loaders or [loader(*COUNTS)]), ckpt_path=ckpt_path)
    trace.parameters = nn.utils.parameters_to_vector(module.parameters()).detach().cpu()
    return made, trace


ALONE: dict[str, Any] = {"strategy": "auto", "devices": 1}


def part_of_a_run(path: str, steps: int, is_first: bool) -> dict[str, Any]:
    """Return options of a run that ends with a checkpoint after a step, or of a run that resumes from it."""
    if not is_first:
        return {"ckpt_path": f"{path}.ckpt"}
    folder, name = os.path.split(path)
    saving = ModelCheckpoint(folder, name, every_n_train_steps=steps, save_top_k=-1)
    return {"callbacks": [saving], "enable_checkpointing": True, "max_steps": steps}


# ---------------------------------------------------------------- cases on ranks


class CaseError(str):
    """Traceback of a case that failed on a rank."""


def run_cases(cases: Mapping[str, Callable[[str], Any]], folder: str) -> dict[str, Any]:
    """Run cases on this rank one after another; returns for each its value or its error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, case in cases.items():
        seed_everything(0, verbose=False)
        try:
            found[name] = case(folder)
        except (Exception, pytest.fail.Exception):
            found[name] = CaseError(traceback.format_exc())
    return found


def with_slow(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Return the values of a parameter, of which those that are not quick are slow tests."""
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def selected(request: pytest.FixtureRequest, argument: str) -> set[str]:
    """Return the values of a parameter in the tests of this module that were selected."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return {call.params[argument] for call in calls if call is not None and argument in call.params}


def run_on_ranks(
    world_size: int,
    cases: Mapping[str, Callable[[str], Any]] | Sequence[Callable[[str], Any]],
    folder: Any = "",
    timeout: float = 280,
    **options: Any,
) -> dict[str, list[Any]]:
    """Run named cases, or functions with these names, in one launch; returns for each its values on all ranks."""
    named = cases if isinstance(cases, Mapping) else {case.__name__: case for case in cases}
    by_rank = run_processes(run_cases, world_size, named, str(folder), timeout=timeout, **options)
    return {name: [of_rank[name] for of_rank in by_rank] for name in named}


def values_of(found: Mapping[str, list[Any]], case: str | Callable[[str], Any]) -> list[Any]:
    """Return the value of a case on each rank; fails with the errors, if there are any."""
    values = found[case if isinstance(case, str) else case.__name__]
    errors = [f"rank {rank}: {value}" for rank, value in enumerate(values) if isinstance(value, CaseError)]
    assert not errors, "\n".join(errors)
    return values


def errors_of(found: Mapping[str, list[Any]], case: str) -> list[CaseError]:
    """Return the traceback of a case on each rank; fails if a rank has none."""
    assert all(isinstance(value, CaseError) for value in found[case]), found[case]
    return found[case]


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def assert_identical(value: Any) -> None:
    """Assert on every rank that all ranks have this value."""
    values = gather(value)
    assert all(other == values[0] for other in values), values
    assert value
