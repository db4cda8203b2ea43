"""A script that tests start as a user would: one process, which starts the others; `fails` makes its step raise."""

import sys

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPCheckpointStrategy, DDPJoinStrategy


class Net(LightningModule):
    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails:
            raise ArithmeticError("the words of the user")
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Spread(Callback):
    def on_train_end(self, trainer, pl_module):
        weights = pl_module.all_gather(pl_module.layer.weight.detach())
        pl_module.print("SPREAD", float((weights - weights[0]).abs().max()), "STEPS", trainer.global_step)


def main(start_method: str, fails: bool) -> None:
    seed_everything(0, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    trainer = Trainer(
        strategy=(DDPJoinStrategy if fails else DDPCheckpointStrategy)(start_method=start_method),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Spread()],
    )
    net = Net(fails)
    try:
        trainer.fit(net, loader, loader)
    except Exception as error:
        print("CAUGHT", type(error).__name__, str(error).strip().splitlines()[-1])
        return
    if start_method == "popen":  # Lightning's other launchers fit once
        trainer.fit_loop.max_epochs = 3
        trainer.fit(net, loader, loader)
    results = trainer.test(net, loader, verbose=False)
    if trainer.is_global_zero:
        print("TESTED", sorted(results[0]))


if __name__ == "__main__":
    main(sys.argv[1], fails="fails" in sys.argv)
