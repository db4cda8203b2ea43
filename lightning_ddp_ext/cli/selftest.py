"""`doctor --selftest`: train a small model on the ranks of a run, and compare them with each other and one process.

Each rank runs every trial in a child process, so that it can report trials that hang or crash.
"""

import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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
from lightning_ddp_ext.strategies.balanced_ddp import BalancedDDPStrategy
from lightning_ddp_ext.strategies.balanced_dp import BalancedDataParallelStrategy
from lightning_ddp_ext.strategies.ddp_checkpoint import DDPCheckpointStrategy
from lightning_ddp_ext.strategies.ddp_join import DDPJoinStrategy
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy
from lightning_ddp_ext.verification.runs import fit, relative_difference

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


@dataclass(frozen=True, slots=True)
class TrialRank:
    """A rank of a trial: its place, its devices, and how it finds the others."""

    rank: int
    world_size: int
    local_rank: int
    num_nodes: int
    accelerator: str
    devices: int | list[int]  # of its node, as the Trainer takes them
    backend: str | None
    network_interface: str | None

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if isinstance(self.devices, int):
            return torch.device(self.accelerator)
        return torch.device(self.accelerator, self.devices[self.local_rank])


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


def _batches(rank: int, is_uneven: bool, dtype: torch.dtype) -> list[Batch]:
    """Return the batches of a rank, whose sizes differ from rank to rank and from step to step."""
    generator = torch.Generator().manual_seed(rank)
    sizes = [1 + (rank + step) % 3 for step in range(_FEWER_STEPS if is_uneven and rank else _STEPS)]

    def draw(size: int, width: int) -> Tensor:
        return torch.randn(size, width, generator=generator).to(dtype)

    return [(draw(size, _FEATURES), draw(size, 1)) for size in sizes]


def _whole_batches(world_size: int, is_uneven: bool, dtype: torch.dtype) -> list[Batch]:
    """Return the batches of all ranks, concatenated for each step."""
    by_rank = [_batches(rank, is_uneven, dtype) for rank in range(world_size)]
    steps = [[batches[step] for batches in by_rank if step < len(batches)] for step in range(_STEPS)]
    return [(torch.cat([one for one, _ in step]), torch.cat([other for _, other in step])) for step in steps]


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


def _train(own: TrialRank, trial: Trial) -> str:
    """Train on this rank; return what is wrong, or "" if all ranks are equal to each other and to one process."""
    dtype = widest_float(own.device)
    batches = whole_batches = _whole_batches(own.world_size, trial.is_uneven, dtype)
    options: dict[str, Any] = {"traces": False, "accelerator": own.accelerator, "limit_val_batches": 0}
    options["precision"] = "64-true" if dtype == torch.float64 else "32-true"
    seed_everything(0, verbose=False)
    model = Model()
    alone = copy.deepcopy(model)
    fit(alone, _loader(whole_batches), devices=_only(own.device), **options)
    if trial.kind is None:
        strategy: Any = BalancedDataParallelStrategy(split=[1, 2], parallel_devices=[own.device, own.device])
    else:
        strategy = trial.kind(
            process_group_backend=own.backend,
            network_interface=own.network_interface,
            timeout=_CONNECT_LIMIT,
            stall_timeout=_STALL,
        )
        options |= {"num_nodes": own.num_nodes, "plugins": [TorchElasticEnvironment()]}
        if trial.kind is not BalancedDDPStrategy:  # which divides the whole batches itself
            batches = _batches(own.rank, trial.is_uneven, dtype)
    options["callbacks"] = [_Death()] if trial.kills else []
    ended = fit(model, _loader(batches), strategy=strategy, devices=own.devices, **options)
    found, wanted = (nn.utils.parameters_to_vector(one.state_dict().values()).cpu() for one in (model, alone))
    difference = relative_difference(found, wanted)
    problems = [] if ended.difference is None else [ended.difference]
    if not difference < _TOLERANCES[dtype]:
        problems.append(f"parameters and buffers differ by {difference:.0e} from the result of one process")
    return "; ".join(problems)


def _loader(batches: list[Batch]) -> DataLoader[Any]:
    indices = torch.split(torch.arange(sum(len(one) for one, _ in batches)), [len(one) for one, _ in batches])
    samples = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
    return DataLoader(samples, batch_sampler=[one.tolist() for one in indices])


def _only(device: torch.device) -> int | list[int]:
    """Return a device as the Trainer takes it."""
    return 1 if device.index is None else [device.index]


def run_trials(strategy: DDPStrategy | FSDPStrategy, connection: Connection) -> Iterator[tuple[str, str, str]]:
    """Run all trials on all ranks; yields for each its name, its result, and "" or the problem, alike on all ranks."""
    environment = strategy.cluster_environment
    assert environment is not None and strategy.parallel_devices is not None  # noqa: PT018  the Trainer gives both
    kind = device_type_of(strategy)
    own = TrialRank(
        rank=environment.global_rank(),
        world_size=environment.world_size(),
        local_rank=environment.local_rank(),
        num_nodes=strategy.num_nodes,
        accelerator=kind,
        devices=strategy.num_processes if kind == "cpu" else [device.index for device in strategy.parallel_devices],
        backend=connection.backend,
        network_interface=connection.network_interface,
    )
    group = own_group(timedelta(seconds=LIMIT + 30))
    last = own.world_size - 1
    for trial in _TRIALS:
        if trial.kills and not last:
            continue
        problems = []
        store: Any = None
        try:
            if own.rank == 0:  # as torchrun's agent does, on a port that no other program can take before
                store = dist.TCPStore(environment.main_address, 0, is_master=True, wait_for_workers=False)
            port = broadcast_object(None if store is None else store.port, group, 0)
            ended = gather_objects(_run_process(own, trial, environment.main_address, port), group)
        except RuntimeError:  # of the backend
            ended = []
            problems.append(
                f"rank {own.rank}: the `doctor` of another rank has not answered. Look for a process that has ended or"
                f" is stopped.{_load(own)}"
            )
        for rank, (text, output) in enumerate(ended):
            if not trial.kills:
                problems += [f"rank {rank}: {text}"] if text else []
            elif rank != last and f"the process of rank {last} is gone" not in output:
                problems.append(
                    f"rank {rank} has not noticed that rank {last} was killed: {text or 'it has trained on'}"
                )
        yield trial.name, trial.success, "\n".join(problems)


def _load(own: TrialRank) -> str:
    """Return a sentence if this node has more to do than its own trial, otherwise ""."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    found = f" Node {socket.gethostname()} is busy, with a load average of {load:.1f} on {cores} cores."
    return (
        f"{found} Repeat the self-test when the node is idle." if load > cores + own.world_size / own.num_nodes else ""
    )


def _run_process(own: TrialRank, trial: Trial, address: str, port: int) -> tuple[str, str]:
    """Run a trial in a child process; return its problem, or "", and its output."""
    values = {
        "RANK": own.rank, "WORLD_SIZE": own.world_size, "LOCAL_RANK": own.local_rank,
        "GROUP_RANK": own.rank * own.num_nodes // own.world_size, "MASTER_ADDR": address, "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIXES)}
    environ |= {name: str(value) for name, value in values.items()}
    program = f"from {__name__} import run_trial; run_trial()"
    command = [sys.executable, "-c", program, json.dumps(asdict(own)), trial.name]
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
    return f"{why}.{_load(own)} Its last lines:\n{lines}", said


def run_trial() -> None:
    """Run the trial of the command line, and print its problem."""
    own, name = sys.argv[1:]
    (trial,) = (one for one in _TRIALS if one.name == name)
    print(f"\n{_RESULT}{_train(TrialRank(**json.loads(own)), trial)}")
