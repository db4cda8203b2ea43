"""Freezing, thawing, replacing and compiling parts of the module between steps reaches the replicas."""

import threading

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn

from tests.parity import (
    CLASSES,
    FEATURES,
    Classifier,
    Evaluated,
    assert_same_training,
    balanced,
    batches,
    compare,
    seeded,
    train,
)
from tests.support.devices import device


class WithBackbone(Classifier):
    def __init__(self):
        super().__init__(torch.optim.SGD)
        self.backbone = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())

    def training_step(self, batch, batch_idx):
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), lr=0.1, momentum=0.9)


class Thawing(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.05)


def by_ratio():
    return BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_ratio_lr=0.5, should_align=False)


@pytest.mark.parametrize("finetuning", [Thawing, by_ratio])
def test_finetuning(finetuning):
    single, parallel = compare(WithBackbone, lambda: {"callbacks": [finetuning()], "max_epochs": 4})
    sizes = {gradient.numel() for gradient in single.gradients.after_backward}
    assert len(sizes) == 2
    assert len(parallel.trainer.optimizers[0].param_groups) == 2


class FreezingByHand(WithBackbone):
    """Freezes and thaws between batches, and in the middle of an accumulation."""

    def on_train_batch_start(self, batch, batch_idx):
        self.backbone.requires_grad_(batch_idx % 3 == 1)
        self.network[0].bias.requires_grad_(batch_idx != 2)


def test_freezing_by_hand_in_a_hook():
    compare(FreezingByHand, {"accumulate_grad_batches": 2})


class Growing(Classifier):
    """Gets another head, and another optimizer group for it, in the second epoch."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(5)
            self.network[2] = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).to(self.device, torch.float64)
            self.optimizers().optimizer.add_param_group({"params": self.network[2].parameters(), "lr": 0.2})


def test_a_submodule_replaced_between_epochs():
    single, _ = compare(Growing)
    sizes = {gradient.numel() for gradient in single.gradients.after_backward}
    assert len(sizes) == 2


class Net(nn.Sequential):
    """Dynamo skips classes of torch itself, so that compiling a plain `Sequential` does nothing."""

    def __init__(self, *norm):
        super().__init__(nn.Linear(FEATURES, 7), *norm, nn.Tanh(), nn.Linear(7, CLASSES))

    def forward(self, inputs):
        for layer in self:
            inputs = layer(inputs)
        return inputs


class Compiled(Evaluated):
    """Compiles its network in one of several ways, and counts on which threads the compiled code runs."""

    def __init__(self, how, *norm):
        super().__init__()
        self.network = Net(*norm)
        self.threads = set()
        if how == "wrapper":
            self.network = torch.compile(self.network, backend=self.backend, fullgraph=True)
        elif how == "method":
            self.network.compile(backend=self.backend, fullgraph=True)

    def backend(self, graph, inputs):
        def run(*args):
            self.threads.add(threading.current_thread().name)
            return graph.forward(*args)

        return run


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    # Code is compiled for every chunk size, gradient mode and number of threads.
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("how", ["wrapper", "method"])
def test_compiled_parts_run_compiled_on_every_replica(how):
    def run(kind, **way):
        # Equal batches, because every other size of a chunk is compiled again.
        return train(seeded(lambda: Compiled(kind)), **way, loader=batches(32), val_loader=batches(16), max_epochs=2)

    plain = run("not at all")
    parallel = run(how, strategy=balanced([2, 6]), devices=2)
    assert_same_training(parallel, plain)
    assert parallel.module.threads >= {f"replica-{index}-{device(index)}" for index in (0, 1)}


def test_the_recompile_limit_allows_for_the_threads_of_replicas_while_the_trainer_runs():
    limits, before = set(), torch._dynamo.config.recompile_limit

    class Watching(Classifier):
        def training_step(self, batch, batch_idx):
            limits.add((threading.current_thread().name, torch._dynamo.config.recompile_limit))
            return super().training_step(batch, batch_idx)

    train(Watching(), balanced([2, 6]), 2, max_epochs=1)
    threads = ["MainThread", *(f"replica-{index}-{device(index)}" for index in (0, 1))]
    assert limits == {(name, 2 * before) for name in threads}
    assert torch._dynamo.config.recompile_limit == before


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_batch_norm_has_the_statistics_of_eager_batch_norm():
    def run(kind):
        return train(seeded(lambda: Compiled(kind, nn.BatchNorm1d(7))), balanced([2, 6]), 2, max_epochs=2)

    plain, compiled = run("not at all"), run("method")
    assert_same_training(compiled, plain)
    for found, expected in zip(compiled.module.buffers(), plain.module.buffers(), strict=True):
        torch.testing.assert_close(found, expected)
    assert compiled.module.threads
