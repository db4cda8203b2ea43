"""What `lightning-ddp-ext doctor` looks at, before it starts anything."""

import pytest

from lightning_ddp_ext.cli.doctor import _compose, _diagnose, _parse

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
def test_the_strategy_that_training_would_use_is_replaced_only_where_nothing_is_about_it(
    monkeypatch, tmp_path, overrides, environ, strategy
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "conf" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\ndefaults: [override /strategy: single]\n")
    assert _compose(_parse(overrides)).hydra.runtime.choices.strategy == strategy


def test_what_balanced_dp_is_told_is_no_problem():
    diagnosis = _diagnose(_parse(["strategy.gpu0_batch_size=8", "trainer.accelerator=cpu"]))
    assert diagnosis.healthy, diagnosis.verdict
    assert "`strategy=balanced_dp` runs in one process" in diagnosis.verdict


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_fractions=[0.7,0.3]"], "`strategy=ddp` needs equally many. Use `strategy=ddp_join`."),
        (["data.train_fractions=[0.7,0.2,0.1]"], "got [0.7, 0.2, 0.1] for 2 processes"),
    ],
)
def test_shares_of_the_data_that_training_refuses_are_no_healthy_run(overrides, message):
    diagnosis = _diagnose(_parse(["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", *overrides]))
    assert message in diagnosis.verdict


def test_a_strategy_whose_processes_are_not_known_is_not_said_to_be_healthy(tmp_path):
    own = tmp_path / "conf" / "strategy" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("_target_: lightning.pytorch.strategies.ModelParallelStrategy\n")
    diagnosis = _diagnose(_parse(["strategy=mine", "trainer.devices=2", "trainer.accelerator=cpu"]))
    assert "whose processes `doctor` does not know how to start" in diagnosis.verdict
