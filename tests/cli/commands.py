"""The command in a process of its own, and classes of a person who uses it."""

from tests.support.programs import run_python

COMMAND = ["-m", "lightning_ddp_ext"]


def command(folder, *overrides, code=0, limit=180, umask=-1, **environment):
    environment = {"COLUMNS": "120", **environment}
    return run_python(*COMMAND, *overrides, code=code, cwd=folder, limit=limit, umask=umask, env=environment)


def run_folder(folder):
    (found,) = folder.glob("runs/*/*")
    return found


def names_setting(key, text):
    """Return True if a message names a setting, or at least the beginning of a misspelt one."""
    parts = key.split(".")
    starts = (".".join(parts[:end]) for end in range(min(2, len(parts)), len(parts) + 1))
    return f"`{parts[-1]}" in text or any(start in text for start in starts)


OWN = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Net(LightningModule):
    def __init__(self, width=4, rate=0.1):
        super().__init__()
        self.rate = rate
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("my_val", self.layer(batch[0]).square().mean(), sync_dist=True)
    def test_step(self, batch, batch_idx):
        self.log("my_test", self.layer(batch[0]).square().mean(), sync_dist=True)
    def predict_step(self, batch, batch_idx):
        return self.layer(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(256.0).reshape(64, 4) / 256), batch_size=8)
    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

class WithoutTest(LightningDataModule):
    train_dataloader = Data.train_dataloader
"""
