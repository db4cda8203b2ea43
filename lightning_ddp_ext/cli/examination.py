"""Meeting the other ranks for `lightning-ddp-ext doctor`, as training would, and asking more questions on the way."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_ddp_ext.cli.diagnosis import ALL_REDUCE, BACKEND, INTERFACES, NETWORK, RENDEZVOUS, Diagnosis
from lightning_ddp_ext.errors import DDPExtError, NetworkInterfaceError
from lightning_ddp_ext.integration.clusters.slurm_cluster import meeting_ports
from lightning_ddp_ext.network.backends import check_backend
from lightning_ddp_ext.network.bandwidth import measure_all_reduce
from lightning_ddp_ext.network.init_method import address_text
from lightning_ddp_ext.network.interfaces import check_gloos_variable, check_interface
from lightning_ddp_ext.network.meeting import Meeting
from lightning_ddp_ext.network.process_group import init_process_group
from lightning_ddp_ext.network.reports import Problem, consult, report_here
from lightning_ddp_ext.network.slurm_ports import step_name
from lightning_ddp_ext.network.stores import OpenStore

_ALWAYS_THERE = "gloo"  # what to meet with where the chosen back-end or interface is missing


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """What the strategy is told about the network; see `Connection`.

    Attributes:
        backend: The back-end; None for what suits the devices.
        init_method: Another meeting place.
        network_interface: The interface.
        timeout: How long to wait for other ranks.
    """

    backend: str | None
    init_method: str | None
    network_interface: str | None
    timeout: timedelta


class _UnhealthyError(Exception):
    """A rank has found something wrong by itself: all ranks know, and none goes on."""


def examine(strategy: DDPStrategy | FSDPStrategy, settings: NetworkSettings, diagnosis: Diagnosis) -> None:
    """Meet the other ranks, compare hosts, make the process group and time it.

    Args:
        strategy: A strategy whose processes have been started.
        settings: The network.
        diagnosis: Filled with what is found.
    """
    environment = strategy.cluster_environment
    accelerator, device = strategy.accelerator, strategy.root_device
    assert environment is not None  # the Trainer gives every strategy both
    assert accelerator is not None
    strategy.set_world_ranks()
    backend = settings.backend or dist.get_default_backend_for_device(device)
    # The same order on every rank: MPI finds address and port by collective operations.
    rank, world_size = environment.global_rank(), environment.world_size()
    main_address, (main_port, *other_ports) = environment.main_address, meeting_ports(environment)
    diagnosis.rank, diagnosis.world_size, diagnosis.num_nodes = rank, world_size, strategy.num_nodes
    diagnosis.backend = backend
    diagnosis.meeting_place = settings.init_method or address_text(main_address, main_port)
    own = _find_problems(backend, device.type, settings.network_interface, strategy.num_nodes)
    diagnosis.add_problems(own)
    report = diagnosis.reports[rank] = report_here(own)

    def on_meeting(meeting: Meeting, opened: OpenStore) -> None:
        consultation = consult(meeting, opened, report)
        diagnosis.shared = True
        diagnosis.reports.update(consultation.reports)
        diagnosis.clocks.update(consultation.clocks)
        diagnosis.add_problems(consultation.problems)
        for said in consultation.reports.values():
            diagnosis.add_problems(said.problems)
        if not consultation.healthy:
            raise _UnhealthyError

    def connect_and_measure() -> None:
        accelerator.setup_device(device)
        diagnosis.network = init_process_group(
            backend=_ALWAYS_THERE if own else backend,
            rank=rank,
            world_size=world_size,
            main_address=main_address,
            main_port=main_port,
            other_ports=other_ports,
            run=step_name(os.environ) if other_ports else "",
            timeout=settings.timeout,
            init_method=settings.init_method,
            network_interface=None if own else settings.network_interface,
            num_nodes=strategy.num_nodes,
            device_id=device,
            on_meeting=on_meeting,
        )
        diagnosis.all_reduce = measure_all_reduce(device)

    _try(connect_and_measure, diagnosis)
    if dist.is_initialized():
        dist.destroy_process_group()


def _find_problems(backend: str, device_type: str, interface: str | None, num_nodes: int) -> list[Problem]:
    """Check what can be wrong on this host only, so that the others hear of it."""
    checks: list[tuple[str, Callable[[], None]]] = [
        (BACKEND, lambda: check_backend(backend, device_type)),
        (INTERFACES, lambda: check_interface(interface, num_nodes)),
        (INTERFACES, lambda: check_gloos_variable(backend, interface)),
    ]
    problems = []
    for name, check in checks:
        try:
            check()
        except DDPExtError as error:
            problems.append(Problem(name, str(error)))
    return problems


def _try(connect_and_measure: Callable[[], None], diagnosis: Diagnosis) -> None:
    try:
        connect_and_measure()
    except _UnhealthyError:
        if diagnosis.healthy:  # the problem is another rank's, and rank 0 says it
            diagnosis.add_problems([Problem(NETWORK, "another rank has found a problem.")])
    except NetworkInterfaceError as error:
        diagnosis.add_problems([Problem(NETWORK, f"{error}{_hint(diagnosis)}")])
    except DDPExtError as error:
        diagnosis.add_problems([Problem(RENDEZVOUS, str(error))])
    except RuntimeError as error:  # of the back-end
        diagnosis.shared = False  # ranks may have met different errors
        reason = str(error).partition("\n")[0]
        text = (
            f"the process group of `{diagnosis.backend}` failed on rank {diagnosis.rank}: {reason}."
            " Look for a rank that has ended, and for a firewall between the hosts."
        )
        diagnosis.add_problems([Problem(NETWORK if diagnosis.network is None else ALL_REDUCE, text)])


def _hint(diagnosis: Diagnosis) -> str:
    """Name the interface over which other hosts have reached rank 0, if it is the same on all."""
    names = {report.meeting_interface for _, report in diagnosis.hosts()[1:]}
    return f" Rank 0 was reached over `{names.pop()}`." if len(names) == 1 and None not in names else ""
