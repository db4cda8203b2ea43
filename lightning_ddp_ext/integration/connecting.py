"""Where Lightning's idea of a run meets ours of a network: one object that every strategy with a process group uses."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_ext.integration.slurm_cluster import check_tasks, meeting_ports
from lightning_ddp_ext.integration.sweeping import check_sweep
from lightning_ddp_ext.network.backends import check_backend, check_mpirun
from lightning_ddp_ext.network.init_method import parse_init_method
from lightning_ddp_ext.network.interfaces import check_interface
from lightning_ddp_ext.network.process_group import init_process_group
from lightning_ddp_ext.network.slurm_ports import step_name


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
            ValueError: If `init_method` has no known form.
        """
        check_backend(self.backend)
        parse_init_method(self.init_method)
        check_interface(self.network_interface)

    def check_launch(self, strategy: DDPStrategy | FSDPStrategy) -> None:
        """Refuse what does not suit devices, hosts and launcher, when all are known and no process has been started.

        Args:
            strategy: A strategy whose Trainer is about to configure the launcher.

        Raises:
            BackendError: If the back-end does not suit the devices, or `mpirun` started processes unnoticed.
            ClusterError: If the tasks of a SLURM job are not the processes of the run.
            NetworkInterfaceError: If the loopback interface was chosen for several hosts.
            UnsupportedFeatureError: If every process that is started would begin a sweep again.
        """
        environment = strategy.cluster_environment
        check_backend(self.backend, strategy.root_device.type)
        check_mpirun(environment is not None and environment.creates_processes_externally)
        check_tasks(
            environment,
            num_nodes=strategy.num_nodes,
            devices=strategy.num_processes,
            uses_gpus=strategy.root_device.type == "cuda",
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
