"""Details of the reducer: one launch of two ranks runs all checks of the modules beside, with a test for each check."""

import json
import traceback
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import ReplicaMismatchError
from lightning_ddp_ext.reducer.gradient_reducer import GradientReducer
from tests.reducer import buffer_checks, exchange_checks, gradient_checks  # noqa: F401 - they register checks
from tests.reducer.checking import CHECKS, EXPECTED, MARKS, agrees
from tests.support import devices
from tests.support.processes import run_processes


def run_checks() -> dict[str, object]:
    torch.set_num_threads(1)
    own = devices.init_process_group()
    results: dict[str, object] = {}
    for name, function in CHECKS.items():
        if name in MARKS and devices.accelerator() == "virtual":
            continue
        try:
            torch.manual_seed(0)
            with devices.tensors_on_device(own):
                results[name] = function()
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def results():
    return run_processes(run_checks, 2, timeout=90)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in CHECKS])
def test_on_every_rank(results, name):
    for rank, found in enumerate(results):
        assert agrees(found[name], EXPECTED[name], rank), f"rank {rank}: {found[name]}"


def repeat_synchronisations() -> dict[int, bool]:
    """For several sizes of a layer: whether the gradient of a batch is bit-identical in each of three steps."""
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


_SMALL = 0.01  # MiB, so that a bucket leaves before the backward pass ends


class Staged(torch.nn.Module):
    """More layers are used from step to step, in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(37, 37) for _ in range(4))

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        for layer in self.layers[: 2 + step // 2]:
            inputs = layer(inputs).tanh()
        return self.layers[0](inputs).square().sum()


def continue_with_states() -> dict[str, object]:
    """Count the parameters that get another gradient from a reducer that continues with the state of an earlier one."""
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
        "without its predictions": differing({"of_rank": {"backward_passes": [], "is_held": False}}),
        "of another setup": differing({"setup": "another"}),
        "errors": errors,
    }


def round_sums() -> tuple[dict[int, bool], dict[str, object]]:
    torch.set_num_threads(1)
    with devices.tensors_on_device(devices.init_process_group()):
        return repeat_synchronisations(), continue_with_states()


@pytest.fixture(scope="module")
def rounded():
    """Three ranks add up in another order if a message has another length."""
    return run_processes(round_sums, 3, timeout=60)


def test_a_gradient_does_not_depend_on_the_step_that_made_its_bucket(rounded):
    for found, _ in rounded:
        assert found == dict.fromkeys((8, 37, 300, 5000), True)


def test_a_reducer_with_the_state_of_another_rounds_as_it_does(rounded):
    """Without the state, three ranks round differently: other buckets or predictions change the order of sums."""
    for _, found in rounded:
        assert found["with its state"] == 0
        assert found["without"] > 0
        if devices.backend(3) == "gloo":  # both are equal with virtual_ccl
            assert found["without its predictions"] > 0
        assert found["of another setup"] == found["without"]
        of_different_steps, too_late = found["errors"]
        assert of_different_steps.startswith(
            "ReplicaMismatchError: ranks are not set up alike: state of the reducer is"
        )
        assert too_late.startswith("RuntimeError: The reducer has learned something already.")
