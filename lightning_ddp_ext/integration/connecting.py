"""Where Lightning's idea of a run meets ours of a network: one object that every strategy with a process group uses."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_ext.arguments import as_timeout, check_choice, check_text
from lightning_ddp_ext.network.backends import check_backend, check_mpirun
from lightning_ddp_ext.network.init_method import parse_init_method
from lightning_ddp_ext.network.interfaces import check_interface
from lightning_ddp_ext.network.process_group import init_process_group

_START_METHODS = ("popen", "spawn", "fork", "forkserver")


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """How the ranks of a strategy find each other.

    Attributes:
        backend: The back-end; None for what suits the device.
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
            BackendError: If this torch has no such back-end.
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
            BackendError: If the back-end does not suit the devices, or `mpirun` started processes unnoticed.
            NetworkInterfaceError: If the loopback interface was chosen for several hosts.
        """
        environment = strategy.cluster_environment
        check_backend(self.backend, strategy.root_device.type)
        check_mpirun(environment is not None and environment.creates_processes_externally)
        check_interface(self.network_interface, strategy.num_nodes)

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
        network = init_process_group(
            backend=self.backend or dist.get_default_backend_for_device(strategy.root_device),
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            main_address=environment.main_address,
            main_port=environment.main_port,
            timeout=self.timeout,
            init_method=self.init_method,
            network_interface=self.network_interface,
            num_nodes=strategy.num_nodes,
            device_id=strategy.root_device,
        )
        if network is not None:
            rank_zero_info(f"{network}")


def check_start_method(start_method: object) -> None:
    """Refuse a way to start processes that there is not.

    Args:
        start_method: The argument of a strategy.

    Raises:
        ValueError: If it is none of those that Lightning has.
    """
    check_choice("start_method", start_method, _START_METHODS, 'Use "popen" for processes that run the program again.')
