"""The weights of micro-batches in the gradient, and the guard of optimizer steps, without other ranks."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_ddp_ext.batches.sample_counts import BatchSamples, sums_and_means
from lightning_ddp_ext.batches.weights import AccumulationWindow, BatchWeights, WeightRule
from lightning_ddp_ext.consistency import value_to_text
from lightning_ddp_ext.reducer.control import ControlField
from lightning_ddp_ext.steps.optimizer_guard import OptimizerGuard

GRADIENTS = [1.0, 4.0, 9.0]  # of the losses of micro-batches


def make_weights(weight_by=lambda weight: weight, is_automatic=True):
    return BatchWeights(WeightRule(weight_by, print), BatchSamples(0), 0, counts=True, is_automatic=is_automatic)


def weighted_sum(weights, batches, accumulates=1):
    """Run the micro-batches of a window; return the gradient that the rank sends, and its weight and divisor."""
    total = 0.0
    for index, batch in enumerate(batches):
        weights.begin(begins_window=not index)
        weights.weigh(batch)
        loss = torch.tensor(1.0, requires_grad=True)
        weights.weigh_loss(loss / accumulates, ranks=2).backward()
        skips, weights.window.skips_pass = weights.window.skips_pass, False
        total += 0.0 if skips else GRADIENTS[index] * float(loss.grad)
    weight, scale, divisor = weights.of_window(accumulates)
    weights.window.begin()
    return total * (weight if scale is None else scale), weight, divisor


@pytest.mark.parametrize("batches", [(3.0, 5.0, 2.0), (0.0, 5.0, 2.0), (3.0, 0.0), (4.0,)])
def test_a_window_is_sent_as_the_sum_of_its_gradients_by_weight(batches):
    expected = sum(weight * gradient for weight, gradient in zip(batches, GRADIENTS, strict=False))
    sent = weighted_sum(make_weights(), batches, accumulates=len(batches))
    assert sent == pytest.approx((expected, sum(batches), None))


def test_a_window_without_weight_sends_nothing():
    assert weighted_sum(make_weights(), (0.0, 0.0), accumulates=2) == (0.0, 0.0, None)


def test_sums_are_not_divided_by_the_ranks():
    assert weighted_sum(make_weights("sum"), (1.0, 1.0), accumulates=2) == pytest.approx((5.0, 2.0, 1.0))
    # Under manual optimization, gradients that are synchronised already are averaged once more.
    assert weighted_sum(make_weights("sum", is_automatic=False), (1.0,)) == pytest.approx((2.0, 1.0, None))


@pytest.mark.parametrize("is_shadow", [False, True])
def test_a_skipped_batch_and_a_rank_without_data_have_no_weight(is_shadow):
    weights = make_weights("equal")
    weights.begin(begins_window=True)
    if not is_shadow:
        weights.weigh(None)
        with pytest.warns(UserWarning, match="returned None on rank 0"):
            weights.skip()
    assert (weights.log_weight, weights.weight) == (float(not is_shadow), 0.0)  # logged values keep their weight
    weights.weigh_loss(torch.tensor(1.0), ranks=1)
    assert weights.window.skips_pass
    assert weights.of_window(1)[0] == 0.0


def test_samples_are_weights_and_a_batch_that_cannot_be_counted_is_an_error_before_its_step():
    weights = make_weights("samples")
    weights.begin(begins_window=True)
    weights.weigh(torch.zeros(3, 2))
    assert weights.weight == 3.0
    uncountable = {"a": torch.zeros(3), "b": torch.zeros(4)}
    with pytest.raises(ValueError, match=r'rank 0: `weight_by="samples"` needs numbers of samples.*ambiguous.*"equal"'):
        weights.weigh(uncountable)


def test_blocks_that_postpone_synchronisation_may_contain_each_other():
    window, seen = AccumulationWindow(), []
    with window.postpone():
        for is_postponed in (True, False):
            with window.postpone(is_postponed):
                seen.append(window.is_postponed)
            seen.append(window.is_postponed)
    assert (seen, window.is_postponed) == ([True] * 4, False)


def test_a_rank_without_values_is_in_no_mean_and_no_sum():
    other = torch.tensor([[3.0, 1.0], [6.0, 2.0]], dtype=torch.float64)  # a value of 3 with weight 2
    sums, means = sums_and_means(torch.tensor([5.0]), None, lambda own: own.add_(other))
    assert (sums.tolist(), means.tolist()) == ([3.0], [3.0])


class Subclass(torch.optim.SGD):
    """Calls the step of its base class, which has hooks too once any optimizer of that class exists."""

    def step(self, closure=None):
        return super().step(closure)


def make_guard(layer, known=()):
    reducer = SimpleNamespace(
        control=SimpleNamespace(add=lambda check=None, in_every_message=False: ControlField(check)),
        has_unsynchronized=lambda parameters: False,
        unmanaged_parameters=lambda parameters: [],
        places={id(parameter): place for place, parameter in enumerate(layer.parameters())},
    )
    return OptimizerGuard(0, reducer, layer.named_parameters, lambda: known, lambda: (1.0, False), "", "", str)


@pytest.mark.parametrize("closure", [None, lambda: None], ids=["plain", "closure"])
def test_a_step_of_a_subclass_counts_once_and_steps_of_other_optimizers_differ(closure):
    def steps_of(*order):
        layer = torch.nn.Linear(1, 1)
        guard = make_guard(layer)
        optimizers = Subclass([layer.weight], lr=0.1), torch.optim.SGD([layer.bias], lr=0.1)
        for index in order:
            optimizers[index].step(closure)
        guard.close()
        return guard.steps, guard.optimizers

    assert steps_of(0, 1, 0)[0] == 3
    assert steps_of(0, 1, 0) == steps_of(1, 0, 0)
    assert steps_of(0, 1, 0) != steps_of(0, 1, 1)


def test_steps_after_a_step_that_has_raised_an_error_count():
    layer = torch.nn.Linear(1, 1)
    guard = make_guard(layer)
    optimizer = Subclass(layer.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    guard.close()
    assert guard.steps == 2


class Opaque:
    """A setting without a value to compare."""


SETTINGS = {
    "float": lambda value: value,
    "numpy's numbers": lambda value: (np.float32(value), np.float16(value), np.longdouble(value)),
    "array": lambda value: np.array([0.5, value]),
    "array of objects": lambda value: np.array([Opaque(), value]),
    "tensor": lambda value: torch.tensor(value),
    "tensor of elements": lambda value: torch.tensor([[0.5, value]]),
    "large tensor": lambda value: torch.full((1000,), value),
    "sparse tensor": lambda value: torch.tensor([0.0, value]).to_sparse(),
    "nested": lambda value: {"a": [torch.tensor([value]), {"b": (np.float32(value), Opaque())}]},
    "complex": lambda value: complex(0, value),
    "fraction": lambda value: Fraction(value),
}


@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_optimizers_are_compared_by_value_in_whatever_they_are_held(make):
    layer = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    guard = make_guard(layer, [optimizer])

    def numbers(value):
        optimizer.param_groups[0][7] = make(value)  # a name may be of any type
        *_, description = guard._describe_settings()
        assert "setting `7` of parameter group 0 of optimizer 0 (SGD)" in description
        return guard.numbers(), {name: value_to_text(one) for name, one in description.items()}

    first, again, other = numbers(0.25), numbers(0.25), numbers(0.75)
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_optimizers_of_other_parameters_or_in_another_order_differ():
    layer = torch.nn.Linear(1, 1)
    weight, bias = layer.parameters()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = make_guard(layer, [optimizer])
    found = []
    for parameters in ([weight], [bias], [weight, bias], [bias, weight], [weight]):
        optimizer.param_groups[0]["params"][:] = parameters
        found.append(guard.numbers())
    assert found[0] == found[-1]
    assert len(set(found)) == 4
