"""Settings that strategies reject before any process starts, and nodes without a launcher."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_ddp_ext import BackendError, ClusterError, ManualEnvironment, NetworkInterfaceError
from lightning_ddp_ext.distributed import backends
from lightning_ddp_ext.strategies.base import ConnectedDDPStrategy


def trainer(strategy, **options):
    return Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, **options)


def test_the_trainer_refuses_what_does_not_suit_nodes_devices_and_launcher(monkeypatch):
    with pytest.raises(NetworkInterfaceError, match="which other nodes cannot reach, and the run has 2 of them"):
        trainer(ConnectedDDPStrategy(network_interface="loopback"), num_nodes=2)
    monkeypatch.setitem(backends.BUILT, "nccl", lambda: True)
    with pytest.raises(BackendError, match="does not communicate for cpu devices"):
        trainer(ConnectedDDPStrategy(process_group_backend="nccl"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(BackendError, match="Install `mpi4py`"):
        trainer(ConnectedDDPStrategy(), plugins=[LightningEnvironment()])


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
