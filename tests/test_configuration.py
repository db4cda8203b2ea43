"""Packaged configurations compose and can be instantiated; other applications and LightningCLI take the strategies."""

import dataclasses
import inspect
import re
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module, utils
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ddp_ext import (
    BalancedDataParallelStrategy,
    BalancedDDPStrategy,
    CheckedSLURMEnvironment,
    DDPJoinStrategy,
    ExplicitDDPStrategy,
    ManualEnvironment,
    TokenCount,
)
from lightning_ddp_ext._import_names import find_lightning
from lightning_ddp_ext.callbacks import ReplicaConsistency
from lightning_ddp_ext.cli import settings
from lightning_ddp_ext.clusters.process_group_options import Connection
from lightning_ddp_ext.conf import schemas
from lightning_ddp_ext.demo.digits import DigitsCNN, DigitsData
from lightning_ddp_ext.distributed.stores import RendezvousEndpoint, parse_init_method
from tests.support.programs import run_python
from tests.support.sources import PACKAGE, sources

CONF = PACKAGE / "conf"
ROOT_CONF = Path(__file__).parent.parent / "conf"


@pytest.fixture
def composed():
    def compose_as_the_command(*overrides):
        node = compose("train", overrides=list(overrides))
        schemas.use_lightning(find_lightning(), node)
        return node

    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        yield compose_as_the_command


def test_addresses_of_the_documentation_can_be_typed(composed):
    for override, endpoint in (
        ('process_group.init_method="tcp://[fd00::1]:29500"', RendezvousEndpoint("fd00::1", 29500)),
        ("process_group.init_method=tcp://node1:29500", RendezvousEndpoint("node1", 29500)),
        ("process_group.init_method=file:///shared/7.0.0", RendezvousEndpoint(path=Path("/shared/7.0.0"))),
    ):
        chosen = composed("strategy=ddp", "process_group=gloo", override)
        assert parse_init_method(chosen.strategy.init_method) == endpoint
    by_hand = composed("cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=1", "cluster.main_address=fd00::1")
    assert by_hand.cluster.main_address == "fd00::1"


def test_every_option_of_every_group_composes(composed):
    node, found = composed(), {}
    del node.callbacks
    del node.logger  # both refer to the folder of a run
    assert not OmegaConf.missing_keys(node)
    OmegaConf.resolve(node)
    for path in sorted(CONF.glob("*/*.yaml")):
        assert composed(f"{path.parent.name}={path.stem}")
        found.setdefault(path.parent.name, []).append(path.stem)
    assert sorted(found) == [
        "callbacks", "cluster", "data", "debug", "experiment", "logger", "model", "network", "process_group",
        "strategy", "trainer",
    ]  # fmt: skip
    template = OmegaConf.load(CONF / "train.yaml").hydra.help.template
    shown = dict(
        line.split(maxsplit=1) for line in template.partition("group=option:")[2].split("\n\n")[1].splitlines()
    )
    assert {group: sorted(options.split(", ")) for group, options in shown.items()} == found
    assert found["strategy"] == ["balanced_ddp", "balanced_dp", "ddp", "ddp_checkpoint", "ddp_join", "fsdp", "single"]
    for model, data in (
        ("digits_cnn", "digits"), ("byte_transformer", "stdlib_text"), ("byte_transformer", "stdlib_stream"),
    ):  # fmt: skip
        node = composed(f"model={model}", f"data={data}")
        assert isinstance(instantiate(node.model), LightningModule)
        assert isinstance(instantiate(node.data), LightningDataModule)


def test_one_function_instantiates_and_trusts_the_targets_of_a_configuration(composed, monkeypatch):
    node = composed("model=digits_cnn").model
    assert isinstance(settings.instantiate(node), DigitsCNN)
    trusted, seen = object(), []
    monkeypatch.setattr(utils, "UNSAFE_DISABLE_EXECUTION_CHECKS", trusted, raising=False)  # as Hydra 1.4 has it
    monkeypatch.setattr(utils, "instantiate", lambda *args, **options: seen.append((args, options)))
    settings.instantiate(node, width=3)
    assert seen == [((node,), {"width": 3, "_execution_whitelist_": trusted})]
    users = [
        path.name for path, text in sources().items() if re.search(r"(utils|hydra.*import.*) ?\.?instantiate", text)
    ]
    assert users == ["settings.py"]


def test_settings_reach_the_strategies(composed):
    def build(option, *overrides):
        return instantiate(composed(f"strategy={option}", *overrides).strategy)

    expected = Connection(
        backend="gloo", timeout=timedelta(seconds=7), init_method="tcp://node1:29501", network_interface="loopback"
    )
    for option in ("ddp", "ddp_checkpoint", "ddp_join", "fsdp"):
        strategy = build(
            option, "process_group=gloo", "process_group.timeout_seconds=7",
            "process_group.init_method=tcp://node1:29501", "network=loopback",
        )  # fmt: skip
        assert strategy._connection == expected, option
    for option in ("ddp_checkpoint", "ddp_join"):
        for given, limit in (
            ((), timedelta(minutes=1)),
            (("process_group=gloo", "process_group.stall_timeout_seconds=7"), timedelta(seconds=7)),
            (("process_group=gloo", "process_group.stall_timeout_seconds=null"), None),
            (("strategy.stall_timeout=null",), None),
        ):
            assert build(option, *given)._watch.limit == limit, (option, given)
    assert [build("balanced_ddp", *given).cost for given in ((), ("strategy.cost=length",))] == [None, "length"]
    assert build("ddp_join").uneven_inputs == "join"
    assert build("ddp_join", "strategy.uneven_inputs=stop").uneven_inputs == "stop"
    assert build("ddp_join", "experiment=stdlib_stream").weight_by == TokenCount(labels="targets")


def test_a_manual_cluster_and_a_slurm_job_are_built(composed, monkeypatch):
    node = composed("cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=1", "cluster.main_address=node1")
    environment = instantiate(node.cluster)
    assert isinstance(environment, ManualEnvironment)
    assert (environment.main_address, environment.main_port, environment.node_rank()) == ("node1", 29500, 1)
    assert node.trainer.num_nodes == 2
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


def test_all_tasks_and_restarts_of_a_slurm_job_have_one_folder(monkeypatch):
    job = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_STEP_ID": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    folder = run_folder("cluster=slurm")
    assert folder == "runs/slurm/8/2"
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert run_folder("cluster=slurm") == folder
    assert run_folder("cluster=slurm", "hydra.run.dir=mine") == "mine"
    assert not run_folder().startswith("runs/slurm")


def test_schemas_follow_the_signatures_of_constructors():
    made = schemas.make_schemas()
    checked = {
        "strategy/balanced_dp": (BalancedDataParallelStrategy,),
        "strategy/ddp_checkpoint": (ExplicitDDPStrategy,),
        "strategy/ddp_join": (ExplicitDDPStrategy, DDPJoinStrategy),
        "strategy/balanced_ddp": (ExplicitDDPStrategy, BalancedDDPStrategy),
        "trainer/trainer": (Trainer,),
        "callbacks/replica_consistency": (ReplicaConsistency,),
        "data/digits": (DigitsData,),
    }
    for name, targets in checked.items():
        parameters = {key: one for target in targets for key, one in inspect.signature(target).parameters.items()}
        plain = {key for key, one in parameters.items() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
        fields = {field.name for field in dataclasses.fields(made[name])} - {"_target_"}
        assert len(fields) > 2, name
        assert fields <= plain, name
        refused = {"prefetch"} if name == "strategy/balanced_ddp" else set()
        assert plain - fields <= {*schemas.OBJECTS, *schemas.GROUPS} | refused, name
        assert not fields & refused, name


def test_schemas_are_those_of_the_imported_constructors(monkeypatch):
    def make_fields():
        made = {name: OmegaConf.structured(schema) for name, schema in schemas.make_schemas().items()}
        fields = {name: [(one.name, one.type, one.metadata) for one in dataclasses.fields(OmegaConf.get_type(node))]
                  for name, node in made.items()}  # fmt: skip
        return made, fields

    def imported(path):
        parameters = inspect.signature(get_object(path), eval_str=True).parameters.values()
        return [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]

    read, fields = make_fields()
    assert sum(map(len, fields.values())) > 150
    choices = {name: dict(metadata) for name, _, metadata in fields["strategy/ddp_join"]}
    assert choices["uneven_inputs"] == {"choices": ("join", "stop", "error")}
    monkeypatch.setattr(schemas, "read_parameters", imported)
    assert (read, fields) == make_fields()


class Constructed:
    def __init__(
        self,
        needed: int,
        share: float | None,
        kind: Literal["a", "b"] = "a",
        names: Sequence[str] = ("x",),
        path: str | Path | None = None,
        limit: timedelta | float = timedelta(minutes=1),
        **options: object,
    ) -> None:
        """Take one argument of every sort."""


def test_a_schema_has_types_and_defaults_of_the_arguments():
    schema = schemas.make_schema(f"{__name__}.Constructed", without=["kind"], extra=False)
    fields = {field.name: field.type for field in dataclasses.fields(schema)}
    assert fields == {
        "_target_": str, "needed": int, "share": float | None, "names": list[str], "path": str | None,
        "limit": Any, "extra": bool,
    }  # fmt: skip
    assert OmegaConf.structured(schema(needed=1, share=None)) == {
        "_target_": f"{__name__}.Constructed", "needed": 1, "share": None, "names": ["x"], "path": None, "limit": 60.0,
        "extra": False,
    }  # fmt: skip
    assert OmegaConf.missing_keys(OmegaConf.structured(schema)) == {"needed", "share"}
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(OmegaConf.structured(schema), {"needed": "abc"})


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


def test_a_foreign_application_uses_the_strategy_groups(tmp_path, monkeypatch):
    (tmp_path / "app.yaml").write_text(FOREIGN)
    groups = FOREIGN.replace("ddp_ext.conf", "ddp_ext.conf.groups")
    (tmp_path / "slurm.yaml").write_text(groups.replace("  - strategy", "  - cluster: slurm\n  - strategy"))
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        for overrides, expected in (
            ((), "BalancedDataParallelStrategy"),
            (("strategy.split=[1,2]",), "BalancedDataParallelStrategy"),
            (("strategy=ddp", "process_group=gloo", "network=auto"), "ConnectedDDPStrategy"),
            (("strategy=fsdp",), "ConnectedFSDPStrategy"),
            (("strategy=ddp_checkpoint", "process_group=gloo", "network=auto"), "DDPCheckpointStrategy"),
            (("strategy=ddp_join", "strategy.uneven_inputs=error", "process_group=gloo"), "DDPJoinStrategy"),
        ):
            node = compose("app", overrides=list(overrides))
            assert {"strategy", "lr"} <= set(node) <= {"strategy", "process_group", "network", "lr"}
            assert type(instantiate(node.strategy)).__name__ == expected
        monkeypatch.setenv("SLURM_JOB_ID", "8")
        node = compose("slurm", return_hydra_config=True)
        assert node.hydra.run.dir == "runs/slurm/8/0"
        assert node.cluster.num_nodes == 1


def test_the_search_path_for_applications_has_copies_of_four_groups():
    copies = sorted(path.relative_to(CONF / "groups") for path in (CONF / "groups").rglob("*.yaml"))
    groups = ("strategy", "process_group", "network", "cluster")
    assert copies == sorted(path.relative_to(CONF) for group in groups for path in (CONF / group).glob("*.yaml"))
    assert len(copies) > 10
    for path in copies:
        assert (CONF / "groups" / path).read_text() == (CONF / path).read_text(), path


def write_documented_application(folder):
    """Write the program and the configuration of the page."""
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    section = page.partition("## Your own Hydra application")[2].partition("\n## ")[0]
    program, config = (re.search(rf"```{kind}\n(.*?)```", section, re.DOTALL)[1] for kind in ("python", "yaml"))
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "train.py").write_text(program)
    (folder / "conf" / "config.yaml").write_text(config)
    (folder / "conf" / "experiment" / "mine.yaml").write_text("# @package _global_\nstrategy: {gpu0_batch_size: 3}\n")


def test_the_documented_application_makes_its_trainer_with_every_strategy_and_cluster(tmp_path):
    write_documented_application(tmp_path)
    by_hand = ("cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=1", "cluster.main_address=node1")
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        for overrides, strategy, environment in (
            ((), "BalancedDataParallelStrategy", "LightningEnvironment"),
            (
                ("strategy=ddp", "process_group=gloo", "network=loopback"),
                "ConnectedDDPStrategy",
                "LightningEnvironment",
            ),
            (("strategy=ddp_join", *by_hand), "DDPJoinStrategy", "ManualEnvironment"),
            (("strategy=balanced_ddp",), "BalancedDDPStrategy", "LightningEnvironment"),
        ):
            trainer = instantiate(compose("config", overrides=[*overrides, "+trainer.logger=false"]).trainer)
            assert type(trainer.strategy).__name__ == strategy
            assert type(trainer.strategy.cluster_environment).__name__ == environment
            assert trainer.num_nodes == (2 if overrides[1:] == by_hand else 1)
        for overrides, size in (
            (["strategy.gpu0_batch_size=5"], 5),
            (["experiment=mine"], 3),
            (["experiment=mine", "strategy.gpu0_batch_size=5"], 5),
        ):
            assert compose("config", overrides=overrides).strategy.gpu0_batch_size == size
        assert compose("config", overrides=["+model=digits_cnn"]).model == "digits_cnn"  # a value: no such group
        for overrides in (["experiment=byte_transformer"], ["strategy=ddp", "experiment=mine"], ["process_group=gluu"]):
            with pytest.raises((HydraException, OmegaConfBaseException)):
                compose("config", overrides=overrides)


@pytest.mark.slow
def test_the_documented_application_runs(tmp_path):
    write_documented_application(tmp_path)
    for overrides, printed in (
        (["strategy.gpu0_batch_size=8"], "BalancedDataParallelStrategy\n"),
        (["strategy=ddp_join", "process_group=gloo", "network=loopback"], "DDPJoinStrategy\n"),
    ):
        assert printed in run_python("train.py", *overrides, cwd=tmp_path).stdout


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
    assert run_python("-c", program).stdout.strip() == "['strategy'] None 1800"


CLI_OPTIONS = [
    "logger=false", "enable_checkpointing=false", "enable_progress_bar=false", "enable_model_summary=false",
    "accelerator=cpu",
]  # fmt: skip


def fit_by_cli(*options: str) -> Trainer:
    """Fit the model of the demo with LightningCLI and options of the Trainer, or a path to a file with others."""
    given = [f"--trainer.{option}" for option in (*CLI_OPTIONS, *options) if "=" in option]
    files = [f"--config={option}" for option in options if "=" not in option]
    with patch.object(sys, "argv", ["train.py", "fit", *files, *given]):
        return LightningCLI(DigitsCNN, DigitsData, save_config_callback=None).trainer


CLI_FILE = """
trainer:
  strategy:
    class_path: lightning_ddp_ext.BalancedDDPStrategy
    init_args:
      split: [1]
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:No seed found")
def test_lightning_cli_takes_the_name_the_class_and_a_file(tmp_path):
    file = tmp_path / "train.yaml"
    file.write_text(CLI_FILE)
    for given, kind, split in (
        (["strategy=balanced_dp", "devices=2"], BalancedDataParallelStrategy, [16, 16]),
        (
            ["strategy=lightning_ddp_ext.BalancedDataParallelStrategy", "strategy.split=[1, 3]", "devices=2"],
            BalancedDataParallelStrategy,
            [8, 24],
        ),
        ([str(file), "devices=1"], BalancedDDPStrategy, [1]),
        (["strategy=balanced_ddp", "devices=1"], BalancedDDPStrategy, None),
        (["strategy=ddp_join", "devices=1"], DDPJoinStrategy, None),
    ):
        trainer = fit_by_cli("max_steps=3", "limit_val_batches=1", *given)
        assert type(trainer.strategy) is kind
        found = trainer.strategy.split_sizes(32) if "devices=2" in given else getattr(trainer.strategy, "split", None)
        assert found == split
        assert trainer.global_step == 3
