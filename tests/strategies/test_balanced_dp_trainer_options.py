"""Options of the Trainer mean the same as on one device."""

import pytest
from lightning.pytorch import Trainer
from torch.nn import functional

from tests.parity import (
    Evaluated,
    GradientRecorder,
    Trained,
    assert_same_training,
    balanced,
    batches,
    both_ways,
    seeded,
    train,
)

OPTIONS = [
    {"overfit_batches": 2},
    {"overfit_batches": 0.5},
    {"limit_train_batches": 0.6, "limit_val_batches": 0.5},
    {"max_steps": 3, "accumulate_grad_batches": 3},
    {"max_steps": 5, "accumulate_grad_batches": 2, "max_epochs": -1},
    {"val_check_interval": 0.5},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
    {"check_val_every_n_epoch": 2},
    {"num_sanity_val_steps": -1},
    {"fast_dev_run": True},
    {"fast_dev_run": 3},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.005, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    {"inference_mode": False},
    {"min_epochs": 2, "max_epochs": 3},
    {"min_steps": 2, "max_steps": 6},
    {"max_time": "00:01:00:00"},
    {"enable_model_summary": True, "enable_progress_bar": True},
    {"use_distributed_sampler": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_equals_one_device(options):
    def run(**way):
        return train(seeded(Evaluated), **way, **{"val_loader": batches(19), "max_epochs": 2, **options})

    assert_same_training(*reversed(both_ways(run)))


def test_training_without_samples_on_the_first_device_equals_one_device():
    def run(**way):
        return train(seeded(Evaluated), **way, val_loader=batches(19), limit_train_batches=0.6, max_steps=5)

    assert_same_training(*reversed(both_ways(run, gpu0_batch_size=0)))


def test_the_tests_fail_when_chunks_weigh_the_same():
    def run(**way):
        return train(seeded(Evaluated), **way, val_loader=batches(19), **OPTIONS[0])

    with pytest.raises(AssertionError, match="after_backward"):
        assert_same_training(*reversed(both_ways(run, split=[2, 6], weight_by="equal")))


@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly=True.`")
def test_anomalies_are_detected_on_every_replica():
    class Infinite(Evaluated):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + (0 * loss).sqrt() if len(batch[0]) == 6 else loss

    def run(**way):
        return train(seeded(Evaluated), **way, detect_anomaly=True)

    assert_same_training(*reversed(both_ways(run)))
    with pytest.raises(RuntimeError, match="returned nan values") as caught:
        train(seeded(Infinite), balanced([2, 6]), 2, detect_anomaly=True)
    assert "replica 1 of 2" in caught.value.__notes__[0]


def test_barebones_training_equals_one_device():
    class Bare(Evaluated):
        def training_step(self, batch, batch_idx):
            return functional.cross_entropy(self.network(batch[0]), batch[1])

    def run(strategy, devices):
        recorder = GradientRecorder()
        options = {"barebones": True, "precision": "64-true", "callbacks": [recorder], "max_epochs": 2}
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=devices, **options)
        module = seeded(Bare)
        trainer.fit(module, batches())
        return Trained(module, trainer, recorder)

    assert_same_training(*reversed(both_ways(run)))
