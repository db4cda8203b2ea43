"""Every packaged configuration composes and can be instantiated; foreign applications can use the strategy groups."""

import dataclasses
import inspect
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from omegaconf import OmegaConf

import lightning_ddp_ext
from lightning_ddp_ext import (
    BalancedDataParallelStrategy,
    CheckedSLURMEnvironment,
    DDPCheckpointStrategy,
    DDPJoinStrategy,
    ExplicitDDPStrategy,
    ManualEnvironment,
    config,
)
from lightning_ddp_ext.clusters.process_group_options import Connection
from lightning_ddp_ext.demo.byte_text import count_tokens
from lightning_ddp_ext.distributed.init_method import RendezvousEndpoint, parse_init_method

CONF = Path(lightning_ddp_ext.__file__).parent / "conf"
ROOT_CONF = Path(__file__).parent.parent / "conf"


@pytest.fixture
def composed():
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        yield lambda *overrides: compose("train", overrides=list(overrides))


@pytest.mark.parametrize(
    ("override", "place"),
    [
        ('process_group.init_method="tcp://[fd00::1]:29500"', RendezvousEndpoint("fd00::1", 29500)),
        ("process_group.init_method=tcp://node1:29500", RendezvousEndpoint("node1", 29500)),
        ("process_group.init_method=file:///shared/7.0.0", RendezvousEndpoint(path=Path("/shared/7.0.0"))),
    ],
)
def test_the_meeting_places_of_the_documentation_can_be_typed(composed, override, place):
    chosen = composed("strategy=ddp", "process_group=gloo", override)
    assert parse_init_method(chosen.strategy.init_method) == place


def test_an_address_of_ipv6_can_be_typed(composed):
    by_hand = composed("cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=1", "cluster.main_address=fd00::1")
    assert by_hand.cluster.main_address == "fd00::1"


def options(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_the_groups_are_these():
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert groups == [
        "callbacks", "cluster", "data", "experiment", "logger", "model", "network", "process_group", "strategy",
        "trainer",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("group", "option"),
    [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))],
)
def test_every_option_composes(composed, group, option):
    assert composed(f"{group}={option}") is not None


@pytest.mark.parametrize("option", options("strategy"))
def test_every_strategy_is_built(composed, option):
    strategy = instantiate(composed(f"strategy={option}").strategy)
    expected = {
        "balanced_dp": BalancedDataParallelStrategy,
        "ddp": DDPStrategy,
        "ddp_checkpoint": DDPCheckpointStrategy,
        "ddp_join": DDPJoinStrategy,
        "fsdp": FSDPStrategy,
        "single": str,
    }
    assert isinstance(strategy, expected[option])


@pytest.mark.parametrize("option", ["ddp", "ddp_checkpoint", "ddp_join", "fsdp"])
def test_process_group_and_network_reach_the_strategy(composed, option):
    node = composed(
        f"strategy={option}", "process_group=gloo", "process_group.timeout_seconds=7",
        "process_group.init_method=tcp://node1:29501", "network=loopback",
    )  # fmt: skip
    connection = instantiate(node.strategy)._connection
    assert connection == Connection(
        backend="gloo",
        timeout=timedelta(seconds=7),
        init_method="tcp://node1:29501",
        network_interface="loopback",
    )


@pytest.mark.parametrize("option", ["ddp_checkpoint", "ddp_join"])
@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ((), timedelta(minutes=1)),
        (("process_group=gloo", "process_group.stall_timeout_seconds=7"), timedelta(seconds=7)),
        (("process_group=gloo", "process_group.stall_timeout_seconds=null"), None),
        (("strategy.stall_timeout=null",), None),
    ],
)
def test_the_stall_limit_reaches_the_strategy(composed, option, given, limit):
    assert instantiate(composed(f"strategy={option}", *given).strategy)._watch.limit == limit


def test_uneven_inputs_reach_the_strategy(composed):
    assert instantiate(composed("strategy=ddp_join").strategy).uneven_inputs == "join"
    assert instantiate(composed("strategy=ddp_join", "strategy.uneven_inputs=stop").strategy).uneven_inputs == "stop"


def test_the_stream_experiment_counts_tokens(composed):
    strategy = instantiate(composed("strategy=ddp_join", "experiment=stdlib_stream").strategy)
    assert strategy.weight_by is count_tokens


def test_a_slurm_job_is_built_from_its_variables(composed, monkeypatch):
    job = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    node = composed("cluster=slurm", "cluster.requeue_signal=SIGUSR2")
    assert node.trainer.num_nodes == node.cluster.num_nodes == 2
    environment = instantiate(node.cluster)
    assert isinstance(environment, CheckedSLURMEnvironment)
    assert (environment.world_size(), environment.global_rank()) == (2, 1)
    assert environment.auto_requeue
    assert environment.requeue_signal == signal.SIGUSR2


def run_folder(*overrides):
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        return compose("train", overrides=list(overrides), return_hydra_config=True).hydra.run.dir


def test_the_folder_of_a_slurm_job_is_that_of_its_tasks_and_of_its_restarts(monkeypatch):
    job = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_STEP_ID": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    of_job = run_folder("cluster=slurm")
    assert of_job == "runs/slurm/8/2"
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_folder("cluster=slurm") == of_job
    assert run_folder("cluster=slurm", "hydra.run.dir=mine") == "mine"
    assert not run_folder().startswith("runs/slurm")


def test_a_foreign_application_gets_the_folder_too(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    (tmp_path / "app.yaml").write_text(FOREIGN.replace("  - strategy", "  - cluster: slurm\n  - strategy"))
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        node = compose("app", return_hydra_config=True)
    assert node.hydra.run.dir == "runs/slurm/8/0"
    assert node.cluster.num_nodes == 1


def test_a_manual_cluster_is_built(composed):
    node = composed("cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=1", "cluster.main_address=node1")
    environment = instantiate(node.cluster)
    assert isinstance(environment, ManualEnvironment)
    assert (environment.main_address, environment.main_port, environment.node_rank()) == ("node1", 29500, 1)
    assert node.trainer.num_nodes == 2


@pytest.mark.parametrize(
    ("model", "data"),
    [("digits_cnn", "digits"), ("byte_transformer", "stdlib_text"), ("byte_transformer", "stdlib_stream")],
)
def test_models_and_data_are_built(composed, model, data):
    node = composed(f"model={model}", f"data={data}")
    assert isinstance(instantiate(node.model), LightningModule)
    assert isinstance(instantiate(node.data), LightningDataModule)


OF_EXPLICIT_DDP = {
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "ddp_comm_state",
    "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "unknown",
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "target", "given_elsewhere"),
    [
        (
            config.BalancedDataParallelConfig,
            BalancedDataParallelStrategy,
            {"accelerator", "parallel_devices", "checkpoint_io", "precision_plugin"},
        ),
        (config.DDPCheckpointConfig, DDPCheckpointStrategy, OF_EXPLICIT_DDP),
        (config.ExplicitDDPConfig, ExplicitDDPStrategy, OF_EXPLICIT_DDP),
        (config.TrainerConfig, Trainer, {"strategy", "logger", "callbacks"}),
    ],
)
def test_schemas_have_every_argument_of_what_they_describe(schema, target, given_elsewhere):
    fields = {field.name for field in dataclasses.fields(schema)} - {"_target_"}
    parameters = set(inspect.signature(target.__init__).parameters) - {"self"}
    assert fields == parameters - given_elsewhere


def test_the_schema_of_ddp_join_has_the_arguments_of_its_base_and_its_own():
    base, own = (
        {field.name for field in dataclasses.fields(schema)}
        for schema in (config.ExplicitDDPConfig, config.DDPJoinConfig)
    )
    assert own - base == set(inspect.signature(DDPJoinStrategy).parameters) - {"args", "options"}


def test_the_checkouts_own_configuration_is_disjoint_and_composes():
    own = {path.relative_to(ROOT_CONF) for path in ROOT_CONF.rglob("*.yaml")}
    packaged = {path.relative_to(CONF) for path in CONF.rglob("*.yaml")}
    assert own
    assert not own & packaged
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        for path in own:
            overrides = [
                f"hydra.searchpath=[file://{ROOT_CONF}]",
                f"+{path.parent}={path.stem}".replace("+experiment", "experiment"),
            ]
            assert compose("train", overrides=overrides)


FOREIGN = """
defaults:
  - strategy: balanced_dp
  - optional process_group: null
  - optional network: null
  - _self_
hydra:
  searchpath: [pkg://lightning_ddp_ext.conf]
lr: 0.1
"""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "BalancedDataParallelStrategy"),
        (("strategy.split=[1,2]",), "BalancedDataParallelStrategy"),
        (("strategy=ddp",), "ConnectedDDPStrategy"),
        (("strategy=ddp_checkpoint", "process_group=gloo", "network=auto"), "DDPCheckpointStrategy"),
        (("strategy=ddp_join", "strategy.uneven_inputs=error", "process_group=gloo"), "DDPJoinStrategy"),
        (("strategy=ddp", "process_group=gloo", "network=auto"), "ConnectedDDPStrategy"),
    ],
)
def test_a_foreign_application_uses_the_strategy_groups(tmp_path, overrides, expected):
    (tmp_path / "app.yaml").write_text(FOREIGN)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        node = compose("app", overrides=list(overrides))
        assert {"strategy", "lr"} <= set(node) <= {"strategy", "process_group", "network", "lr"}
        assert type(instantiate(node.strategy)).__name__ == expected


@pytest.mark.slow
def test_a_foreign_application_that_has_nothing_else_composes_before_the_package_is_imported(tmp_path):
    (tmp_path / "app.yaml").write_text(
        "defaults: [{strategy: ddp}, _self_]\nhydra: {searchpath: ['pkg://lightning_ddp_ext.conf']}\n"
    )
    program = (
        "from hydra import compose, initialize_config_dir\n"
        f"with initialize_config_dir({str(tmp_path)!r}, version_base='1.3'):\n"
        "    node = compose('app')\n"
        "print(sorted(node), node.strategy.process_group_backend, node.strategy.timeout)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "['strategy'] None 1800"


def test_the_resolved_default_has_no_missing_value(composed):
    node = composed()
    del node.callbacks
    del node.logger  # both refer to the folder of a run
    assert not OmegaConf.missing_keys(node)
    OmegaConf.resolve(node)
