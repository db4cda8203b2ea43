"""`lightning-ddp-ext doctor` in situations of one node; forked from a process that has everything imported."""

import re
import socket
from dataclasses import dataclass
from pathlib import Path

import lightning_ddp_ext.cli.main  # noqa: F401  once for all that are forked
from lightning_ddp_ext.cli.doctor import SIZES, size_text
from lightning_ddp_ext.clusters.slurm import candidate_ports
from tests.distributed import rank_server
from tests.distributed.rank_programs import diagnose
from tests.support.ports import free_port

CPU = "trainer.accelerator=cpu"
WIDE = {"COLUMNS": "400"}  # so that no cell of the table is folded
TASK = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "2", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0",
    "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2,1",
}  # fmt: skip


def play_doctor(folder):
    """Play all situations; returns what became of the process of each by its name."""
    folder = Path(folder)
    return {name: situation(folder) for name, situation in SITUATIONS.items()}


def _doctor(folder, *arguments, limit=60.0, **env):
    job = {"rank": 0, "arguments": {"arguments": [*arguments, CPU], "folder": str(folder), "env": {**env, **WIDE}}}
    return rank_server.run(diagnose, [job], limit, folder)[0]


def _by_hand(port, nodes=1):
    numbers = f"cluster.num_nodes={nodes}", "cluster.node_rank=0", f"cluster.main_port={port}"
    return "strategy=ddp_join", "cluster=manual", "cluster.main_address=127.0.0.1", *numbers


def _of_slurm(rank):
    return {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0",
        "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1",
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
    }  # fmt: skip


def _taken_port_of_slurm(folder):
    arguments = ["strategy=ddp_join", "cluster=slurm", "cluster.num_nodes=1", "trainer.devices=2", CPU]
    jobs = [
        {"rank": rank, "arguments": {"arguments": arguments, "folder": str(folder), "env": {**_of_slurm(rank), **WIDE}}}
        for rank in range(2)
    ]
    with socket.create_server(("127.0.0.1", candidate_ports(_of_slurm(0))[0])):
        return rank_server.run(diagnose, jobs, 60.0, folder)[0]


def _taken_port(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        return _doctor(folder, *_by_hand(other.getsockname()[1]))


SITUATIONS = {
    "healthy": lambda folder: _doctor(folder),
    "table": lambda folder: _doctor(folder, "strategy=ddp_join", "process_group=gloo", "network=loopback"),
    "one process": lambda folder: _doctor(folder, "strategy=balanced_dp"),
    "taken port": _taken_port,
    "taken port of SLURM": _taken_port_of_slurm,
    "missing rank": lambda folder: _doctor(folder, *_by_hand(free_port(), nodes=2), "--timeout=4", "trainer.devices=1"),
    "missing interface": lambda folder: _doctor(folder, "network=interface", "network.interface=nosuch0"),
    "missing backend": lambda folder: _doctor(folder, "process_group=mpi"),
    "mistyped": lambda folder: _doctor(folder, "strategy=ddp", "strategy.bucket=1"),
    "SLURM": lambda folder: _doctor(folder, "cluster.num_nodes=2", **TASK, SLURM_PROCID="0"),
    "SLURM, rank 1": lambda folder: _doctor(folder, "cluster.num_nodes=2", **TASK, SLURM_PROCID="1"),
}


@dataclass(frozen=True)
class Printed:
    """What doctor printed: text and state of each row of the table, and the verdict."""

    rows: dict[str, tuple[str, str]]
    verdict: str

    @classmethod
    def parse(cls, output):
        *lines, verdict = output.splitlines()
        rows = {}
        for cells in (line.split("│") for line in lines if "│" in line):
            step, text, state = (cell.strip() for cell in cells[1:-1])
            if step:
                name = step
                rows[name] = (text, state)
            else:
                rows[name] = (f"{rows[name][0]}\n{text}", rows[name][1])
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
