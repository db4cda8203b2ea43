"""What ranks do in the tests of the reducer; kept apart because every rank imports it."""

import json
from collections.abc import Callable, Iterable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from measuring.scenarios import MODES, SCENARIOS, Model, Optimizers, play
from torch import Tensor

from lightning_ddp_ext.errors import ReplicaMismatchError
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer


class Reduced:
    """A scenario's driver with our reducer: one synchronisation per backward pass."""

    def __init__(self, model: Model, equal_weights: bool = False) -> None:
        self.model = model
        self.forward = model
        self.reducer = GradientReducer(model, bucket_cap_mb=0.0005)
        self.weight = 1.0
        self.blocked = False
        self.equal_weights = equal_weights

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        if self.blocked:
            loss.backward(retain_graph=retain_graph)
            return
        with self.reducer.synchronize(1.0 if self.equal_weights else self.weight):
            loss.backward(retain_graph=retain_graph)

    @contextmanager
    def no_sync(self):
        self.blocked = True
        yield
        self.blocked = False


def weigh(run: Reduced, samples: int) -> None:
    run.weight = samples


def uneven(rank: int) -> int:
    return 4 + 2 * rank


def repeat_synchronisations() -> dict[int, bool]:
    """For several sizes of a layer: whether one batch has one gradient, bit for bit, whenever it is synchronised."""
    dist.init_process_group("gloo")
    found = {}
    for size in (8, 37, 300, 5000):
        torch.manual_seed(0)
        layer = torch.nn.Linear(size, 3)
        reducer = GradientReducer(layer)
        inputs = torch.randn(5, size, generator=torch.Generator().manual_seed(dist.get_rank()))
        gradients = []
        for _ in range(3):
            layer.zero_grad()
            with reducer.synchronize():
                layer(inputs).pow(2).sum().backward()
            gradients.append(layer.weight.grad.clone())
        found[size] = all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    return found


def play_matrix(connect: Callable[[Model], Reduced] = Reduced) -> dict[tuple[str, str, str], object]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {
        (scenario.name, mode, optimizer): play(scenario, mode, optimizer, connect, uneven, weigh)
        for scenario in SCENARIOS
        for mode in MODES
        for optimizer in Optimizers
    }


def play_matrix_with_equal_weights() -> dict[tuple[str, str, str], object]:
    return play_matrix(lambda model: Reduced(model, equal_weights=True))


class Fuzzed(torch.nn.Module):
    """Parameters of many sizes, of which any subset is used, each several times, in any order."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(1,), (3, 5), (40, 500), (7,), (2, 2, 2), (150, 150), (11,), (4,)]
        self.weights = torch.nn.ParameterList(torch.randn(size, dtype=torch.float64) for size in sizes)

    def forward(self, generator: torch.Generator) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for _ in range(int(torch.randint(1, 12, (), generator=generator))):
            weight = self.weights[int(torch.randint(len(self.weights), (), generator=generator))]
            factor = torch.randn((), generator=generator, dtype=torch.float64)
            loss = loss + ((weight * factor).sin().mean() if weight.requires_grad else 0.0)
        return loss


def fuzz(seed: int, steps: int) -> tuple[float, float, int]:
    """Random graphs per rank; returns gradient error, rank difference and the number of synchronisations."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    together = Fuzzed()
    alone = Fuzzed()
    reducer = GradientReducer(together, bucket_cap_mb=0.05)
    alone.load_state_dict(together.state_dict())
    shared = torch.Generator().manual_seed(seed)
    error = difference = 0.0
    synchronizations = 0
    for step in range(steps):
        for model in (alone, together):
            model.zero_grad(set_to_none=seed % 2 == 0)
        _freeze_some(shared, alone, together)
        for backward in range(int(torch.randint(1, 4, (), generator=shared))):
            weights = torch.randint(0, 4, (world_size,), generator=shared).double()
            micro_batches = int(torch.randint(1, 3, (), generator=shared))
            seeds = [
                [hash((seed, step, backward, other, part)) for part in range(micro_batches)]
                for other in range(world_size)
            ]
            total = float(weights.sum())
            for other in range(world_size):
                for part_seed in seeds[other]:
                    loss = alone(torch.Generator().manual_seed(part_seed))
                    if loss.requires_grad and weights[other] and total:
                        (loss * weights[other] / total).backward()
            losses = [together(torch.Generator().manual_seed(part_seed)) for part_seed in seeds[rank]]
            if not weights[rank]:
                losses = []
            for loss in losses[:-1]:
                if loss.requires_grad:
                    loss.backward()
            with reducer.synchronize(float(weights[rank])):
                if losses and losses[-1].requires_grad:
                    losses[-1].backward()
            synchronizations += 1
            if not total:
                # Nobody had data: nobody has gradients.
                alone.zero_grad()
                together.zero_grad()
            error = max(error, _gradient_error(alone, together))
            difference = max(difference, _gradient_difference(together))
    return error, difference, synchronizations


def _freeze_some(shared: torch.Generator, *models: torch.nn.Module) -> None:
    if torch.rand((), generator=shared) < 0.2:
        index = int(torch.randint(8, (), generator=shared))
        for model in models:
            parameter = model.weights[index]
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


def _gradient_error(alone: torch.nn.Module, together: torch.nn.Module) -> float:
    largest = 0.0
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        if (one.grad is None) != (other.grad is None):
            return float("inf")
        if one.grad is not None:
            largest = max(largest, float((one.grad - other.grad).abs().max() / (1e-9 + one.grad.abs().max())))
    return largest


def _gradient_difference(model: torch.nn.Module) -> float:
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in zeros])
    first = flat.clone()
    dist.broadcast(first, 0)
    largest = (flat - first).abs().amax()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


_SMALL = 0.01  # MiB, so that a bucket leaves before the backward pass ends


class Staged(torch.nn.Module):
    """Layers of which more are used from step to step, in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(4))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        for layer in self.layers[: 2 + step // 2]:
            inputs = layer(inputs).tanh()
        return self.layers[0](inputs).square().sum()


def go_on_with_states() -> dict[str, object]:
    """How many parameters get another gradient from a reducer that goes on with the state of one that went before."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Staged()
    reducer = GradientReducer(model, bucket_cap_mb=_SMALL)

    def gradient(reducer: GradientReducer, model: Staged, step: int) -> list[Tensor]:
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        with reducer.synchronize(float(dist.get_rank() or step > 0)):
            for _ in range(1 + step % 2):
                model(torch.randn(3, 37, generator=generator), step).backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    states, wanted = [], []
    for step in range(6):
        states.append(json.loads(json.dumps(reducer.state_dict())))
        wanted.append(gradient(reducer, model, step))

    def differing(change: dict[str, object] | None, steps: Iterable[int] = range(1, 6)) -> int:
        number = 0
        for step in steps:
            again = Staged()
            again.load_state_dict(model.state_dict())
            resumed = GradientReducer(again, bucket_cap_mb=_SMALL)
            if change is not None:
                resumed.load_state_dict({**states[step], **change})
            pairs = zip(gradient(resumed, again, step), wanted[step], strict=True)
            number += sum(not torch.equal(one, other) for one, other in pairs)
        return number

    errors = []
    for load in (lambda: differing(states[dist.get_rank()], [3]), lambda: reducer.load_state_dict(states[3])):
        try:
            load()
        except (ReplicaMismatchError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return {
        "with its state": differing({}),
        "without": differing(None),
        "without what ranks believe": differing({"of_rank": {"backward_passes": [], "silent_buffers": []}}),
        "of another setup": differing({"setup": "another"}),
        "errors": errors,
    }
