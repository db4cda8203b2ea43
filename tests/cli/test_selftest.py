"""`lightning-ddp-ext doctor --selftest`: green on local ranks and on a busy node, red with each of seven faults."""

import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch

from lightning_ddp_ext.cli import selftest as trials
from tests.cli.commands import command

# Python imports this module when it starts, in `doctor` and in the processes of its trials.
SEED_A_FAULT = """
import os, signal, sys, time

if any("lightning_ddp_ext" in argument for argument in sys.orig_argv):
    from lightning_ddp_ext.batches.weights import WeightRule
    from lightning_ddp_ext.cli import selftest
    from lightning_ddp_ext.reducer.buffer_synchronizer import BufferSynchronizer

    import torch

    class Stopping(selftest.Model):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and torch.distributed.is_initialized():
                os.kill(os.getpid(), signal.SIGSTOP)
            return super().training_step(batch, batch_idx)

    class Perturbing(selftest.Model):
        def on_train_batch_end(self, *args):
            with torch.no_grad():
                self.last.weight[0, 0] += 1e-6

    stack = "Exception raised from f at f.cpp:1 (most recent call first):\\nframe #0: c10::Error::Error() + 0x1 (0x2)"

    class Failing(selftest.Model):
        def training_step(self, batch, batch_idx):
            raise RuntimeError(f"broken\\n{stack}")

    fault, is_last = os.environ["SEEDED_FAULT"], os.environ.get("RANK") == "1"
    names = {"uneven": ["ddp_join"], "killed": ["killed rank"]}.get(fault, ["ddp_checkpoint"])
    selftest._TRIALS = [trial for trial in selftest._TRIALS if trial.name in names]
    if fault == "weight":
        WeightRule.weigh = lambda self, batch, samples: 1.0
    elif fault == "parameter" and is_last:
        selftest.Model = Perturbing
    elif fault == "buffer":
        BufferSynchronizer.synchronize = lambda self, *args, **kwargs: None
    elif fault == "stopped":
        selftest.LIMIT = 100
        selftest.Model = Stopping if is_last else selftest.Model
    elif fault == "port":
        selftest._CONNECT_LIMIT = 8.0
        if is_last:
            os.environ["MASTER_PORT"] = "9"
    elif fault == "native":
        selftest.Model = Failing
        os.getloadavg = lambda: (99.0, 0.0, 0.0)
    elif fault == "slow imports":
        time.sleep(12 if is_last else 0)
    elif fault == "doctor":
        selftest.LIMIT = -20
        run = selftest._run_process

        def run_or_stop(trial, arguments, variables):
            if variables["RANK"]:
                os.kill(os.getpid(), signal.SIGSTOP)
            return run(trial, arguments, variables)

        selftest._run_process = run_or_stop
"""


def selftest(folder, devices, fault=None, code=0):
    environment = {}
    if fault is not None:
        (folder / "sitecustomize.py").write_text(SEED_A_FAULT)
        environment = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "SEEDED_FAULT": fault}
    return command(folder, "doctor", "--selftest", f"trainer.devices={devices}", code=code, limit=280, **environment)


@pytest.mark.slow
def test_all_trials_succeed_on_local_ranks(tmp_path):
    run = selftest(tmp_path, 2)
    for trial in ("balanced_dp", "ddp_checkpoint", "ddp_join", "balanced_ddp", "killed rank"):
        assert re.search(rf"│ {trial} .*│ ok │", run.stdout), run.stdout
    assert "Healthy" in run.stdout


@pytest.mark.slow
def test_a_rank_that_imports_for_longer_does_not_fail_a_trial(tmp_path):
    run = selftest(tmp_path, 2, "slow imports")
    assert re.search(r"│ ddp_checkpoint .*│ ok │", run.stdout), run.stdout


def test_the_port_of_a_trial_is_open_before_its_ranks_start(monkeypatch):
    def run_process(trial, arguments, variables):
        socket.create_connection((variables["MASTER_ADDR"], variables["MASTER_PORT"])).close()
        return "", ""

    monkeypatch.setattr(trials, "_TRIALS", [trial for trial in trials._TRIALS if trial.name == "ddp_checkpoint"])
    monkeypatch.setattr(trials, "_run_process", run_process)
    monkeypatch.setattr(trials, "own_group", lambda timeout: None)
    monkeypatch.setattr(trials, "broadcast_object", lambda value, *_: value)
    monkeypatch.setattr(trials, "gather_objects", lambda value, *_: [value])
    rank = SimpleNamespace(
        global_rank=lambda: 0, world_size=lambda: 1, local_rank=lambda: 0, main_address="127.0.0.1"
    )  # fmt: skip
    strategy = SimpleNamespace(
        cluster_environment=rank, num_nodes=1, num_processes=1, parallel_devices=[torch.device("cpu")],
        accelerator=None, root_device=torch.device("cpu"),
    )  # fmt: skip
    ((_, _, problem),) = trials.run_trials(strategy, SimpleNamespace(backend="gloo", network_interface=None))
    assert problem == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("weight", "parameters and buffers differ by"),
        ("parameter", "`last.weight`, float64 [1, 8], of rank 1 differs from rank 0"),
        ("buffer", "`mean`, float64 [6], of rank 1 differs from rank 0"),
        ("stopped", "stalled"),
        ("port", "127.0.0.1:9"),
        ("native", "RuntimeError: broken"),
        ("doctor", "rank 0: the `doctor` of another rank has not answered"),
    ],
)
def test_a_fault_is_found(tmp_path, fault, said):
    run = selftest(tmp_path, 2, fault, code=1)
    verdict = run.stdout[run.stdout.index("Not healthy") :]
    assert said in verdict, run.stdout
    assert re.search(r"│ ddp_checkpoint │ +│ failed │", run.stdout)  # the verdict alone has the error
    assert "frame #" not in run.stdout
    assert "Exception raised from" not in run.stdout
    assert ("is busy, with a load average of 99.0" in verdict) == (fault == "native")
