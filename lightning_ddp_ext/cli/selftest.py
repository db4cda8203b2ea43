"""`doctor --selftest`: train a small model on the ranks of a run, and compare them with each other and one process.

Each rank runs every trial in a child process, so that it can report trials that hang or crash.
"""

import copy
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_ddp_ext._devices import widest_float
from lightning_ddp_ext._lightning import (
    Callback,
    DDPStrategy,
    FSDPStrategy,
    LightningModule,
    TorchElasticEnvironment,
    Trainer,
    seed_everything,
)
from lightning_ddp_ext.clusters.launchers import PREFIXES
from lightning_ddp_ext.clusters.process_group_options import Connection, device_type_of
from lightning_ddp_ext.distributed.exchange import broadcast_object, gather_objects, own_group
from lightning_ddp_ext.distributed.stores import RendezvousEndpoint, open_store
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.ddp_checkpoint import DDPCheckpointStrategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy
from lightning_ddp_ext.verification.relations import relative_difference
from lightning_ddp_ext.verification.runs import fit

_CONNECT_LIMIT = 180.0  # seconds in which ranks have to import torch and Lightning, and find each other
LIMIT = _CONNECT_LIMIT + 60.0  # seconds of a trial
_STEPS, _FEWER_STEPS = 4, 2  # of rank 0 and of ranks with less data
_KILLED_IN = 1  # step
_FEATURES = 6
_STALL = 10.0  # seconds
_TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4}
_LAST_LINES = 12  # of a process that failed
_NATIVE_LINE = re.compile(r"(\[rank\d+\]: )?\s*($|frame #\d+: |Exception raised from )")  # empty, or of a C++ stack
_RESULT = "result of the trial: "
Batch = tuple[Tensor, Tensor]


class Model(LightningModule):
    """A network with recomputed activations, and a buffer that the forward pass changes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(_FEATURES, 8), nn.Tanh())
        self.last = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(_FEATURES))

    @override
    def forward(self, features: Tensor) -> Any:
        with torch.no_grad():
            self.mean += 0.1 * (features.mean(dim=0) - self.mean)
        return self.last(checkpoint(self.first, features.requires_grad_(), use_reentrant=True))

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(torch.ones((), device=self.device))  # some steps communicate
        return functional.mse_loss(self(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class _Death(Callback):
    """Kills the last rank."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1 and batch_idx == _KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)


def _draw_batches(ranks: int, is_uneven: bool) -> list[list[list[int]]]:
    """Return the samples of each rank in each step, whose number differs from rank to rank and from step to step."""
    samples = itertools.count()
    ends = [_FEWER_STEPS if is_uneven and rank else _STEPS for rank in range(ranks)]
    return [
        [[*itertools.islice(samples, 1 + (rank + step) % 3)] for rank in range(ranks) if step < ends[rank]]
        for step in range(_STEPS)
    ]


@dataclass(frozen=True, slots=True)
class Trial:
    """A training run that succeeds on all ranks, or in which the last rank is killed and the others have to name it."""

    name: str
    success: str  # in the table
    kind: type[ExplicitDDPStrategy] | None  # None for two replicas on each rank
    is_uneven: bool = False
    kills: bool = False


_TRIALS = (
    Trial("balanced_dp", "two replicas train as one process", None),
    Trial("ddp_checkpoint", "ranks are identical, and train as one process", DDPCheckpointStrategy),
    Trial(
        "ddp_join",
        f"with {_STEPS} batches on rank 0 and {_FEWER_STEPS} on others, ranks are identical, and train as one process",
        DDPJoinStrategy,
        is_uneven=True,
    ),
    Trial("balanced_ddp", "ranks divide whole batches, are identical, and train as one process", BalancedDDPStrategy),
    Trial("killed rank", "the other ranks end, and name it", DDPCheckpointStrategy, kills=True),
)


def _train(trial: Trial, devices: Any, num_nodes: int, accelerator: str, **connection: Any) -> str:
    """Train on this rank; return what is wrong, or "" if all ranks are equal to each other and to one process."""
    rank, local_rank, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device(accelerator if isinstance(devices, int) else f"{accelerator}:{devices[local_rank]}")
    dtype = widest_float(device)
    options: dict[str, Any] = {"traces": False, "accelerator": accelerator}
    options["precision"] = "64-true" if dtype == torch.float64 else "32-true"
    steps = _draw_batches(ranks, trial.is_uneven)
    batches = whole_batches = [[*itertools.chain(*step)] for step in steps]
    seed_everything(0, verbose=False)
    model = Model()
    features, targets = torch.randn(2, sum(map(len, batches)), _FEATURES, dtype=dtype)
    samples = TensorDataset(features, targets[:, :1])
    alone = copy.deepcopy(model)
    one = 1 if device.index is None else [device.index]
    fit(alone, DataLoader(samples, batch_sampler=whole_batches), devices=one, **options)
    if trial.kind is None:
        strategy: Any = BalancedDataParallelStrategy(split=[1, 2], parallel_devices=[device, device])
    else:
        strategy = trial.kind(timeout=_CONNECT_LIMIT, stall_timeout=_STALL, **connection)
        options |= {"num_nodes": num_nodes, "plugins": [TorchElasticEnvironment()]}
        if trial.kind is not BalancedDDPStrategy:  # which divides the whole batches itself
            batches = [step[rank] for step in steps if rank < len(step)]
    options |= {"callbacks": [_Death()] if trial.kills else [], "strategy": strategy, "devices": devices}
    ended = fit(model, DataLoader(samples, batch_sampler=batches), **options)
    found, wanted = (nn.utils.parameters_to_vector(one.state_dict().values()).cpu() for one in (model, alone))
    difference = relative_difference(found, wanted)
    problems = [] if ended.difference is None else [ended.difference]
    if not difference < _TOLERANCES[dtype]:
        problems.append(f"parameters and buffers differ by {difference:.0e} from the result of one process")
    return "; ".join(problems)


def run_trials(strategy: DDPStrategy | FSDPStrategy, connection: Connection) -> Iterator[tuple[str, str, str]]:
    """Run all trials on all ranks; yields for each its name, its result, and "" or the problem, alike on all ranks."""
    environment = strategy.cluster_environment
    assert environment is not None and strategy.parallel_devices is not None  # noqa: PT018  the Trainer gives both
    own, ranks, kind = environment.global_rank(), environment.world_size(), device_type_of(strategy)
    arguments = {
        "devices": strategy.num_processes if kind == "cpu" else [device.index for device in strategy.parallel_devices],
        "num_nodes": strategy.num_nodes, "accelerator": kind, "process_group_backend": connection.backend,
        "network_interface": connection.network_interface,
    }  # fmt: skip
    variables = {
        "RANK": own, "WORLD_SIZE": ranks, "LOCAL_RANK": environment.local_rank(),
        "GROUP_RANK": own * strategy.num_nodes // ranks, "MASTER_ADDR": environment.main_address,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    group, last = own_group(timedelta(seconds=LIMIT + 30)), ranks - 1
    for trial in _TRIALS:
        if trial.kills and not last:
            continue
        problems = []
        store: Any = None
        try:
            if own == 0:  # as torchrun's agent does, on a port that no other program can take before
                endpoint = RendezvousEndpoint(environment.main_address, 0)
                limit, nodes = timedelta(seconds=LIMIT), strategy.num_nodes
                store = open_store(endpoint, rank=0, world_size=ranks, num_nodes=nodes, timeout=limit).store
            variables["MASTER_PORT"] = broadcast_object(None if store is None else store.port, group, 0)
            ended = gather_objects(_run_process(trial, arguments, variables), group)
        except RuntimeError:  # of the backend
            ended = []
            problems.append(
                f"rank {own}: the `doctor` of another rank has not answered. Look for a process that has ended or is"
                f" stopped.{_load()}"
            )
        for rank, (text, output) in enumerate(ended):
            if not trial.kills:
                problems += [f"rank {rank}: {text}"] if text else []
            elif rank != last and f"the process of rank {last} is gone" not in output:
                problems.append(
                    f"rank {rank} has not noticed that rank {last} was killed: {text or 'it has trained on'}"
                )
        yield trial.name, trial.success, "\n".join(problems)


def _load() -> str:
    """Return a sentence if this node has more to do than its own trial, otherwise ""."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= 2 * cores:
        return ""
    found = f" Node {socket.gethostname()} is busy, with a load average of {load:.1f} on {cores} cores."
    return f"{found} Repeat the self-test when the node is idle."


def _run_process(trial: Trial, arguments: dict[str, Any], variables: dict[str, Any]) -> tuple[str, str]:
    """Run a trial in a child process; return its problem, or "", and its output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    environ |= {name: str(value) for name, value in variables.items()}
    program = f"from {__name__} import run_trial; run_trial()"
    command = [sys.executable, "-c", program, json.dumps(arguments), trial.name]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ,
            timeout=LIMIT,
        )  # fmt: skip
        output, code, why = run.stdout, run.returncode, f"it ended with exit code {run.returncode}"
    except subprocess.TimeoutExpired as error:
        output, code, why = error.stdout or b"", None, f"it was still running after {LIMIT:g} s"
    said = output.decode(errors="replace")
    found = re.search(f"^{_RESULT}(.*)$", said, re.MULTILINE)
    if found and code == 0:
        return found[1], said
    lines = "\n".join([line for line in said.splitlines() if not _NATIVE_LINE.match(line)][-_LAST_LINES:])
    return f"{why}.{_load()} Its last lines:\n{lines}", said


def run_trial() -> None:
    """Run the trial of the command line, and print its problem."""
    arguments, name = sys.argv[1:]
    (trial,) = (one for one in _TRIALS if one.name == name)
    print(f"\n{_RESULT}{_train(trial, **json.loads(arguments))}")
