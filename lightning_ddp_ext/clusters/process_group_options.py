"""Where Lightning's idea of a run meets ours of a network: one object that every strategy with a process group uses."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_ext._compat.lightning import in_interactive_session, repeats_the_command
from lightning_ddp_ext._validation import as_timeout, check_choice, check_integer, check_text
from lightning_ddp_ext.clusters.slurm import check_tasks, meeting_ports, step_name
from lightning_ddp_ext.distributed.backends import check_backend, check_mpirun
from lightning_ddp_ext.distributed.init_method import parse_init_method
from lightning_ddp_ext.distributed.interfaces import check_interface
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.errors import UnsupportedFeatureError


def in_sweep() -> bool:
    """Tell whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def check_sweep(strategy: DDPStrategy | FSDPStrategy) -> None:
    """Refuse a job of a sweep that would start its processes by repeating the command.

    Each of them would begin the whole sweep again, and go through it in step with the others on the process group of
    the first job, whatever number of processes, backend and network the next ones ask for.

    Args:
        strategy: A strategy whose Trainer is about to configure the launcher.

    Raises:
        UnsupportedFeatureError: If it is one.
    """
    environment = strategy.cluster_environment
    starts_processes = environment is not None and not environment.creates_processes_externally
    if starts_processes and strategy.num_processes > 1 and repeats_the_command(strategy) and in_sweep():
        raise UnsupportedFeatureError(
            f'`--multirun` with `devices={strategy.num_processes}` and `start_method="popen"`: every process that is'
            ' started would begin the whole sweep again. Use `start_method="spawn"`.'
        )


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_KINDS: dict[str, Any] = {
    "accelerator": Accelerator,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
    "ddp_comm_hook": Callable,
    "ddp_comm_wrapper": Callable,
    "parallel_devices": Sequence,
    "precision_plugin": Precision,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How the ranks of a strategy find each other.

    Attributes:
        backend: The backend; None for what suits the device.
        timeout: How long ranks wait for each other at the start, and the time limit of one collective.
        init_method: See `parse_init_method`.
        network_interface: See `init_process_group`.
    """

    backend: str | None = None
    timeout: timedelta = timedelta(minutes=30)
    init_method: str | None = None
    network_interface: str | None = None

    def check_arguments(self) -> None:
        """Refuse what cannot work on this host; for the constructor of a strategy.

        Raises:
            BackendError: If this torch has no such backend.
            NetworkInterfaceError: If this host has no such interface.
            TypeError: If an argument is of the wrong type.
            ValueError: If `init_method` has no known form, or `timeout` is out of range.
        """
        as_timeout("timeout", self.timeout)
        check_text("process_group_backend", self.backend)
        check_text("init_method", self.init_method)
        check_text("network_interface", self.network_interface)
        check_backend(self.backend)
        parse_init_method(self.init_method)
        check_interface(self.network_interface)

    def check_launch(self, strategy: DDPStrategy | FSDPStrategy) -> None:
        """Refuse what does not suit devices, hosts and launcher, when all are known and no process has been started.

        Args:
            strategy: A strategy whose Trainer is about to configure the launcher.

        Raises:
            BackendError: If the backend does not suit the devices, or `mpirun` started processes unnoticed.
            ClusterError: If the tasks of a SLURM job are not the processes of the run.
            NetworkInterfaceError: If the loopback interface was chosen for several hosts.
            UnsupportedFeatureError: If every process that is started would begin a sweep again.
        """
        environment = strategy.cluster_environment
        device_type = device_type_of(strategy)
        check_backend(self.backend, device_type)
        check_mpirun(environment is not None and environment.creates_processes_externally)
        check_tasks(
            environment,
            num_nodes=strategy.num_nodes,
            devices=strategy.num_processes,
            uses_gpus=device_type == "cuda",
        )
        check_interface(self.network_interface, strategy.num_nodes)
        check_sweep(strategy)

    def open(self, strategy: DDPStrategy | FSDPStrategy) -> None:
        """Make the process group, if there is none; rank 0 says what was chosen on each host.

        Args:
            strategy: A strategy that knows its ranks.

        Raises:
            NetworkInterfaceError: If a host lacks its interface, or hosts do not reach each other.
            RendezvousError: If ranks do not find each other.
        """
        environment = strategy.cluster_environment
        assert environment is not None  # the Trainer gives every strategy one
        main_port, *other_ports = meeting_ports(environment)
        network = init_process_group(
            backend=self.backend or dist.get_default_backend_for_device(strategy.root_device),
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            main_address=environment.main_address,
            main_port=main_port,
            other_ports=other_ports,
            run=step_name(os.environ) if other_ports else "",
            timeout=self.timeout,
            init_method=self.init_method,
            network_interface=self.network_interface,
            num_nodes=strategy.num_nodes,
            device_id=strategy.root_device,
        )
        if network is not None:
            rank_zero_info(f"{network}")


def device_type_of(strategy: DDPStrategy | FSDPStrategy) -> str:
    """Return the type of a strategy's devices, such as `"cuda"`.

    `root_device` raises an IndexError if a launcher has started more processes than there are devices; Lightning
    explains that when the run starts.

    Args:
        strategy: A strategy that its Trainer has given its devices.
    """
    assert strategy.parallel_devices is not None
    return strategy.parallel_devices[0].type


def check_start_method(start_method: object) -> None:
    """Refuse a way to start processes that there is not.

    Args:
        start_method: The argument of a strategy.

    Raises:
        ValueError: If it is none of those that Lightning has.
    """
    check_choice(
        "start_method", start_method, get_args(StartMethod), 'Use "popen" for processes that run the program again.'
    )


def choose_start_method(start_method: StartMethod | None) -> StartMethod:
    """Return how a strategy starts the other processes of its node.

    Args:
        start_method: The argument of the strategy; None for "fork" in an interactive session, and "popen" elsewhere.

    Raises:
        ValueError: If Lightning has no such start method, or it cannot work in an interactive session.
    """
    is_interactive = in_interactive_session()
    if start_method is None:
        return "fork" if is_interactive else "popen"
    check_start_method(start_method)
    if is_interactive and start_method != "fork":
        raise ValueError(
            '`start_method` must be "fork" in an interactive session (a notebook, `python -i`), whose code no new'
            f" interpreter can import, got {start_method!r}. Leave it out, or run the code as a script."
        )
    return start_method


def check_objects(*, parallel_devices: object = None, model_averaging_period: object = None, **objects: object) -> None:
    """Refuse what cannot be what Lightning's strategies take under these names; each of them is optional.

    Args:
        parallel_devices: Devices.
        model_averaging_period: A number of steps.
        objects: Instances of Lightning's classes, and functions.

    Raises:
        TypeError: If one is not of its class.
        ValueError: If the number is below 1.
    """
    for name, value in {"parallel_devices": parallel_devices, **objects}.items():
        kind = _KINDS[name]
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"`{name}` must be of {kind.__qualname__}, got {value!r}. Leave it out for the default.")
    if isinstance(parallel_devices, Sequence) and not all(isinstance(one, torch.device) for one in parallel_devices):
        raise TypeError(
            f"`parallel_devices` must hold instances of torch.device, got {parallel_devices!r}. Leave it out for the"
            " Trainer's `devices`."
        )
    if model_averaging_period is not None:
        check_integer("model_averaging_period", model_averaging_period, least=1, remedy="Use a number of steps.")
