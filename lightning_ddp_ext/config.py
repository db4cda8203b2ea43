"""Schemas of the packaged Hydra groups, generated from the signatures of the constructors."""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Optional, Union, get_args, get_origin

from hydra.core.config_store import ConfigStore
from hydra.utils import get_object
from omegaconf import MISSING

from lightning_ddp_ext.distributed.backends import DEFAULT_TIMEOUT

# ruff: noqa: UP045  OmegaConf reads `Optional[...]` on every Python version, `... | None` not on all.


@dataclass(kw_only=True)
class ProcessGroupConfig:
    """Settings of the process group, which the strategies refer to."""

    backend: Optional[str] = None
    timeout_seconds: float = DEFAULT_TIMEOUT.total_seconds()
    stall_timeout_seconds: Optional[float] = 60.0
    init_method: Optional[str] = None


@dataclass(kw_only=True)
class NetworkConfig:
    """The network interface: `"auto"`, `"loopback"` or a name."""

    interface: str = "auto"


@dataclass(kw_only=True)
class ClusterConfig:
    """The number of nodes, without a cluster environment."""

    num_nodes: int = 1


@dataclass(kw_only=True)
class TrainConfig:
    """The whole configuration of the command; docs/configuration.md explains the keys."""

    seed: int = 1
    test: bool = True
    plot: bool = True
    ckpt_path: Optional[str] = None
    weights_only: bool = True
    compare_single_process: Optional[bool] = None
    strategy: Any = MISSING
    process_group: Any = None
    network: Any = None
    cluster: Any = MISSING
    trainer: Any = MISSING
    model: Any = MISSING
    data: Any = MISSING
    callbacks: Any = field(default_factory=dict)
    logger: Any = field(default_factory=dict)


def make_schema(
    path: str, *, base: str | None = None, without: Collection[str] = (), **options: bool | str | None
) -> type:
    """Return a dataclass of the arguments of a constructor and its `base`, but `without` some, and of `options`."""
    parameters: dict[str, inspect.Parameter] = {}
    for target in (base, path):
        if target is not None:
            parameters.update(inspect.signature(get_object(target), eval_str=True).parameters)
    fields: list[Any] = [("_target_", str, field(default=path))]
    for parameter in parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name not in without:
            fields.append((parameter.name, _field_type(parameter.annotation), _field(parameter)))
    fields += [(name, type(default), field(default=default)) for name, default in options.items()]
    return make_dataclass(f"{path.rpartition('.')[2]}Config", fields, kw_only=True)


def _field_type(annotation: Any) -> Any:
    """Return the type that OmegaConf checks: `Any` unless the annotation is one plain type, possibly optional."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    kinds = {_plain_type(choice) for choice in choices if choice is not NoneType}
    if len(kinds) > 1 or Any in kinds:
        return Any
    return Optional[kinds.pop()] if NoneType in choices else kinds.pop()


def _plain_type(annotation: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in (bool, int, float, str):
        return annotation
    if annotation is Path or (origin is Literal and all(isinstance(choice, str) for choice in arguments)):
        return str
    if origin in (list, Sequence):
        return list[_plain_type(arguments[0])]  # type: ignore[misc]
    return Any


# Arguments of the strategies whose defaults are settings of the run, if it has them.
_OF_RUN = {
    "process_group_backend": "process_group.backend",
    "timeout": "process_group.timeout_seconds",
    "stall_timeout": "process_group.stall_timeout_seconds",
    "init_method": "process_group.init_method",
    "network_interface": "network.interface",
}


def _field(parameter: inspect.Parameter) -> Any:
    name, default = parameter.name, parameter.default
    if default is inspect.Parameter.empty:
        return field(default=MISSING)
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: list(default))
    plain = default.total_seconds() if isinstance(default, timedelta) else default
    if name in _OF_RUN:
        plain = f"${{oc.select:{_OF_RUN[name]},{'null' if plain is None else f'{plain:g}'}}}"
    return field(default=plain)


# Arguments of the strategies that take objects, which a configuration cannot hold.
OBJECTS = (
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "ddp_comm_state",
    "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period",
)  # fmt: skip
GROUPS = ("strategy", "callbacks", "logger")  # arguments of the Trainer that other groups set
_EXPLICIT_DDP = "lightning_ddp_ext.ExplicitDDPStrategy"


def make_schemas() -> dict[str, type]:
    """Return all schemas, by group and name."""
    callbacks, demo = "lightning_ddp_ext.callbacks", "lightning_ddp_ext.demo"
    builtin = "lightning_ddp_ext.strategies.builtin"
    return {
        "train": TrainConfig,
        "strategy/balanced_dp": make_schema("lightning_ddp_ext.BalancedDataParallelStrategy", without=OBJECTS),
        "strategy/ddp_checkpoint": make_schema("lightning_ddp_ext.DDPCheckpointStrategy", without=OBJECTS),
        "strategy/ddp_join": make_schema("lightning_ddp_ext.DDPJoinStrategy", base=_EXPLICIT_DDP, without=OBJECTS),
        "strategy/ddp": make_schema(
            f"{builtin}.ConnectedDDPStrategy",
            start_method="popen",
            find_unused_parameters=False,
            static_graph=False,
            gradient_as_bucket_view=False,
        ),
        "strategy/fsdp": make_schema(
            f"{builtin}.ConnectedFSDPStrategy", base=f"{builtin}.ConnectedDDPStrategy", cpu_offload=False
        ),
        "strategy/single": make_schema(f"{builtin}.single_device_strategy"),
        "process_group/process_group": ProcessGroupConfig,
        "network/network": NetworkConfig,
        "cluster/local": ClusterConfig,
        "cluster/manual": make_schema("lightning_ddp_ext.ManualEnvironment"),
        "cluster/slurm": make_schema("lightning_ddp_ext.CheckedSLURMEnvironment"),
        "trainer/trainer": make_schema("lightning.pytorch.Trainer", without=GROUPS),
        "model/byte_transformer": make_schema(f"{demo}.byte_text.ByteTransformer"),
        "model/digits_cnn": make_schema(f"{demo}.digits.DigitsCNN"),
        "model/slowed_digits_cnn": make_schema(f"{demo}.digits.SlowedDigitsCNN", _convert_="all"),
        "data/digits": make_schema(f"{demo}.digits.DigitsData"),
        "data/stdlib_stream": make_schema(f"{demo}.byte_text.StdlibStream"),
        "data/stdlib_text": make_schema(f"{demo}.byte_text.StdlibText"),
        "callbacks/balance_report": make_schema(f"{callbacks}.BalanceReport"),
        "callbacks/checkpoint": make_schema("lightning.pytorch.callbacks.ModelCheckpoint"),
        "callbacks/gradient_check": make_schema(f"{callbacks}.GradientCheck"),
        "callbacks/join_report": make_schema(f"{callbacks}.JoinReport"),
        "callbacks/replica_consistency": make_schema(f"{callbacks}.ReplicaConsistency"),
        "logger/csv": make_schema("lightning.pytorch.loggers.CSVLogger"),
    }


def register_schemas() -> None:
    """Store the schemas in groups below `lightning_ddp_ext`, where the packaged files look for them."""
    store = ConfigStore.instance()
    for path, schema in make_schemas().items():
        group, _, name = f"lightning_ddp_ext/{path}".rpartition("/")
        store.store(group=group, name=name, node=schema, provider="lightning_ddp_ext")


register_schemas()
