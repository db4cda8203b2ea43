"""Scripts that tests start as a user would: one process, which starts the others."""

import sys

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_ddp_ext import DDPCheckpointStrategy


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.spread = None

    def training_step(self, batch, batch_idx):
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


def main() -> None:
    seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer = Trainer(
        strategy=DDPCheckpointStrategy(start_method=sys.argv[1]),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Spread()],
    )
    net = Net()
    trainer.fit(net, loader, loader)
    if sys.argv[1] == "popen":  # Lightning's other launchers fit once
        trainer.fit_loop.max_epochs = 3
        trainer.fit(net, loader, loader)
    results = trainer.test(net, loader, verbose=False)
    if trainer.is_global_zero:
        print("TESTED", sorted(results[0]))


if __name__ == "__main__":
    main()
