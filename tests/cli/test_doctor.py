"""The checks of `lightning-ddp-ext doctor` before it starts anything, and its numbers."""

import pytest

from lightning_ddp_ext.cli.doctor import SIZES, AllReduceTime, _compose, _parse, diagnose, speed_text, time_text

LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PTY_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("overrides", "environ", "strategy"),
    [
        ([], {}, "ddp_checkpoint"),
        (["trainer.devices=2", "network=auto"], {}, "ddp_checkpoint"),
        (["trainer.devices=2", "model.width=4"], {"SLURM_STEP_NUM_TASKS": "2"}, "ddp_checkpoint"),
        (["strategy=ddp_join"], {}, "ddp_join"),
        (["strategy=single"], {}, "single"),
        # meant for another strategy
        (["strategy.gpu0_batch_size=8"], {}, "balanced_dp"),
        (["strategy=balanced_dp", "strategy.gpu0_batch_size=8"], {}, "balanced_dp"),
        (["experiment=stdlib_stream"], {}, "balanced_dp"),
        (["experiment=mine"], {}, "single"),
        (["trainer.devices=2"], {"SLURM_STEP_NUM_TASKS": "1"}, "balanced_dp"),
    ],
)
def test_the_default_strategy_is_replaced_only_if_no_setting_is_about_it(
    monkeypatch, tmp_path, overrides, environ, strategy
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "conf" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\ndefaults: [override /strategy: single]\n")
    assert _compose(_parse(overrides)).hydra.runtime.choices.strategy == strategy


def test_balanced_dp_is_healthy_in_one_process():
    diagnosis = diagnose(_parse(["strategy.gpu0_batch_size=8", "trainer.accelerator=cpu"]))
    assert diagnosis.is_healthy, diagnosis.verdict
    assert "`strategy=balanced_dp` runs in one process" in diagnosis.verdict


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=ddp", "data.train_fractions=[0.7,0.3]"], "needs equally many. Use `strategy=ddp_join`."),
        (["strategy=ddp", "data.train_fractions=[0.7,0.2,0.1]"], "got [0.7, 0.2, 0.1] for 2 processes"),
        (["strategy=mine"], "whose processes `doctor` does not know how to start"),
    ],
)
def test_settings_that_training_rejects_are_not_healthy(tmp_path, overrides, message):
    own = tmp_path / "conf" / "strategy" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("_target_: lightning.pytorch.strategies.ModelParallelStrategy\n")
    diagnosis = diagnose(_parse(["trainer.devices=2", "trainer.accelerator=cpu", *overrides]))
    assert diagnosis.failed == "settings"
    assert message in diagnosis.verdict


def test_bandwidths_follow_nccls_tests():
    assert (SIZES[0], SIZES[-1]) == (2**10, 2**26)
    for world_size, factor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        measured = AllReduceTime(size=1000, seconds=0.5, world_size=world_size)
        assert measured.algorithm_bandwidth == 2000
        assert measured.bus_bandwidth == 2000 * factor
    assert [time_text(0.00021), time_text(1.5)] == ["0.21 ms", "1.5 s"]
    assert [speed_text(1.234e9), speed_text(5e6)] == ["1.23 GB/s", "5 MB/s"]
