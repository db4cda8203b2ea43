"""The subcommand `verify`."""

import json
import re

import pytest
import torch

from lightning_ddp_ext.cli.verify import main
from tests.cli.commands import command
from tests.verification.modules import line_of, masked

MODULES = "tests.verification.modules"


def test_a_healthy_module_ends_with_the_strategy_to_use(capsys):
    assert main([f"{MODULES}:Module", "--data", f"{MODULES}:make_data", "model.width=3", "data.batch_size=4"]) == 0
    use = 'Use Trainer(strategy="ddp") if devices and their batches are alike, Trainer(strategy="balanced_ddp") if not.'
    assert use in " ".join(capsys.readouterr().out.split())


def test_a_finding_ends_with_its_line_as_a_table_or_as_json(capsys):
    command = [f"{MODULES}:Masked", "--data", f"{MODULES}:make_data"]
    assert main(command) == 1
    assert line_of(masked) in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    (finding,) = [one for one in json.loads(capsys.readouterr().out)["checks"] if one["verdict"] == "finding"]
    assert line_of(masked) in finding["where"]


def test_a_batch_of_a_file_is_cut(tmp_path, capsys):
    torch.save([torch.randn(9, 5), torch.arange(9) % 4], tmp_path / "batch.pt")
    assert main([f"{MODULES}:Module", "--batch", str(tmp_path / "batch.pt")]) == 0
    assert 'Trainer(strategy="ddp_join") if not.' in capsys.readouterr().out


def test_a_given_weight_cures_a_finding(capsys):
    weight = "tests.verification.test_verify:count_labels"
    given = ["--strategy", "ddp_join", "--weight_by", weight]
    assert main([f"{MODULES}:Masked", "--data", f"{MODULES}:make_data", *given]) == 0
    assert "does not: a mean over something" in " ".join(re.sub("[│ ]+", " ", capsys.readouterr().out).split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([f"{MODULES}:Module", "--strategy", "no_such_module:make"], "`no_such_module:make` cannot be made"),
        (["no_such_module:Model"], "`no_such_module:Model` cannot be made: ModuleNotFoundError"),
        ([f"{MODULES}:NoModel"], "cannot be made: AttributeError"),
        ([f"{MODULES}:make_data"], "is a DataLoader, not a LightningModule"),
        ([f"{MODULES}:Module", "model.depth=3"], "cannot be made: TypeError"),
        ([f"{MODULES}:Module", "width=3"], "`width` is no argument of the model or the data"),
        ([f"{MODULES}:Module", "--batch", "missing.pt"], "`--batch missing.pt` cannot be read: FileNotFoundError"),
        ([f"{MODULES}:Module"], "the module has no `train_dataloader`. Give `--data` or `--batch`"),
        ([f"{MODULES}:Failing", "--data", f"{MODULES}:make_data"], "ValueError: no such file"),
    ],
)
def test_what_cannot_be_verified_is_one_sentence(arguments, reason, capsys):
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 2
    assert reason in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--data", "a:b", "--batch", "c.pt"]])
def test_impossible_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([f"{MODULES}:Module", *arguments])
    assert "Use 120, the default." in (error := capsys.readouterr().err) or "Leave one out." in error


PROGRAM = """
import pytorch_lightning
import torch
from torch.utils.data import DataLoader


class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data():
    return DataLoader(torch.randn(12, 4), batch_size=12)
"""


@pytest.mark.slow
def test_a_module_of_the_other_import_name_is_verified(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    done = command(tmp_path, "verify", "mine:Model", "--data", "mine:data")
    assert 'Trainer(strategy="balanced_ddp") if not.' in done.stdout
