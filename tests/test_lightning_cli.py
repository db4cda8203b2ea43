import pytest
from lightning.pytorch.cli import LightningCLI

from lightning_ddp_ext import BalancedDataParallelStrategy
from lightning_ddp_ext.demo.digits import DigitsCNN, DigitsData

QUIET = [
    "--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false", "--trainer.max_steps=3", "--trainer.limit_val_batches=1",
    "--trainer.accelerator=cpu", "--trainer.devices=2",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:No seed found")
@pytest.mark.parametrize(
    ("arguments", "chunks"),
    [
        (["--trainer.strategy=balanced_dp"], [16, 16]),
        (
            ["--trainer.strategy=lightning_ddp_ext.BalancedDataParallelStrategy", "--trainer.strategy.split=[1, 3]"],
            [8, 24],
        ),
    ],
)
def test_lightning_cli_takes_the_name_and_the_class(monkeypatch, arguments, chunks):
    monkeypatch.setattr("sys.argv", ["train.py", "fit", *QUIET, *arguments])
    cli = LightningCLI(DigitsCNN, DigitsData, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, BalancedDataParallelStrategy)
    assert cli.trainer.global_step == 3
    assert cli.trainer.strategy.split_sizes(32) == chunks
