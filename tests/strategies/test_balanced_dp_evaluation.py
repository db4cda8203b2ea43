"""Validation, test and prediction give what one device gives, in the same order."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.parity import SPLITS, Evaluated, balanced, dataset, quiet_trainer, seeded


@pytest.mark.parametrize(("split", "devices"), SPLITS)
@pytest.mark.parametrize("samples", [1, 2, 27])
def test_validation_and_test_equal_one_device(split, devices, samples):
    def run(strategy, count):
        trainer = quiet_trainer(strategy, count, precision="64-true")
        module = seeded(Evaluated)
        loaders = [DataLoader(dataset(samples), batch_size=8) for _ in range(2)]
        return [
            *trainer.validate(module, loaders[0], verbose=False),
            *trainer.test(module, loaders, verbose=False),
        ]

    for result, expected in zip(run(balanced(split), devices), run("auto", 1), strict=True):
        assert result == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("split", "devices"), SPLITS)
def test_predictions_keep_their_order(split, devices):
    def run(strategy, count):
        trainer = quiet_trainer(strategy, count, precision="64-true")
        return trainer.predict(seeded(Evaluated), DataLoader(dataset(27), batch_size=8))

    for result, expected in zip(run(balanced(split), devices), run("auto", 1), strict=True):
        torch.testing.assert_close(result["logits"], expected["logits"])
        assert result["index"] == expected["index"]
