"""`ddp_checkpoint` stopped by a signal or an error, and with a model of Hugging Face."""

import copy
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional

from tests.strategies.ddp_modules import Momentum
from tests.strategies.ddp_ranks import KeepGradients, batches_of, digest_of, quiet_trainer
from tests.support.processes import run_processes


class SignalAt(Callback):
    """Sends SIGTERM to this process after a batch, while the loop is running."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.last = -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.last = batch_idx
        if batch_idx == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)


def train_until_signal(rank: int, folder: str, accumulate: int = 1) -> dict[str, Any]:
    """Signal one rank in the fourth batch, or in the second batch of a window; returns the end of this rank."""
    warnings.simplefilter("ignore")
    own = int(os.environ["RANK"])
    callback = SignalAt((3 if accumulate == 1 else 1) if own == rank else -2)
    module = Momentum()
    trainer = quiet_trainer(
        strategy="ddp_checkpoint",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        precision="64-true",
        callbacks=[callback],
        default_root_dir=folder,
    )
    loader = torch.utils.data.DataLoader(batches_of([[4] * 50] * 2, own), batch_size=None)
    exception = ""
    try:
        trainer.fit(module, loader)
    except BaseException as error:
        exception = type(error).__name__
    end = {"exception": exception, "batch": callback.last, "steps": trainer.global_step}
    return {**end, "digest": digest_of(module, trainer)}


class FailAt(Callback):
    """Fails on one rank."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank == 1:
            raise ArithmeticError("boom")


def fail_and_save(folder: str) -> dict[str, Any]:
    """Fail on one rank while every rank saves on exceptions."""
    warnings.simplefilter("ignore")
    handler = signal.getsignal(signal.SIGTERM)
    callbacks = [FailAt(), ModelCheckpoint(folder, "{step}", save_on_exception=True)]
    trainer = quiet_trainer(
        strategy="ddp_checkpoint", max_epochs=1, precision="64-true", callbacks=callbacks, enable_checkpointing=True
    )
    batches = batches_of([[4] * 6] * 2, trainer.global_rank)
    error = ""
    try:
        trainer.fit(Momentum(), torch.utils.data.DataLoader(batches, batch_size=None))
    except Exception as raised:
        error = type(raised).__name__
    files = sorted(os.listdir(folder)) if trainer.is_global_zero else []
    steps = [torch.load(os.path.join(folder, file), weights_only=True)["global_step"] for file in files]
    return {"error": error, "steps": steps, "is_restored": signal.getsignal(signal.SIGTERM) is handler}


def count_broadcasts(strategy: str) -> int:
    """Count the calls of `torch.distributed.broadcast` in five batches, after a first one."""
    warnings.simplefilter("ignore")
    calls = []
    original = torch.distributed.broadcast

    class CountLater(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            def counted(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return original(*args, **kwargs)

            torch.distributed.broadcast = counted

        def on_train_end(self, *args: Any) -> None:
            torch.distributed.broadcast = original

    trainer = quiet_trainer(strategy=strategy, max_epochs=1, precision="64-true", callbacks=[CountLater()])
    own = int(os.environ["RANK"])
    trainer.fit(Momentum(), torch.utils.data.DataLoader(batches_of([[4] * 6] * 2, own), batch_size=None))
    return len(calls)


class TwoTasks(LightningModule):
    """An encoder of Hugging Face whose layers are recomputed, and two heads with a backward pass each."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.automatic_optimization = False
        config = BertConfig(
            vocab_size=50,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.encoder.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        self.heads = nn.ModuleList(nn.Linear(16, 3) for _ in range(2))
        self.forwards = 0
        self.encoder.encoder.layer[0].attention.self.query.register_forward_hook(self.count)
        self.losses = 0

    def count(self, *args: Any) -> None:
        self.forwards += 1

    def backwards(self, batch: Tensor, backward: Callable[[Tensor], None]) -> None:
        for task, head in enumerate(self.heads):
            states = self.encoder(input_ids=batch).last_hidden_state
            self.losses += 1
            backward(functional.cross_entropy(head(states).flatten(0, 1), (batch % 3 + task).clamp(max=2).flatten()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backwards(batch, self.manual_backward)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_bert(use_reentrant: bool, theirs: bool = False) -> dict[str, Any]:
    """Compare three steps with one process that has the sentences of both ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    alone = TwoTasks(use_reentrant).double().train()
    together = copy.deepcopy(alone)
    generator = torch.Generator().manual_seed(0)
    sentences = torch.randint(50, (3, 2, 4, 8), generator=generator)  # batch, rank, sample, token
    optimizer = alone.configure_optimizers()
    callback = KeepGradients()
    gradients = []
    for batch in sentences:
        optimizer.zero_grad()
        alone.backwards(batch.flatten(0, 1), lambda loss: loss.backward())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in alone.parameters()]))
        optimizer.step()
    strategy = DDPStrategy() if theirs else "ddp_checkpoint"
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, precision="64-true", callbacks=[callback])
    loader = torch.utils.data.DataLoader(sentences[:, int(os.environ["RANK"])], batch_size=None)
    try:
        trainer.fit(together, loader)
    except RuntimeError as error:
        return {"message": str(error)}
    pairs = zip(gradients, callback.kept, strict=True)
    flat = nn.utils.parameters_to_vector(together.parameters()).detach()
    first = trainer.strategy.broadcast(flat)
    return {
        "message": "",
        "error": max(float((one - other).norm() / one.norm()) for one, other in pairs),
        "spread": float((flat - first).abs().max()),
        "forwards": together.losses,
        "recomputed": together.forwards,
    }


def run_all(folder: str) -> dict[str, Any]:
    """All runs on this rank; the last ones may leave collectives unmatched."""
    return {
        "reentrant": fit_bert(True),
        "non-reentrant": fit_bert(False),
        "broadcasts of ddp_checkpoint": count_broadcasts("ddp_checkpoint"),
        "broadcasts of ddp": count_broadcasts("ddp"),
        "signal": train_until_signal(0, folder),
        "signal in a window": train_until_signal(1, folder, 4),
        "failure": fail_and_save(f"{folder}/failure"),
        "reentrant with ddp": fit_bert(True, theirs=True),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank found; one launch for all tests below."""
    return run_processes(run_all, 2, str(tmp_path_factory.mktemp("runs")), timeout=200)


def test_a_signal_to_one_rank_ends_all_after_the_same_batch_or_window(found):
    ends = [by_name["signal"] for by_name in found]
    assert [(end["exception"], end["batch"]) for end in ends] == [("SIGTERMException", 3)] * 2
    assert ends[0]["digest"] == ends[1]["digest"]
    ends = [by_name["signal in a window"] for by_name in found]
    assert [(end["batch"], end["steps"]) for end in ends] == [(3, 1)] * 2


def test_a_checkpoint_is_saved_when_a_rank_fails_and_signal_handlers_are_restored(found):
    ends = [by_name["failure"] for by_name in found]
    assert [end["error"] for end in ends] == ["OtherRankError", "ArithmeticError"]
    assert ends[0]["steps"] == [2]
    assert all(end["is_restored"] for end in ends)


def test_nothing_is_sent_for_signals_in_a_step(found):
    """Lightning sends a message before each batch."""
    assert [by_name["broadcasts of ddp_checkpoint"] for by_name in found] == [0, 0]
    assert min(by_name["broadcasts of ddp"] for by_name in found) >= 5


@pytest.mark.parametrize("name", ["reentrant", "non-reentrant"])
def test_a_huggingface_model_with_gradient_checkpointing_and_two_losses(found, name):
    for by_name in found:
        assert by_name[name]["error"] < 1e-12
        assert by_name[name]["spread"] == 0.0
        assert by_name[name]["recomputed"] > by_name[name]["forwards"]


def test_torch_fails_on_the_same_model(found):
    """The negative control."""
    assert all(by_name["reentrant with ddp"]["message"] for by_name in found)
