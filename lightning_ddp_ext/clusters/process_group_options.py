"""Process-group arguments of the strategies: how they are checked, and how they open the process group."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from lightning_ddp_ext._compat.lightning import start_method_of
from lightning_ddp_ext._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    FabricDDPStrategy,
    FSDPStrategy,
    Precision,
)
from lightning_ddp_ext._output import rank_zero_info
from lightning_ddp_ext._validation import as_timeout, check_choice, check_integer, check_text
from lightning_ddp_ext.clusters.environments import check_has_rank, check_tasks, rendezvous_port
from lightning_ddp_ext.clusters.launchers import check_mpirun, in_sweep
from lightning_ddp_ext.distributed.backends import DEFAULT_TIMEOUT, check_backend, reserve_descriptors
from lightning_ddp_ext.distributed.network import ChosenNetwork, check_interface
from lightning_ddp_ext.distributed.process_group import init_process_group
from lightning_ddp_ext.distributed.rendezvous import RendezvousProgress
from lightning_ddp_ext.distributed.stores import parse_init_method
from lightning_ddp_ext.errors import UnsupportedFeatureError

ProcessStrategy = DDPStrategy | FSDPStrategy | FabricDDPStrategy  # one process per device
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
    """How the ranks of a strategy find each other; None for the backend of the devices, endpoint of the cluster."""

    backend: str | None = None
    timeout: timedelta = DEFAULT_TIMEOUT
    init_method: str | None = None
    network_interface: str | None = None

    def check_arguments(self) -> None:
        """Reject arguments that cannot work on this node; for the constructor of a strategy."""
        check_text("process_group_backend", self.backend)
        check_text("init_method", self.init_method)
        check_text("network_interface", self.network_interface)
        check_backend(self.backend)
        parse_init_method(self.init_method)
        check_interface(self.network_interface)

    def check_launch(self, strategy: ProcessStrategy) -> None:
        """Reject arguments that do not suit devices, nodes and launcher, which the Trainer has just configured."""
        environment = strategy.cluster_environment
        check_backend(self.backend, device_type_of(strategy))
        check_mpirun(environment is not None and environment.creates_processes_externally)
        endpoint = parse_init_method(self.init_method)
        nodes, devices = strategy.num_nodes, strategy.num_processes
        check_tasks(environment, num_nodes=nodes, devices=devices, has_address=endpoint is not None)
        check_interface(self.network_interface, nodes)
        if environment is None or environment.creates_processes_externally:
            return
        _check_sweep(strategy)
        if nodes == 1:  # before this process starts the others, which would report that they have lost it
            serves = endpoint is None or endpoint.path is None
            reserve_descriptors(0, devices, getattr(strategy, "channels", 1) * (1 + serves))

    def open(self, strategy: ProcessStrategy, progress: RendezvousProgress | None = None) -> ChosenNetwork | None:
        """Create the process group of a strategy that knows its ranks; rank 0 logs the interface of each node."""
        environment = strategy.cluster_environment
        assert environment is not None  # the Trainer gives every strategy one
        network = init_process_group(
            backend=self.backend or dist.get_default_backend_for_device(strategy.root_device),
            rank=environment.global_rank(),
            world_size=environment.world_size(),
            # The same order on every rank: MPI finds address and port by collective operations.
            main_address=environment.main_address,
            main_port=rendezvous_port(environment),
            timeout=self.timeout,
            init_method=self.init_method,
            network_interface=self.network_interface,
            num_nodes=strategy.num_nodes,
            channels=getattr(strategy, "channels", 1),
            # A group that is bound to a device refuses tensors of another one.
            device_id=strategy.root_device if getattr(strategy, "move_to_device", True) else None,
            progress=progress,
        )
        if network is not None:
            rank_zero_info(f"{network}")
        return network


class ConnectedMixin:
    """Mixin before a strategy of Lightning, for the Trainer or Fabric: its ranks find each other by a `Connection`."""

    cluster_environment: ClusterEnvironment | None

    def __init__(
        self,
        *args: Any,
        process_group_backend: str | None = None,
        timeout: timedelta | float | None = DEFAULT_TIMEOUT,
        init_method: str | None = None,
        network_interface: str | None = None,
        **options: Any,
    ) -> None:
        if "start_method" in options:  # FSDP has no such option
            options["start_method"] = choose_start_method(options["start_method"])
        self._connection = Connection(
            backend=process_group_backend,
            timeout=DEFAULT_TIMEOUT if timeout is None else as_timeout("timeout", timeout),
            init_method=init_method,
            network_interface=network_interface,
        )
        self._connection.check_arguments()
        options |= {"process_group_backend": process_group_backend, "timeout": self._connection.timeout}
        super().__init__(*args, **options)

    @property
    def node_rank(self) -> int:
        """The number of this node."""
        check_has_rank(self.cluster_environment)
        return super().node_rank  # type: ignore[no-any-return, misc]

    def _configure_launcher(self) -> None:
        self._connection.check_launch(self)  # type: ignore[arg-type]
        super()._configure_launcher()  # type: ignore[misc]


def device_type_of(strategy: ProcessStrategy) -> str:
    """Return the type of a strategy's devices, such as `"cpu"`."""
    # `root_device` raises an IndexError if a launcher has started more processes than there are devices.
    assert strategy.parallel_devices is not None
    return strategy.parallel_devices[0].type


def _check_sweep(strategy: ProcessStrategy) -> None:
    """Reject a job of a sweep that would start its processes by repeating the command, and with it the whole sweep."""
    if strategy.num_processes > 1 and start_method_of(strategy) == "popen" and in_sweep():
        raise UnsupportedFeatureError(
            f'`--multirun` with `devices={strategy.num_processes}` and `start_method="popen"`: every process that is'
            ' started would begin the whole sweep again. Use `start_method="spawn"`.'
        )


def choose_start_method(start_method: StartMethod | None) -> StartMethod:
    """Return a checked start method; for None, "fork" in an interactive session, and "popen" elsewhere."""
    is_interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # as the Trainer, which accepts only fork there
    if start_method is None:
        return "fork" if is_interactive else "popen"
    remedy = 'Use "popen" for processes that run the program again.'
    check_choice("start_method", start_method, get_args(StartMethod), remedy)
    if is_interactive and start_method != "fork":
        raise ValueError(
            '`start_method` must be "fork" in an interactive session (a notebook, `python -i`), whose code no new'
            f" interpreter can import, got {start_method!r}. Leave it out, or run the code as a script."
        )
    return start_method


def check_objects(*, parallel_devices: object = None, model_averaging_period: object = None, **objects: object) -> None:
    """Raise a TypeError if an argument that is passed on to Lightning's strategy is not of the class of its name."""
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
