"""A run that ends with the user's error, started as a user would: one process, which starts the others."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPJoinStrategy


class Failing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        raise ArithmeticError("the words of the user")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    trainer = Trainer(
        strategy=DDPJoinStrategy(start_method=sys.argv[1]),
        accelerator="cpu",
        devices=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Failing(), DataLoader(torch.ones(8, 4)))
    except Exception as error:
        print("CAUGHT", type(error).__name__, str(error).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
