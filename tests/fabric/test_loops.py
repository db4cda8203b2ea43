"""Loops of Fabric on ranks: data, checkpoints, several models, values of ranks, and misuse. One launch."""

import re
import time
import warnings
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import chain, permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import (
    BatchSplitError,
    OtherRankError,
    RanksOutOfStepError,
    UnevenInputsError,
    UnsupportedFeatureError,
    UnsynchronizedGradientsError,
)
from lightning_ddp_ext.fabric import BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.fabric.loaders import FabricLoader, LoopBatch
from lightning_ddp_ext.loaders.step_loader import EvenSource
from tests.strategies.toolkit import RANK, WORLD_SIZE, Stream, digest_of, gather, run_on_ranks, samples, values_of


def launched(strategy: Any = None, **options: Any) -> Fabric:
    fabric = Fabric(strategy=strategy or DDPJoinStrategy(), accelerator="cpu", devices=WORLD_SIZE, **options)
    fabric.launch()
    return fabric


def prepare(strategy: Any, data: Any = (), batch_size: int | None = None, is_dealt: bool = False) -> tuple[Any, ...]:
    """Set up a layer of one weight, an optimizer, and a loader of this rank's data, or of data that are dealt out."""
    fabric = launched(strategy)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size), use_distributed_sampler=is_dealt)
    return fabric, model, optimizer, loader


STRATEGIES = {
    "ddp_checkpoint": DDPCheckpointStrategy,
    "ddp_join": DDPJoinStrategy,
    "balanced_ddp": lambda: BalancedDDPStrategy(split=[1, 3]),
}


class Noisy(torch.utils.data.Dataset):
    """Draws random numbers for each sample in the process of its rank."""

    def __init__(self, size: int) -> None:
        self.features = samples(size)[0].float()

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Tensor:
        return self.features[index] + 0.1 * torch.randn(5)


class Run:
    """Two epochs with dropout, shuffling and noise; `stop` is the number of the step after which it saves and ends."""

    def __init__(
        self, path: Path, stop: int | None = None, resumes: bool = False, stream: bool = False, shares: bool = False
    ) -> None:
        fabric = launched(BalancedDDPStrategy(split=[1, 3]) if shares else None)
        seed_everything(RANK, verbose=False)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        model, optimizer = fabric.setup(self.model, optimizer)
        data: Any = Noisy(13)
        if stream:
            parts = [13] * WORLD_SIZE if shares else [8, 5]  # of each rank
            data = Stream(
                list(samples(13)[0].float()[: parts[RANK]] if shares else samples(13)[0].float().split(parts)[RANK])
            )
        loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2, shuffle=not stream))
        state = {"model": model, "optimizer": optimizer, "step": 0, "epoch": 0}
        if resumes:
            remainder = fabric.load(path, state)
            assert remainder == {}
        self.digests = []
        for epoch in range(state["epoch"], 2):
            state["epoch"] = epoch
            for batch in loader:
                optimizer.zero_grad()
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                state["step"] += 1
                self.digests.append(digest_of(model, optimizer.optimizer))
                if state["step"] == stop:
                    fabric.save(path, state)
                    return


@pytest.mark.ranks(2)
def test_a_checkpoint_in_the_middle_of_an_epoch_continues_bit_for_bit(folder: str) -> None:
    for stream, shares in ((False, False), (True, False), (False, True), (True, True)):
        path = Path(folder) / f"{stream}-{shares}.ckpt"
        whole = Run(path, stream=stream, shares=shares).digests
        for stop in (2, len(whole) // 2, len(whole) // 2 + 1):
            before = Run(path, stop, stream=stream, shares=shares).digests
            torch.rand(3)  # something else draws
            after = Run(path, resumes=True, stream=stream, shares=shares).digests
            assert before + after == whole
        assert len(whole) == len(set(whole)) > 6
        assert gather(whole) == [whole] * WORLD_SIZE


@pytest.mark.ranks(2)
def test_loading_inside_of_a_loop_and_before_setup(folder: str) -> None:
    """A reducer knows after loading before `setup` what another one has learned before the checkpoint."""
    path = Path(folder) / "other times.ckpt"
    fabric = launched(DDPCheckpointStrategy())
    model = fabric.setup(nn.Linear(5, 1))
    loader = fabric.setup_dataloaders(DataLoader(samples(12)[0].float(), batch_size=2))
    batches = iter(loader)
    for call in (fabric.save, fabric.load):
        fabric.backward(model(next(batches)).sum())
        call(path, {})
    with pytest.raises(UnsupportedFeatureError, match="inside of a loop over it"):
        next(batches)
    learned = fabric.strategy._reducer.state_dict()
    fabric = launched(DDPCheckpointStrategy())
    fabric.load(path, {})
    fabric.setup(nn.Linear(5, 1))
    assert fabric.strategy._reducer.state_dict()["layout"] == learned["layout"] != []


@pytest.mark.ranks(2)
def test_every_sample_is_used_once_and_loops_end_together() -> None:
    fabric = launched()
    data = TensorDataset(*samples(7))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=2))
    seen = [[] for _ in range(2)]
    for epoch in seen:
        for _, _, indices in loader:
            epoch.append([] if fabric.strategy.is_shadow else indices.tolist())
    assert len(loader) == len(seen[0]) == len(seen[1]) == 2
    for epochs in zip(*gather(seen), strict=True):
        assert sorted(chain(*chain(*epochs))) == list(range(7))


@pytest.mark.ranks(2)
def test_values_are_those_of_the_active_ranks() -> None:
    fabric = launched()
    batches = [torch.full((1,), float(10 * RANK + number)) for number in range(2 - min(RANK, 1))]
    loader = fabric.setup_dataloaders(DataLoader(batches, batch_size=None), use_distributed_sampler=False)
    evaluated = fabric.setup_dataloaders(DataLoader(batches[:1], batch_size=None), use_distributed_sampler=False)
    found = []
    for batch in loader:
        factor = torch.ones(1, requires_grad=True)
        loss = factor * batch
        fabric.all_reduce(loss).sum().backward()
        found.append(
            {
                "gradient": float(factor.grad),
                "gathered": fabric.all_gather(batch).flatten().tolist(),
                **{
                    name: float(fabric.all_reduce(batch.clone(), reduce_op=name))
                    for name in ("mean", "sum", "max", "min")
                },
                "whole numbers": float(fabric.all_reduce(batch.long() + RANK)),
                "evaluated": [fabric.all_gather(other).flatten().tolist() for other in evaluated],
                "after the evaluation": fabric.all_gather(batch).flatten().tolist(),
            }
        )
    first, second = found
    # A reduced loss keeps the gradient of this rank.
    assert (first.pop("gradient"), second.pop("gradient")) == (10 * RANK, [1, 10][RANK])
    assert first == {
        "gathered": [0, 10], "mean": 5, "sum": 10, "max": 10, "min": 0, "whole numbers": 5.5,
        "evaluated": [[0, 10]], "after the evaluation": [0, 10],
    }  # fmt: skip
    assert second == {
        "gathered": [1], "mean": 1, "sum": 1, "max": 1, "min": 1, "whole numbers": 1,
        "evaluated": [[0, 10]], "after the evaluation": [1, 10],
    }  # fmt: skip
    assert fabric.all_gather(torch.tensor(RANK)).tolist() == [0, 1]


@pytest.mark.ranks(2)
def test_two_models_have_one_order_of_messages() -> None:
    """A generator whose gradient passes through the discriminator, set up one after the other."""
    fabric = launched(DDPCheckpointStrategy())
    torch.manual_seed(RANK)
    generator, discriminator = nn.Linear(2, 5), nn.Linear(5, 1)
    optimizers = [torch.optim.Adam(part.parameters()) for part in (generator, discriminator)]
    generator, optimizers[0] = fabric.setup(generator, optimizers[0])
    discriminator, optimizers[1] = fabric.setup(discriminator, optimizers[1])
    torch.manual_seed(RANK)
    loader = fabric.setup_dataloaders(
        DataLoader(torch.randn(3 + RANK, 5).split(1)[:3], batch_size=None), use_distributed_sampler=False
    )
    digests = []
    for real in loader:
        optimizers[0].zero_grad()
        fabric.backward(discriminator(generator(real[:, :2])).sigmoid().log().mean().neg())
        optimizers[0].step()
        optimizers[1].zero_grad()
        made = discriminator(generator(real[:, :2]).detach())
        fabric.backward(made.sigmoid().mean() - discriminator(real).sigmoid().mean())
        optimizers[1].step()
        digests.append((digest_of(generator), digest_of(discriminator)))
    assert gather(digests) == [digests] * WORLD_SIZE
    assert len(set(digests)) == 3


@pytest.mark.ranks(2)
def test_windows_may_be_dropped() -> None:
    """Accumulate windows of 2 of 3 batches, of which rank 1 has 0 or 2; hooks see the gradients of all ranks."""
    for number, *others in product((0, 2), (True, False), (False, True)):
        expected = (4 * 1 + 2 * 2) / 6 if number == 0 else (4 * 1 + 2 * 2 + 1 * 3 + 3 * 5) / 10
        assert drop_windows(number, *others) == pytest.approx([expected] * 2)


def drop_windows(of_rank_1: int, set_to_none: bool, has_other_gradients: bool) -> list[float]:
    filled = ((4, 1.0), (2, 2.0), (1, 7.0)) if RANK == 0 else ((1, 3.0), (3, 5.0))[:of_rank_1]
    batches = [torch.full((size, 1), value) for size, value in filled]
    fabric, model, _, loader = prepare(DDPJoinStrategy(), batches)
    if has_other_gradients:
        other = fabric.setup(nn.Linear(1, 1))
        fabric.strategy.batch_weight = 1.0
        fabric.backward(other(torch.ones(1, 1)).sum())
    seen: list[float] = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad)))
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number % 2 == 0:
                model.zero_grad(set_to_none=set_to_none)
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(model(batch).mean() / 2)
    return seen


# The samples of two micro-batches on two ranks, and those of a rank without the second one.
EVEN, UNEVEN = ([[1.0], [2.0, 4.0]], [[3.0, 5.0, 7.0], [6.0]]), ([[1.0], [2.0, 4.0]], [[3.0, 5.0, 7.0]])
LOOPS = ("two losses", "two losses, one of them synchronised", "another step", "another step with the old gradient")


class Recorder(torch.optim.SGD):
    """Keeps the loss that its closure returns."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.loss = float(super().step(closure))


def accumulate(strategy: Any, batches: Any, loop: str) -> tuple[float, float]:
    """Accumulate the gradients of two losses, w * x and w * x ** 2; return the gradient, and the loss of a closure."""
    fabric = launched(strategy)
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model, optimizer = fabric.setup(model, Recorder(model.parameters(), lr=0.0))
    own = [torch.tensor(batch)[:, None] for batch in batches[RANK]]
    loader = fabric.setup_dataloaders(DataLoader(own, batch_size=None), use_distributed_sampler=False)
    combine = torch.sum if strategy.weight_by == "sum" else torch.mean

    def accumulate_all() -> float:
        total = 0.0
        for number, batch in enumerate(loader):
            losses = [combine(model(batch)) / 2, combine(model(batch**2)) / 2]
            total += 0.0 if fabric.strategy.is_shadow else float(sum(losses))
            for place, loss in enumerate(losses):
                is_postponed = number == 0 or (place == 0 and "one of them" in loop)
                with fabric.no_backward_sync(model, enabled=is_postponed):
                    fabric.backward(loss)
            if "another step" in loop and number == 1:
                optimizer.optimizer.loss = 0.0
                super(Recorder, optimizer.optimizer).step()
                if "old gradient" not in loop:
                    optimizer.zero_grad()
                fabric.backward(combine(model(batch)))
        return total

    if "another step" in loop:
        accumulate_all()
        return float(model.weight.grad), 0.0
    optimizer.optimizer.step(accumulate_all)
    return float(model.weight.grad), optimizer.optimizer.loss


@pytest.mark.ranks(2)
def test_windows_with_several_backward_passes() -> None:
    """Micro-batches count once, and a window ends with the next batch."""
    for rule, batches, loop in product(("samples", "sum"), (EVEN, UNEVEN), LOOPS):
        gradient, loss = accumulate(DDPJoinStrategy(weight_by=rule), batches, loop)
        assert gradient == pytest.approx(of_one_process(rule, batches, loop)), (rule, batches, loop)
        if "another" not in loop:
            # Each rank returns the sum over its micro-batches of the halved losses, with weight of all its samples.
            own = [sum(sum(x + x**2 for x in part) / (2 * (1 if rule == "sum" else len(part))) for part in parts)
                   for parts in batches]  # fmt: skip
            sizes = [1 if rule == "sum" else sum(map(len, parts)) for parts in batches]
            total = sum(one * size for one, size in zip(own, sizes, strict=True))
            assert loss == pytest.approx(total / (1 if rule == "sum" else sum(sizes))), (rule, batches, loop)


def of_one_process(rule: str, batches: Any, loop: str) -> float:
    """Return the gradient of one process on the samples of all ranks."""
    every = torch.tensor([*chain(*chain(*batches))])
    last = torch.tensor([*chain(*(own[1] for own in batches if len(own) > 1))])
    combine = torch.sum if rule == "sum" else torch.mean
    # The mean over samples, and half of the sum over samples, since the losses of micro-batches were halved.
    whole = combine(every + every**2) / (2 if rule == "sum" else 1)
    return float({"another step": combine(last), LOOPS[3]: whole + combine(last)}.get(loop, whole))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ddp_join", "balanced_ddp"])
def test_leaving_out_other_batches_than_another_rank_is_an_error_that_names_both(name) -> None:
    fabric, model, _, loader = prepare(STRATEGIES[name](), torch.ones(12, 1), 3, is_dealt=True)
    places = [f"batch {number} of its loader, counted over all epochs" for number in (1, 2)]
    pairs = [f"synchronises gradients at {own}, others at {other}." for own, other in permutations(places)]
    with pytest.raises(RanksOutOfStepError, match="|".join(pairs)):  # noqa: PT012
        for number, batch in enumerate(loader):
            if number != RANK:
                fabric.backward(model(batch).mean())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_optimizer_steps_of_one_rank_alone_are_an_error(name, rank) -> None:
    fabric, model, optimizer, loader = prepare(STRATEGIES[name](), torch.ones(12, 1), 3, is_dealt=True)
    with pytest.raises(RanksOutOfStepError, match="optimizer steps, others"):  # noqa: PT012
        for batch in loader:
            fabric.backward(model(batch).mean())
            if rank == RANK:
                optimizer.step()


@pytest.mark.ranks(2)
def test_a_gradient_that_was_set_by_hand_is_refused_once_the_optimizer_has_a_state() -> None:
    _, model, optimizer, _ = prepare(DDPJoinStrategy())
    model.weight.grad = torch.zeros(1, 1)
    optimizer.step()
    (model.weight.grad,) = torch.autograd.grad(model(torch.ones(1, 1)).sum(), [model.weight])
    with pytest.raises(UnsynchronizedGradientsError):
        optimizer.step()


@pytest.mark.ranks(2)
def test_batches_that_are_taken_ahead_have_the_weight_of_the_last_one_with_a_warning() -> None:
    data = torch.ones(10, 1)  # batches of 2, 2 and 1 on a rank
    fabric, model, _, loader = prepare(DDPJoinStrategy(), data, 2, is_dealt=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            batches = iter(loader)
            for taken in ([next(batches)], [next(batches), next(batches)]):
                for batch in taken:
                    fabric.backward(model(batch).mean())
    (ahead,) = [str(one.message) for one in caught if "batch_weight" in str(one.message)]
    assert "uses the weight of the last one, 1." in ahead


def refuses(error: type[Exception], text: str) -> Any:
    return pytest.raises(error, match=re.escape(text))


@pytest.mark.ranks(2)
def test_a_backward_pass_needs_a_module_and_a_weight_and_a_step_the_gradient_of_all_ranks() -> None:
    fabric = launched(DDPCheckpointStrategy())
    model = nn.Linear(5, 1)
    with refuses(RuntimeError, "Call `model = fabric.setup(model)` first"):
        fabric.backward(model(torch.ones(1, 5)).sum())
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with refuses(RuntimeError, "Call it inside of such a loop, or set `fabric.strategy.batch_weight`"):
        fabric.backward(model(torch.ones(1, 5)).sum())
    fabric.strategy.batch_weight = 1.0 + RANK
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.full((1, 5), float(RANK))).sum())
    with refuses(UnsynchronizedGradientsError, "leave the last one before a step out of `fabric.no_backward_sync`"):
        optimizer.step()
    fabric.backward(model(torch.full((1, 5), float(RANK))).sum())
    expected = sum(rank * (1 + rank) for rank in range(WORLD_SIZE)) / sum(1 + rank for rank in range(WORLD_SIZE))
    torch.testing.assert_close(model.weight.grad, torch.full((1, 5), 2 * expected))
    own = torch.ones(1, requires_grad=True)
    other = fabric.setup_optimizers(torch.optim.SGD([model.weight, own], lr=0.1))
    other.zero_grad()
    fabric.backward((own * model(torch.ones(1, 5))).sum())
    for step in (other.step, other.optimizer.step):
        with refuses(UnsynchronizedGradientsError, "Create it as an `nn.Parameter` of a module before `fabric.setup`"):
            step()


@pytest.mark.ranks(2)
def test_windows_of_two_modules_end_together() -> None:
    fabric = launched(DDPCheckpointStrategy())
    models = [fabric.setup(nn.Linear(1, 1)) for _ in range(2)]
    fabric.strategy.batch_weight = 1.0
    for _ in range(2):  # one window of two modules
        with fabric.no_backward_sync(models[0]), fabric.no_backward_sync(models[1]):
            fabric.backward(models[1](models[0](torch.ones(1, 1))).sum())
    message = "End the accumulation of one module before that of the next begins"
    with refuses(UnsupportedFeatureError, message), fabric.no_backward_sync(models[1], enabled=False):
        fabric.backward(models[1](torch.ones(1, 1)).sum())


@pytest.mark.ranks(2)
def test_a_batch_that_cannot_be_counted_is_refused_by_the_backward_pass_alone() -> None:
    fabric, model, _, loader = prepare(DDPCheckpointStrategy(), [{"name": "a"}])
    batches = iter(loader)
    assert next(batches) == {"name": "a"}  # an evaluation needs no weight
    assert fabric.strategy.batch_weight is None
    with pytest.raises(ValueError, match=r"cannot be counted.* Pass a callable `weight_by`"):
        fabric.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.ranks(2)
def test_uneven_loaders_are_refused_on_request() -> None:
    with refuses(UnevenInputsError, "rank 0 runs out of data after batch 1, while rank 1 has 2 batches"):
        prepare(DDPJoinStrategy(uneven_inputs="error"), [0] * (1 + RANK))


def share(folder: str, stop: int | None, resumes: bool, own_generator: bool = False) -> Any:
    """Train two epochs on shared batches; return the samples of each step on this rank, and the parameters."""
    fabric = launched(BalancedDDPStrategy(gpu0_batch_size=1 if WORLD_SIZE > 1 else None))
    seed_everything(3 + RANK if resumes else RANK, verbose=False)
    torch.set_default_dtype(torch.float64)
    model = nn.Linear(5, 1)
    nn.init.constant_(model.weight, 0.1)
    nn.init.constant_(model.bias, 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    generator = torch.Generator().manual_seed(5) if own_generator else None
    data = DataLoader(TensorDataset(*samples(13)), batch_size=4, shuffle=True, generator=generator)
    loader = fabric.setup_dataloaders(data)
    evaluated = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples(3)), batch_size=2))
    state = {"model": model, "optimizer": optimizer, "step": 0, "epoch": 0}
    path = Path(folder) / f"shared-{own_generator}.ckpt"
    if resumes:
        fabric.load(path, state)
    seen = []
    for epoch in range(state["epoch"], 2):
        state["epoch"] = epoch
        for features, _, indices in loader:
            seen.append([] if fabric.strategy.is_shadow else indices.tolist())
            for part, _, _ in evaluated:  # in the middle of a step
                model(part)
            optimizer.zero_grad()
            fabric.backward(model(features).square().mean())
            optimizer.step()
            state["step"] += 1
            if state["step"] == stop:
                fabric.save(path, state)
                break
        if state["step"] == stop:
            break
    torch.set_default_dtype(torch.float32)
    return seen, nn.utils.parameters_to_vector(model.parameters()).detach().tolist()


def shared_batches(folder: str) -> Any:
    return share(folder, None, resumes=False)


def second_epoch(folder: str, resumes: bool) -> list[int]:
    """Return the samples of this rank in the second epoch, which follows a checkpoint of two ranks if it `resumes`."""
    fabric = launched()
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples(13)), batch_size=4, shuffle=True))
    path = Path(folder) / "between-epochs.ckpt"
    if resumes:
        fabric.load(path, {})
    else:
        list(loader)
        fabric.save(path, {})
    steps = [[] if fabric.strategy.is_shadow else indices.tolist() for _, _, indices in loader]
    return list(chain(*steps))


def shared_batches_until_a_checkpoint(folder: str) -> Any:
    second_epoch(folder, resumes=False)
    share(folder, 6, resumes=False, own_generator=True)
    return share(folder, 6, resumes=False)


def shared_batches_after_the_checkpoint(folder: str) -> Any:
    second = second_epoch(folder, resumes=True)
    try:
        share(folder, None, resumes=True, own_generator=True)
        refused = ""
    except UnsupportedFeatureError as error:
        refused = str(error)
    return *share(folder, None, resumes=True), refused, second


@pytest.mark.ranks(2)
def test_batches_taken_ahead_are_exact_with_given_weights_and_a_weight_of_a_copy_is_an_error() -> None:
    """Rank 1 lacks the third batch."""
    own = [torch.full((1 + number, 1), float(number + 5 * RANK)) for number in range(3 - RANK)]
    fabric, model, _, loader = prepare(DDPJoinStrategy(), own)
    batches = iter(loader)
    taken = [(next(batches), fabric.strategy.batch_weight) for _ in range(3)]
    gradients = []
    for batch, weight in taken:
        model.zero_grad()
        fabric.strategy.batch_weight = weight
        fabric.backward(model(batch).mean())
        gradients.append(float(model.weight.grad))
    assert gradients == pytest.approx([(0 * 1 + 5 * 1) / 2, (1 * 2 + 6 * 2) / 4, 2.0])
    about = "rank 1: `batch_weight` was set to 2 for a batch that stands in for missing data"
    with refuses(ValueError, about) if RANK else nullcontext():
        for number, batch in enumerate(loader):
            fabric.strategy.batch_weight = len(batch)
            if number < 2:  # rank 1 has an error in the third step
                fabric.backward(model(batch).mean())


@pytest.mark.ranks(2)
def test_a_gradient_penalty(folder: str) -> None:
    """A penalty on the gradient of the output; a checkpoint in a window is a warning."""
    fabric = launched(DDPCheckpointStrategy())
    model = fabric.setup(nn.Linear(1, 1, bias=False))
    nn.init.constant_(model.weight, 2.0)
    fabric.strategy.batch_weight = 1.0 + RANK
    inputs = torch.ones(1, 1, requires_grad=True)
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    with warnings.catch_warnings(record=True) as caught, fabric.no_backward_sync(model):
        warnings.simplefilter("always")
        fabric.backward((slope**2).sum() * (1 + RANK))
        fabric.save(Path(folder) / "window.ckpt", {"model": model})
    fabric.backward(model(inputs).sum() * 0)
    assert float(model.weight.grad) == pytest.approx((1 * 4 * 1 + 2 * 4 * 2) / 3)  # of the squared weight, by weights
    assert sum("checkpoint lacks" in str(one.message) for one in caught) == (RANK == 0)


@pytest.mark.ranks(2)
def test_shares_follow_the_speed() -> None:
    """Rank 0 needs four times as long for a sample."""
    fabric = launched(BalancedDDPStrategy())
    model = nn.Linear(5, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples(12)[:1]), batch_size=12))
    sizes = []
    for _ in range(30):
        for (features,) in loader:
            time.sleep(len(features) * [0.004, 0.001][RANK])
            fabric.backward(model(features.float()).square().mean())
            optimizer.step()
            sizes.append(len(features))
    slow, fast = gather(sizes)
    assert (slow[0], fast[0]) == (6, 6)
    assert slow[-1] < 5
    assert [one + other for one, other in zip(slow, fast, strict=True)] == [12] * 30


MISUSED = [
    ("`split=[1, 2, 3]` has 3 entries for 2 ranks", {"split": [1, 2, 3]}, lambda: [0]),
    ("a loader has a `DistributedSampler` with `num_replicas=2`", {},
     lambda: DataLoader(range(4), sampler=torch.utils.data.DistributedSampler(range(4), 2, RANK))),
    ("the loaders of a stream have workers that fetch 0, 2 batches ahead on ranks 0 to 1", {},
     lambda: DataLoader(Stream([1, 2]), num_workers=RANK)),
]  # fmt: skip


@pytest.mark.ranks(2)
def test_data_that_ranks_cannot_share_is_refused() -> None:
    for text, options, make in MISUSED:
        with pytest.raises(Exception, match=re.escape(text)):
            launched(BalancedDDPStrategy(**options)).setup_dataloaders(make())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    ("size", "end"),
    [(4, "2 batches"), (5, "2 batches and 1 samples"), (3, "1 batches and 1 samples"), (0, "0 batches")],
)
def test_a_stream_that_ends_earlier_on_a_rank_is_an_error(size, end, trains) -> None:
    items = Stream(list(torch.arange(6.0).reshape(6, 1))[: size if RANK else 6])
    fabric, model, optimizer, loader = prepare(BalancedDDPStrategy(), items, 2)
    text = f"rank 1: `Stream` ended after {end}, and has more on other ranks"
    with pytest.raises(UnevenInputsError, match=text):  # noqa: PT012
        for batch in loader:
            if trains:
                fabric.backward(model(batch).mean())
                optimizer.step()


@pytest.mark.ranks(2)
def test_times_of_other_loops_are_not_measured() -> None:
    """Evaluate in the middle of every step, on batches without a sample for rank 1."""
    fabric = launched(BalancedDDPStrategy())
    model = nn.Linear(5, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples(12)[:1]), batch_size=12))
    evaluated = fabric.setup_dataloaders(DataLoader(TensorDataset(*samples(2)), batch_size=1))
    for _ in range(24):
        for (features,) in loader:
            loss = model(features.float()).square().mean()
            for _ in evaluated:
                time.sleep(0.002)
            weight = fabric.strategy.batch_weight
            assert weight == len(features)
            fabric.backward(loss)
            optimizer.step()
    times = [[*step.seconds.values()] for step in fabric.strategy.balancer.take_timed()]
    assert len(times) == 24
    assert all(seconds > 0 for step in times for seconds in step)


def backward_without_a_loader(rule: str, gives_weight: bool) -> list[float]:
    """Return the gradients of two windows of two losses that no loader has given the batches of."""
    found = []
    for kind in (DDPCheckpointStrategy, DDPJoinStrategy, BalancedDDPStrategy):
        fabric, model, optimizer, _ = prepare(kind(weight_by=rule))
        for number in range(4):
            if gives_weight:
                fabric.strategy.batch_weight = 1.0
            losses = model(torch.full((2, 1), float(1 + RANK + 10 * number)))
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                fabric.backward(losses.sum() if rule == "sum" else losses.mean() / 2)
            if number % 2:
                found.append(float(model.weight.grad))
                optimizer.zero_grad()
    return found


@pytest.mark.ranks(2)
def test_weights_without_a_loader() -> None:
    with pytest.raises(RuntimeError, match="needs the weight of the batch"):
        backward_without_a_loader("samples", gives_weight=False)
    for rule in ("equal", "sum"):
        given, own = (backward_without_a_loader(rule, gives) for gives in (True, False))
        assert given == own == ([6.5, 26.5] * 3 if rule == "equal" else own)


BATCHES = {"one": (8, 8), "same": (8, 8), "half": (4, 4), "other": (3, 4)}  # samples of two ranks


def one_step(strategy: Any, names: tuple[str, ...], loop: str) -> Any:
    """Make a step on a batch of each loader; return the gradient, or the error."""
    fabric = launched(strategy)
    is_shared = isinstance(strategy, BalancedDDPStrategy)
    model = nn.Linear(1, 1, bias=False)
    model = fabric.setup(model)
    loaders = []
    for name in names:
        sizes = BATCHES[name]
        data = torch.arange(1.0, 1 + sum(sizes))[:, None]
        own = data if is_shared else data.split(sizes)[RANK]
        size = sum(sizes) if is_shared else sizes[RANK]
        data_loader = DataLoader(own, batch_size=size)
        loaders.append(fabric.setup_dataloaders(data_loader, use_distributed_sampler=False))
    try:
        if loop == "zip":
            for batches in zip(*loaders, strict=True):
                fabric.backward(sum(model(batch).mean() for batch in batches))
            assert fabric.strategy.batch_weight is None
        elif loop == "accumulated":
            iterators = [iter(loader) for loader in loaders]
            with fabric.no_backward_sync(model):
                fabric.backward(sum(model(next(one)).mean() for one in iterators[:2]) / 2)
            fabric.backward(sum(model(next(one)).mean() for one in iterators[2:]) / 2)
        elif loop == "left with break":
            for batch in loaders[0]:
                for _ in loaders[1]:
                    break
                fabric.backward(model(batch).mean())
        elif loop == "alternating":
            iterators = [iter(loader) for loader in loaders]
            for one in iterators:
                fabric.backward(model(next(one)).mean())
        elif loop == "given weight":
            for batches in zip(*loaders, strict=True):
                for batch in batches:
                    fabric.strategy.batch_weight = len(batch)
                    fabric.backward(model(batch).mean())
    except BatchSplitError as error:
        return str(error)
    return float(model.weight.grad)


@pytest.mark.ranks(2)
def test_steps_of_several_loaders() -> None:
    """Each is exact or an error."""
    for name, make in STRATEGIES.items():
        for (loop, names), gradient in RIGHT_STEPS.items():
            assert one_step(make(), names, loop) == pytest.approx(gradient), (name, loop, names)
        for loop, names in WRONG_STEPS:
            error, between = one_step(make(), names, loop), "ranks 0 and 1" if loop == "zip" else "micro-batches"
            assert "but a rank has one weight in a step" in error, (name, loop, names)
            assert f"between {between}" in error or name == "balanced_ddp"


def mean(name: str) -> float:
    return (1 + sum(BATCHES[name])) / 2  # of the numbers from 1


RIGHT_STEPS = {
    ("zip", ("one", "same")): 2 * mean("one"),
    ("zip", ("one", "half")): mean("one") + mean("half"),
    ("left with break", ("one", "other")): mean("one"),
    ("accumulated", ("one", "half", "one", "half")): mean("one") + mean("half"),
    ("alternating", ("one", "other")): mean("one") + mean("other"),
    ("given weight", ("one", "other")): mean("one") + mean("other"),
}
WRONG_STEPS = [("zip", ("one", "other")), ("accumulated", ("one", "half", "half", "one"))]


class Counting(nn.Linear):
    """Counts the samples of this rank."""

    def __init__(self) -> None:
        super().__init__(5, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        return super().forward(inputs)


@pytest.mark.ranks(2)
def test_counts_of_each_rank_are_added_up_in_the_loop() -> None:
    """Sums over ranks of each step, and the buffer after the loop, which ends without a reset, are equal."""
    found = []
    for make in (DDPJoinStrategy, partial(BalancedDDPStrategy, split=[1, 3])):
        fabric = launched(make())
        model = fabric.setup(Counting())
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(samples(9)[0].float()), batch_size=2))
        sums = []
        for (batch,) in loader:
            fabric.backward(model(batch).sum())
            # A rank without data runs the loop too.
            own = torch.zeros_like(model.seen) if fabric.strategy.is_shadow else model.seen.clone()
            torch.distributed.all_reduce(own)
            sums.append(int(own))
            model.seen.zero_() if len(sums) < len(loader) else model.seen.add_(RANK)
        found.append((sums, int(model.seen)))
    assert gather(found) == [found] * WORLD_SIZE
    assert [sums for sums, _ in found] == [[4, 4, 1], [2, 2, 2, 2, 1]]


@pytest.mark.ranks(2)
def test_a_rank_with_fewer_batches(folder: str) -> None:
    """Rank 1 leaves out the last batch; the other rank and its calls have an error. This test has to be the last."""
    data = torch.ones(6, 1)  # 3 batches on a rank
    fabric, model, _, loader = prepare(DDPCheckpointStrategy(timeout=timedelta(seconds=5)), data, 1, is_dealt=True)

    def train() -> None:
        for number, batch in enumerate(loader):
            if number < 3 - RANK:
                fabric.backward(model(batch).mean())

    value = torch.ones(1, device=fabric.device)
    calls = [
        fabric.barrier,
        *(partial(call, value) for call in (fabric.all_reduce, fabric.all_gather, fabric.broadcast)),
        partial(fabric.save, Path(folder) / "alone.ckpt", {}),
    ]
    errors = []
    for call in (train, *(() if RANK else calls)):
        try:
            call()
        except OtherRankError as error:
            errors.append(str(error))
    names = [] if RANK else ["backward", "barrier", "all_reduce", "all_gather", "broadcast", "save"]
    for error, name in zip(errors, names, strict=True):
        assert error.startswith(f"rank 0: another rank did not take part in the `fabric.{name}`")
        assert 'use `strategy="ddp_join"`' in error
    assert RANK or "`fabric.backward` of batch 3 of" in errors[0]


@pytest.fixture(scope="module")
def shared(folder):
    return run_on_ranks(2, [shared_batches, shared_batches_until_a_checkpoint], folder, timeout=120)


def of_all_ranks(by_rank):
    """Return the samples of each step."""
    return [sorted(index for step in steps for index in step) for steps in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_shared_batches_go_on_with_another_number_of_ranks(shared, folder, ranks):
    whole, parameters = zip(*values_of(shared, shared_batches), strict=True)
    wanted = of_all_ranks(whole)
    assert [len(step) for step in wanted] == [4, 4, 4, 1] * 2
    assert [sorted(chain(*steps)) for steps in (wanted[:4], wanted[4:])] == [list(range(13))] * 2
    assert wanted[:4] != wanted[4:]
    before, _ = zip(*values_of(shared, shared_batches_until_a_checkpoint), strict=True)
    assert of_all_ranks(before) == wanted[:6]
    resumed = values_of(
        run_on_ranks(ranks, [shared_batches_after_the_checkpoint], folder), shared_batches_after_the_checkpoint
    )
    seen, resumed_parameters, refused, second = zip(*resumed, strict=True)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1)).tolist()  # of Fabric's sampler in epoch 1
    assert list(second) == [order[rank::ranks] for rank in range(ranks)] if ranks > 1 else len(second[0]) == 13
    assert of_all_ranks(seen) == wanted[6:]
    for own in resumed_parameters:
        assert own == pytest.approx(parameters[0], abs=1e-12)
    for error in refused:
        assert "a sampler has a `generator` of its own, whose state cannot be restored" in error


class Nobody:
    """Observes no batches."""

    @contextmanager
    def iterating(self):
        yield LoopBatch()

    def begin_batch(self, current, batch, fetched):
        pass

    def end_batch(self, current):
        pass


def test_loops_over_one_loader_within_each_other_see_all_batches():
    loader = FabricLoader(DataLoader(range(3), batch_size=None), EvenSource(), torch.device("cpu"), Nobody())
    assert [(outer, inner) for outer in loader for inner in loader] == [*product(range(3), repeat=2)]
