"""The reducer on real processes, against one process with the batches of all ranks."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from measuring.peers import Reduced
from measuring.scenarios import MODES, SCENARIOS, Model, Optimizers, Verdict, play
from torch import Tensor

from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer.checking import largest_error, spread
from tests.support import devices
from tests.support.processes import run_processes


def connect(model: Model) -> Reduced:
    return Reduced(model, bucket_cap_mb=0.0005)


def weigh(run: Reduced, samples: int) -> None:
    run.weight = samples


def uneven(rank: int) -> int:
    return 4 + 2 * rank


def play_matrix(
    weigh: Callable[[Reduced, int], None] = weigh, optimizers: Sequence[str] = tuple(Optimizers)
) -> dict[tuple[str, str, str], Verdict]:
    torch.set_num_threads(1)
    with devices.tensors_on_device(devices.init_process_group()):
        return {
            (scenario.name, mode, optimizer): play(scenario, mode, optimizer, connect, uneven, weigh)
            for scenario in SCENARIOS
            for mode in MODES
            for optimizer in optimizers
        }


def play_matrix_with_weights_and_without() -> list[dict[tuple[str, str, str], Verdict]]:
    return [play_matrix(), play_matrix(lambda run, samples: None, tuple(Optimizers)[:1])]


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
    with devices.tensors_on_device(devices.init_process_group()):
        return _fuzz(seed, steps)


def _fuzz(seed: int, steps: int) -> tuple[float, float, int]:
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
            error = max(error, largest_error(together, alone))
            zeros = [torch.zeros_like(one) if one.grad is None else one.grad for one in together.parameters()]
            difference = max(difference, spread(torch.cat([gradient.flatten() for gradient in zeros])))
    return error, difference, synchronizations


def _freeze_some(shared: torch.Generator, *models: torch.nn.Module) -> None:
    if torch.rand((), generator=shared) < 0.2:
        index = int(torch.randint(8, (), generator=shared))
        for model in models:
            parameter = model.weights[index]
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_scenario_gives_the_gradient_of_one_process_and_identical_ranks_and_none_with_equal_weights(world_size):
    """The control: the batches of the scenarios differ in size."""
    by_rank = run_processes(play_matrix_with_weights_and_without, world_size, timeout=120)
    verdicts, unweighted = zip(*by_rank, strict=True)
    assert not [cell for by_cell in verdicts for cell, verdict in by_cell.items() if not verdict.passed]
    assert len({(name, mode) for name, mode, _ in verdicts[0]}) == len(SCENARIOS) * len(MODES) == 36
    assert len(unweighted[0]) == 36
    assert not any(verdict.passed for verdict in unweighted[0].values())


@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (0, 40),
        pytest.param(1, 40, marks=pytest.mark.slow),
        *[pytest.param(seed, 100, marks=pytest.mark.exhaustive) for seed in range(2, 34)],
    ],
)
def test_random_graphs(seed, steps):
    for error, difference, synchronizations in run_processes(fuzz, 2 + seed % 2, seed, steps, timeout=120):
        assert error < 1e-9
        assert difference == 0.0
        assert synchronizations > steps
