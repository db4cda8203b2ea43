"""Settings that strategies reject before any process starts, and nodes without a launcher."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ddp_ext import (
    BackendError,
    BalancedDataParallelStrategy,
    BalancedDDPStrategy,
    ClusterError,
    DDPCheckpointStrategy,
    DDPJoinStrategy,
    ManualEnvironment,
    NetworkInterfaceError,
)
from lightning_ddp_ext.distributed import backends
from lightning_ddp_ext.strategies.connected import ConnectedDDPStrategy


def trainer(strategy, **options):
    return Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, **options)


def test_the_trainer_refuses_what_does_not_suit_nodes_devices_and_launcher(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node1")
    with pytest.raises(NetworkInterfaceError, match="which other nodes cannot reach, and the run has 2 of them"):
        trainer(ConnectedDDPStrategy(network_interface="loopback"), num_nodes=2)
    monkeypatch.setitem(backends.BUILT, "nccl", lambda: True)
    with pytest.raises(BackendError, match="does not communicate for cpu devices"):
        trainer(ConnectedDDPStrategy(process_group_backend="nccl"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(BackendError, match="Install `mpi4py`"):
        trainer(ConnectedDDPStrategy(), plugins=[LightningEnvironment()])


# As in a shell of `salloc`.
ALLOCATION = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "node1",
}  # fmt: skip
OURS = {
    "balanced_dp": BalancedDataParallelStrategy, "balanced_ddp": BalancedDDPStrategy, "ddp": ConnectedDDPStrategy,
    "ddp_join": DDPJoinStrategy, "ddp_checkpoint": DDPCheckpointStrategy,
}  # fmt: skip
FABRIC = ["balanced_ddp", "ddp_join", "ddp_checkpoint"]


@pytest.mark.parametrize("name", OURS)
def test_a_shell_of_salloc_is_refused_instead_of_a_missing_variable(monkeypatch, name):
    for variable, value in ALLOCATION.items():
        monkeypatch.setenv(variable, value)
    makers = [lambda: Trainer(strategy=OURS[name](), accelerator="cpu", devices=1, logger=False)]
    makers += [lambda: Fabric(strategy=name, accelerator="cpu", devices=1)] * (name in FABRIC)
    for make in makers:
        with pytest.raises(ClusterError, match="`SLURM_PROCID` is not set"):
            make()
        monkeypatch.setenv("SLURM_PROCID", "0")  # as in a batch script, which is one process
        for variable in ("SLURM_NODEID", "SLURM_LOCALID"):
            monkeypatch.setenv(variable, "0")
        make()
        monkeypatch.delenv("SLURM_PROCID")


@pytest.mark.parametrize("name", [name for name in OURS if name != "balanced_dp"])
def test_several_nodes_without_an_address_are_refused_before_the_wait(monkeypatch, name):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    makers = [lambda **options: trainer(OURS[name](**options), num_nodes=2)]
    if name in FABRIC:
        kind = type(Fabric(strategy=name, accelerator="cpu", devices=2).strategy)
        makers.append(lambda **options: Fabric(strategy=kind(**options), accelerator="cpu", devices=2, num_nodes=2))
    for make in makers:
        with pytest.raises(ClusterError, match="`num_nodes=2`, but neither a launcher nor a plugin gives the rank"):
            make()
        make(init_method="tcp://node1:29500")
        with monkeypatch.context() as given:
            given.setenv("MASTER_ADDR", "node1")
            make()


def test_a_backend_has_to_suit_any_kind_of_device(monkeypatch):
    monkeypatch.setitem(backends.BUILT, "nccl", lambda: True)
    strategy = ConnectedDDPStrategy(process_group_backend="nccl")
    strategy.cluster_environment = LightningEnvironment()
    strategy.parallel_devices = [torch.device("cuda", 0)]
    strategy._connection.check_launch(strategy)
    strategy.parallel_devices = [torch.device("xpu", 0)]
    with pytest.raises(BackendError, match="does not communicate for xpu devices"):
        strategy._connection.check_launch(strategy)


def test_a_manual_cluster_gives_lightning_the_rank_of_a_node():
    environment = ManualEnvironment(num_nodes=3, node_rank=2, main_address="node1", main_port=29501)
    strategy = trainer(ConnectedDDPStrategy(), plugins=[environment], num_nodes=3).strategy
    assert strategy.cluster_environment is environment
    assert (environment.main_address, environment.main_port, environment.node_rank()) == ("node1", 29501, 2)
    strategy.set_world_ranks()
    assert (strategy.global_rank, strategy.world_size) == (4, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 0}, "`num_nodes` must be at least 1, got 0"),
        ({"node_rank": 2}, "`node_rank` must be at most 1, got 2"),
        ({"main_address": ""}, "`main_address` must be the name or address of a host, got ''"),
        ({"main_port": 0}, "`main_port` must be at least 1, got 0"),
        ({"main_address": "a..b"}, "`main_address` must be the name or address"),
    ],
)
def test_a_manual_cluster_refuses_numbers_out_of_range_and_a_trainer_with_others(arguments, message):
    with pytest.raises(ValueError, match=message):
        ManualEnvironment(**{"num_nodes": 2, "node_rank": 0, "main_address": "node1", **arguments})
    environment = ManualEnvironment(num_nodes=2, node_rank=0, main_address="node1")
    with pytest.raises(ClusterError, match="`num_nodes=1` of the Trainer differs from `num_nodes=2` of the cluster"):
        environment.validate_settings(num_devices=1, num_nodes=1)
