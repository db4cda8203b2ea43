"""Errors of the user's code on one rank or on all: they name their rank, and Python prints them once.

As a script, `test_common_errors.py STRATEGY RANKS KIND`, it trains as a user's program does: one process starts the
others. Ranks fail in a step or in a collective.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.errors import OtherRankError
from tests.support.ports import free_port
from tests.support.processes import run_processes

TEXTS = ["Connection closed by peer", "[gloo/transport/tcp/pair.cc:553] Broken pipe", "NCCL is no word of ours"]


class Failing(BoringModel):
    """Fails on some ranks, in a hook of its own; `kind` says how."""

    def __init__(self, kind, text=""):
        super().__init__()
        self.kind, self.text = kind, text

    def fail(self):
        rank = self.trainer.global_rank
        if self.kind == "all fail" or (self.kind == "rank 1 fails" and rank == 1):
            raise RuntimeError(self.text)
        if self.kind == "collectives differ":
            dist.all_reduce(torch.ones(1)) if rank == 1 else dist.recv(torch.ones(1), 1)

    def training_step(self, batch, index):
        if index == 3:
            self.fail()
        return super().training_step(batch, index)


class Storage(Exception):
    """Cannot be made from one text, so that the main process gets a RuntimeError."""

    def __init__(self, *, endpoint):
        super().__init__(f"Connection reset by peer: {endpoint}")


class Broken(Dataset):
    """Fails in a worker of rank 1."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if os.environ["LOCAL_RANK"] == "1" and index > 20:
            raise Storage(endpoint="https://storage.example")
        return torch.ones(32)


def train(strategy, ranks, module, loader=None):
    options = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"], False)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=ranks, max_epochs=1, limit_val_batches=0, **options)
    trainer.fit(module, loader)


def errors_of(strategy):
    """Fail once for each text, and in a worker of a loader; return the errors of this rank."""
    runs = [(Failing("rank 1 fails", text), DataLoader(torch.ones(64, 32), 4)) for text in TEXTS]
    found = []
    for module, loader in [*runs, (BoringModel(), DataLoader(Broken(), 4, num_workers=1))]:
        pid = os.fork()  # after an error, a process group may be unusable
        path = f"errors-{os.environ['RANK']}"
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        if pid == 0:
            try:
                train(strategy, 2, module, loader)
            except RuntimeError as error:
                with open(path, "w") as file:
                    file.write(f"{type(error).__name__}: {error}".partition("\n")[0])
            os._exit(0)
        os.waitpid(pid, 0)
        with open(path) as file:
            found.append(file.read())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_checkpoint", "balanced_ddp"])
def test_an_error_of_a_rank_is_its_own_whatever_its_text_says(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = run_processes(errors_of, 2, strategy, timeout=150)
    for text, of_other, of_culprit in zip(TEXTS, first, second, strict=False):
        assert of_culprit == f"RuntimeError: {text}"
        assert of_other.startswith(f"OtherRankError: rank 1 failed: RuntimeError: {text} (at step 3")
    assert second[-1] == "RuntimeError: Caught Storage in DataLoader worker process 0."
    assert first[-1].startswith("OtherRankError: rank 1 failed: RuntimeError: Caught Storage in DataLoader worker")


class OtherPasses(BoringModel):
    """Makes two backward passes on rank 0 and one on others, from the third batch on."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2 if self.global_rank == 0 or batch_idx < 2 else 1):
            self.manual_backward(self.layer(batch).square().mean())
        optimizer.step()


@pytest.mark.ranks(2)
def test_other_numbers_of_backward_passes_are_named():
    """Under `ddp_join`; the table of parity has `ddp_checkpoint`, but a process group does not survive this error."""
    message = (
        "ranks wait for different messages: rank 0 for the gradients of batch 2, backward pass 1;"
        " rank 1 for the end of the step after batch 2, backward pass 0. Run equally many backward passes"
    )
    with pytest.raises(OtherRankError, match=f"^{re.escape(message)}"):
        train("ddp_join", 2, OtherPasses(), DataLoader(torch.ones(64, 32), 4))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(TEXTS[0])


@pytest.mark.parametrize("strategy", ["ddp_checkpoint", "ddp_join", "balanced_ddp"])
def test_fabric_leaves_an_error_of_a_backward_pass_as_it_is(strategy, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    try:
        module, _ = fabric.setup(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in fabric.setup_dataloaders(DataLoader(torch.ones(4, 2), 2)):
            with pytest.raises(RuntimeError, match=f"^{TEXTS[0]}$") as raised:
                fabric.backward(Fails.apply(module(batch)).sum())
            assert not isinstance(raised.value, OtherRankError)
            break
    finally:
        dist.destroy_process_group()


def start(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("LIGHTNING_DDP_EXT_FULL_STACKS", None)
    command = [sys.executable, __file__, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert ended.returncode != 0
    return ended.stderr


@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once_with_a_line_for_each_other_rank():
    output = start("ddp_checkpoint", "3", "all fail")
    assert output.count("Traceback (most recent call last)") == 1, output
    lines = [line for line in output.splitlines() if "failed: RuntimeError: no such shard (at step 3" in line]
    assert len(lines) == 2, output
    assert all("which prints the traceback" in line for line in lines)


@pytest.mark.slow
def test_a_stall_is_reported_once_with_a_line_for_each_rank():
    output = start("ddp_join", "2", "collectives differ")
    assert output.count("===== stall report of") == 1, output
    assert "Traceback" not in output
    assert output.count("ends with OtherRankError: see the stall report.") == 2, output
    report = output.partition("===== stall report")[2].partition("\n=====")[0]
    assert "in training_step" in report
    assert report.count("  File ") < 6, report
    assert "test_common_errors.py" in report


if __name__ == "__main__":
    if sys.argv[1] == "ddp_join":
        from lightning_ddp_ext import DDPJoinStrategy

        train(DDPJoinStrategy(stall_timeout=6), int(sys.argv[2]), Failing(sys.argv[3]))
    else:
        train(sys.argv[1], int(sys.argv[2]), Failing(sys.argv[3], "no such shard"))
