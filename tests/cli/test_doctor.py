"""`lightning-ddp-ext doctor` on one node: its checks before it starts anything, its numbers, and whole runs."""

import re
import resource
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import lightning_ddp_ext.cli.main  # noqa: F401  once for all that are forked
from lightning_ddp_ext import ManualEnvironment
from lightning_ddp_ext.cli import doctor
from lightning_ddp_ext.cli.doctor import (
    SIZES,
    AllReduceTime,
    Diagnosis,
    _compose,
    _local_ranks,
    _parse,
    diagnose,
    measure_all_reduce,
    size_text,
    speed_text,
    time_text,
)
from tests import virtual_accelerator
from tests.distributed import rank_programs, rank_server
from tests.support import devices
from tests.support.ports import free_port
from tests.support.processes import run_processes
from tests.support.programs import run_python

LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_PTY_PORT", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture
def _not_launched(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_not_launched")
@pytest.mark.parametrize(
    ("overrides", "environ", "strategy"),
    [
        ([], {}, "ddp_checkpoint"),
        (["trainer.devices=2", "network=auto"], {}, "ddp_checkpoint"),
        (["trainer.devices=2", "model.width=4"], {"SLURM_STEP_NUM_TASKS": "2"}, "ddp_checkpoint"),
        (["strategy=ddp_join"], {}, "ddp_join"),
        (["strategy=single"], {}, "single"),
        # meant for another strategy
        (["strategy.gpu0_batch_size=8"], {}, "balanced_dp"),
        (["strategy=balanced_dp", "strategy.gpu0_batch_size=8"], {}, "balanced_dp"),
        (["experiment=stdlib_stream"], {}, "balanced_dp"),
        (["experiment=mine"], {}, "single"),
        (["trainer.devices=2"], {"SLURM_STEP_NUM_TASKS": "1"}, "balanced_dp"),
    ],
)
def test_the_default_strategy_is_replaced_only_if_no_setting_is_about_it(
    monkeypatch, tmp_path, overrides, environ, strategy
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "conf" / "experiment" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\ndefaults: [override /strategy: single]\n")
    assert _compose(_parse(overrides)).hydra.runtime.choices.strategy == strategy


@pytest.mark.usefixtures("_not_launched")
def test_settings_that_training_rejects_are_not_healthy(tmp_path):
    own = tmp_path / "conf" / "strategy" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("_target_: lightning.pytorch.strategies.ModelParallelStrategy\n")
    for overrides, message in (
        (["strategy=ddp", "data.train_fractions=[0.7,0.3]"], "needs equally many. Use `strategy=ddp_join`."),
        (["strategy=ddp", "data.train_fractions=[0.7,0.2,0.1]"], "got [0.7, 0.2, 0.1] for 2 processes"),
        (["strategy=mine"], "whose processes `doctor` does not know how to start"),
    ):
        diagnosis = diagnose(_parse(["trainer.devices=2", "trainer.accelerator=cpu", *overrides]))
        assert (diagnosis.failed, message in diagnosis.verdict) == ("settings", True), diagnosis.verdict


def test_bandwidths_follow_nccls_tests():
    assert (SIZES[0], SIZES[-1]) == (2**10, 2**26)
    for world_size, factor in ((2, 1.0), (4, 1.5), (8, 1.75)):
        assert AllReduceTime(size=1000, seconds=0.5).bandwidths(world_size) == (2000, 2000 * factor)
    assert [time_text(0.00021), time_text(1.5)] == ["0.21 ms", "1.5 s"]
    assert [speed_text(1.234e9), speed_text(5e6)] == ["1.23 GB/s", "5 MB/s"]


def measure_on_a_device():
    """Time all-reduces of one size; return how often the host has waited for the device to be idle."""
    device = devices.init_process_group()
    assert [size for size, _ in measure_all_reduce(device, sizes=(1024,))] == [1024]
    return virtual_accelerator.counts().get("host waits: device.synchronize", 0)


def test_an_all_reduce_is_timed_until_the_device_has_ended_it(virtual_devices):
    assert run_processes(measure_on_a_device, 2) == [10] * 2  # one warms up


def test_local_ranks_are_forked_on_cpus_only(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor.multiprocessing, "get_context", asked.append)
    monkeypatch.setattr(doctor.multiprocessing, "get_all_start_methods", lambda: ["fork", "spawn"])
    environment = ManualEnvironment(num_nodes=1, node_rank=0, main_address="127.0.0.1", main_port=29500)
    for device in ("cpu", "meta"):
        strategy = SimpleNamespace(root_device=torch.device(device), num_nodes=1, num_processes=1)
        with _local_ranks(strategy, environment, None, Diagnosis(rank=0, slurm=None)):
            pass
    assert asked == ["fork", "spawn"]


CPU = "trainer.accelerator=cpu"
WIDE = {"COLUMNS": "400"}  # so that no cell of the table is folded
TASK = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "2", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip


def play_doctor(folder):
    """Play all situations; returns the ended process of each by its name."""
    folder = Path(folder)
    return {name: situation(folder) for name, situation in SITUATIONS.items()}


def _doctor(folder, *arguments, limit=60.0, **env):
    job = {"rank": 0, "arguments": {"arguments": [*arguments, CPU], "folder": str(folder), "env": {**env, **WIDE}}}
    return rank_server.run(rank_programs.diagnose, [job], limit, folder)[0]


def _by_hand(port, nodes=1):
    numbers = f"cluster.num_nodes={nodes}", "cluster.node_rank=0", f"cluster.main_port={port}"
    return "strategy=ddp_join", "cluster=manual", "cluster.main_address=127.0.0.1", *numbers


def _taken_port(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        return _doctor(folder, *_by_hand(other.getsockname()[1]))


SITUATIONS = {
    "healthy": lambda folder: _doctor(folder, "process_group=gloo", "network=loopback"),
    "one process": lambda folder: _doctor(folder, "strategy=balanced_dp"),
    "taken port": _taken_port,
    "missing rank": lambda folder: _doctor(folder, *_by_hand(free_port(), nodes=2), "--timeout=4", "trainer.devices=1"),
    "missing interface": lambda folder: _doctor(folder, "network=interface", "network.interface=nosuch0"),
    "missing backend": lambda folder: _doctor(folder, "process_group=mpi"),
    "mistyped": lambda folder: _doctor(folder, "strategy=ddp", "strategy.bucket=1"),
    "SLURM": lambda folder: _doctor(folder, "cluster.num_nodes=2", **TASK, SLURM_PROCID="0"),
    "SLURM, rank 1": lambda folder: _doctor(folder, "cluster.num_nodes=2", **TASK, SLURM_PROCID="1"),
}


@dataclass(frozen=True)
class Printed:
    """The output of doctor: text and state of each row of the table, and the verdict."""

    rows: dict[str, tuple[str, str]]
    verdict: str

    @classmethod
    def parse(cls, output):
        *lines, verdict = output.splitlines()
        rows, name = {}, ""
        for cells in (line.split("│") for line in lines if "│" in line):
            step, text, state = (cell.strip() for cell in cells[1:-1])
            name = step or name
            rows[name] = (text, state) if step else (f"{rows[name][0]}\n{text}", rows[name][1])
        return cls(rows, verdict)

    @property
    def failed(self):
        return [step for step, (_, state) in self.rows.items() if state != "ok"]

    def check_healthy(self, *nodes):
        """Compare with the ranks of each node, as in "(ranks 0, 1"."""
        assert self.verdict.startswith("Healthy: "), self.verdict
        assert self.failed == []
        found = self.rows["nodes"][0].splitlines()
        assert len(found) == len(nodes)
        assert all(ranks in line for ranks, line in zip(nodes, found, strict=True)), found
        header, *sizes = self.rows["all-reduce"][0].splitlines()
        assert header.split() == ["size", "time", "algorithm", "bus"]
        assert sizes
        for size, line in zip(SIZES, sizes, strict=False):
            assert line.strip().startswith(size_text(size))
            assert re.search(r"[\d.]+ m?s +[\d.]+ [MG]B/s +[\d.]+ [MG]B/s$", line), line


SOON = 30.0  # seconds; a situation whose problem is known at once takes one or two


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All situations in one launch, which imports everything once."""
    unset = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))  # not launched
    folder = str(tmp_path_factory.mktemp("doctor"))
    (played,) = run_processes(play_doctor, 1, folder, env=unset, timeout=290)
    return played


def ended(outcome, code):
    """Return the standard output of a process that has ended with an exit code."""
    assert not outcome["timed_out"], outcome["output"]
    assert outcome["value"] is not None, outcome["output"]
    assert outcome["value"]["code"] == code, outcome["output"]
    return outcome["value"]["stdout"]


def test_a_healthy_node_has_a_row_for_each_step(outcomes):
    found = Printed.parse(ended(outcomes["healthy"], 0))
    steps = ["settings", "nodes", "backend", "rendezvous", "network", "versions", "open files", "devices", "all-reduce"]
    assert list(found.rows) == steps
    text = {step: text for step, (text, _) in found.rows.items()}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    assert f"raised to {limit} if needed: up to {limit // 6} ranks" in text["open files"]
    assert "strategy=ddp_checkpoint, 2 ranks on 1 node" in text["settings"]
    assert text["backend"] == "gloo"
    assert text["rendezvous"].startswith("127.0.0.1:")
    assert text["network"].startswith("gloo: ranks 0-1 on ")
    assert " over lo (" in text["network"]
    for name in ("Python", "torch", "lightning", "lightning-ddp-ext"):
        assert f"{name} " in text["versions"]
    found.check_healthy("(ranks 0, 1): lo 127.0.0.1")
    assert "Healthy: 2 ranks on 1 node add up" in found.verdict


def test_a_strategy_of_one_process_needs_no_network(outcomes):
    found = Printed.parse(ended(outcomes["one process"], 0))
    assert "`strategy=balanced_dp` runs in one process and needs no network" in found.verdict
    assert not {"backend", "rendezvous", "network", "all-reduce"} & set(found.rows)


def test_the_failed_step_is_named_once_within_the_limit(outcomes):
    found = {}
    for name, (step, *parts) in {
        "taken port": ("rendezvous", "in use", "`ss -ltnp` lists", "Choose another port"),
        "missing rank": ("rendezvous", "rank 1 of 2 ranks did not join in time. Check that they have been started"),
        "missing interface": ("network", "`nosuch0` not found on node", "available: lo"),
        "missing backend": ("backend", "no backend `mpi`; available: gloo"),
        "mistyped": ("settings", "`strategy.bucket` is not a setting", "Valid: "),
        "SLURM": ("SLURM", "`SLURM_NTASKS=3`", "rank 3 is missing", "--ntasks-per-node=2"),
    }.items():
        found[name] = Printed.parse(ended(outcomes[name], 1))
        assert found[name].verdict.startswith("Not healthy: ")
        assert found[name].failed == [step]
        assert outcomes[name]["seconds"] < SOON
        assert [part for part in parts if part not in found[name].verdict] == [], name
    assert found["missing interface"].verdict.count("nosuch0") == 1  # though two ranks lack it
    assert "2 ranks" in found["missing interface"].rows["settings"][0]
    assert found["SLURM"].rows["SLURM"][0].startswith("job 7")
    assert ended(outcomes["SLURM, rank 1"], 0) == ""  # launchers end all ranks when one fails
    assert "SLURM_NTASKS" not in outcomes["SLURM, rank 1"]["output"]


@pytest.mark.slow
def test_the_ranks_of_torchrun_are_healthy_and_print_one_table(tmp_path):
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lightning_ddp_ext"]
    done = run_python(*launched, "doctor", "strategy=ddp", CPU, cwd=tmp_path, env={**WIDE, "OMP_NUM_THREADS": "1"})
    found = Printed.parse(done.stdout)
    found.check_healthy("(ranks 0, 1)")
    assert "known from TorchElasticEnvironment" in found.rows["settings"][0]
    assert not list(tmp_path.iterdir())
