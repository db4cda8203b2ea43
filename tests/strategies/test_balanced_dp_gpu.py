"""Parity on CUDA: logical replicas of one device, and several devices where there are some.

Needs a CUDA device, which the checks of this project run without.
"""

import pytest
import torch

from lightning_ddp_ext import BalancedDataParallelStrategy
from tests.parity import Classifier, assert_same_training, batches, seeded, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEVERAL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("options", [{}, {"split": [2, 6]}, {"gpu0_batch_size": 0}])
@pytest.mark.parametrize("devices", [[0, 0], pytest.param([0, 1], marks=SEVERAL)])
def test_gradients_and_parameters_equal_one_device(devices, options):
    strategy = BalancedDataParallelStrategy(
        **options, parallel_devices=[torch.device("cuda", index) for index in devices]
    )
    single = train(seeded(Classifier), devices=1, accelerator="gpu", loader=batches(27))
    parallel = train(seeded(Classifier), strategy, len(set(devices)), accelerator="gpu", loader=batches(27))
    assert_same_training(parallel, single)
    assert all(
        seconds > 0 for size, seconds in zip(strategy.chunk_sizes, strategy.replica_seconds, strict=True) if size
    )
