import pytest
import torch

from lightning_ddp_ext.callbacks import gradient_check as gradient_comparison
from lightning_ddp_ext.callbacks.gradient_check import GradientComparison


def compared(parts, whole):
    comparison = GradientComparison(len(parts))
    for name in whole:
        comparison.add(name, [part[name] for part in parts], whole[name])
    return comparison


def gradients(seed, **sizes):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}


@pytest.fixture
def parts():
    return [gradients(seed, weight=30, bias=1, empty=0) for seed in range(3)]


def weighted(parts, weights):
    return {name: sum(w * part[name] for w, part in zip(weights, parts, strict=True)) for name in parts[0]}


def test_differences_are_those_of_the_vectors_in_blocks_of_any_size(parts, monkeypatch):
    whole, weights = gradients(7, weight=30, bias=1, empty=0), [0.2, 0.3, 0.5]
    errors = {name: (value - whole[name]).norm() for name, value in weighted(parts, weights).items()}
    norm = torch.cat(list(whole.values())).norm()
    expected = torch.stack(list(errors.values())).norm() / norm
    for rows in (1, 7, 1000):
        monkeypatch.setattr(gradient_comparison, "_ROWS", rows)
        comparison = compared(parts, whole)
        assert comparison.difference(weights) == pytest.approx(float(expected), rel=1e-12)
        name, difference = comparison.most_different(weights)
        assert name == "weight"
        assert difference == pytest.approx(float(errors["weight"] / whole["weight"].norm()), rel=1e-12)


def test_weights_that_make_up_the_whole_are_found(parts):
    weights = [0.1, 2.0, 0.0]
    comparison = compared(parts, weighted(parts, weights))
    assert comparison.fit() == pytest.approx(weights, abs=1e-12)
    assert comparison.difference(weights) < 1e-14
    assert comparison.difference([1 / 3] * 3) > 0.1


def test_weights_that_are_not_unique_are_not_guessed(parts):
    twice = [parts[0], parts[0], parts[1]]
    assert compared(twice, weighted(twice, [1, 1, 1])).fit() is None
    few = [{"bias": torch.randn(3)} for _ in range(3)]
    assert compared(few, {"bias": torch.randn(3)}).fit() is None
    parts[0]["weight"][4] = torch.nan
    comparison = compared(parts, gradients(7, weight=30, bias=1, empty=0))
    assert comparison.fit() is None
    assert not comparison.difference([1, 1, 1]) <= 1


def test_a_gradient_of_zero_is_compared(parts):
    nothing = {name: torch.zeros_like(value) for name, value in parts[0].items()}
    assert compared([nothing, nothing], nothing).difference([0.5, 0.5]) == 0
    assert compared([nothing, parts[0]], nothing).difference([0.5, 0.5]) == float("inf")
