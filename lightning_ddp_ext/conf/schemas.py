"""Schemas of the packaged Hydra groups, generated from the signatures of the constructors.

The signatures are read from the sources, because importing torch and Lightning takes seconds: the command refuses
mistyped settings before.
"""

import ast
import functools
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, make_dataclass
from datetime import timedelta
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Optional, Union, get_args, get_origin

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf

from lightning_ddp_ext._import_names import LIBRARIES, NAMES, PACKAGE, find_lightning, lightning_of, name_under
from lightning_ddp_ext._validation import check_choice

# ruff: noqa: UP045  OmegaConf reads `Optional[...]` on every Python version, `... | None` not on all.


# ---------------------------------------------------------------- signatures, read from sources


@dataclass(frozen=True)
class _Definition:
    """A class or function of a module, as its source has it."""

    names: "_Names"
    node: ast.ClassDef | ast.FunctionDef

    def arguments(self) -> ast.arguments | None:
        """Return the arguments of the function, or of the constructor that the class has or inherits."""
        if isinstance(self.node, ast.FunctionDef):
            return self.node.args
        for node in self.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return node.args
        return None


class _Names(dict[str, Any]):
    """Values of the names of a module, evaluated when they are looked up; imported are modules of Python only."""

    def __init__(self, module: str) -> None:
        loader: Any = _find_spec(module).loader
        self._nodes: dict[str, ast.stmt] = {}
        for node in _statements(ast.parse(loader.get_source(module)).body):
            for name in _names_set_by(node):
                self._nodes.setdefault(name, node)

    def __missing__(self, name: str) -> Any:
        node = self._nodes[name]
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            value: Any = _Definition(self, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            path = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
            value = _imported(f"{node.module}.{path}" if isinstance(node, ast.ImportFrom) else path)
        else:
            value = self.evaluate(node.value)  # type: ignore[attr-defined]
        self[name] = value
        return value

    def evaluate(self, node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "<source>", "eval"), {}, self)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module and of its `if` blocks, such as `if TYPE_CHECKING:`."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])
        else:
            yield node


def _names_set_by(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def _find_spec(module: str) -> ModuleSpec:
    """Return the spec of a module without importing the packages that hold it."""
    parent = module.rpartition(".")[0]
    search = _find_spec(parent).submodule_search_locations if parent else None
    spec = PathFinder.find_spec(module, search) if parent else importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"no module {module!r}", name=module)
    return spec


_names_of = functools.cache(_Names)


def _imported(path: str) -> Any:
    """Return what a module imports, if it comes from Python, this package or Lightning."""
    package = path.partition(".")[0]
    if package in (PACKAGE, *LIBRARIES):
        return read_source(path)
    if package in sys.stdlib_module_names:
        return pkgutil.resolve_name(path)
    raise KeyError(path)


def read_source(path: str) -> Any:
    """Return the value or the definition that a dotted path leads to, from sources."""
    module, _, name = name_under(find_lightning(), path).rpartition(".")
    return _names_of(module)[name]


def read_parameters(path: str) -> Iterator[inspect.Parameter]:
    """Yield the named parameters of a function or constructor; annotations that need an import are `Any`."""
    definition = read_source(path)
    while (arguments := definition.arguments()) is None:
        definition = definition.names.evaluate(definition.node.bases[0])
    positional = [*arguments.posonlyargs, *arguments.args][isinstance(definition.node, ast.ClassDef) :]
    lacking = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*lacking, *arguments.defaults, *arguments.kw_defaults]
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        annotation = Any
        with suppress(Exception):  # objects of torch and Lightning cannot be evaluated, and are not checked
            annotation = Any if argument.annotation is None else definition.names.evaluate(argument.annotation)
        value = inspect.Parameter.empty if default is None else definition.names.evaluate(default)
        yield inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)


# ---------------------------------------------------------------- schemas


@dataclass(kw_only=True)
class ProcessGroupConfig:
    """Settings of the process group, which the strategies refer to."""

    backend: Optional[str] = None
    timeout_seconds: float = read_source("lightning_ddp_ext.distributed.backends.DEFAULT_TIMEOUT").total_seconds()
    stall_timeout_seconds: Optional[float] = 60.0
    init_method: Optional[str] = None


@dataclass(kw_only=True)
class NetworkConfig:
    """The network interface: `"auto"`, `"loopback"` or a name."""

    interface: str = "auto"


@dataclass(kw_only=True)
class TrainConfig:
    """The whole configuration of the command; docs/configuration.md explains the keys."""

    lightning: Optional[str] = None
    mode: str = "train"
    seed: int = 1
    test: bool = True
    plot: bool = True
    ckpt_path: Optional[str] = None
    weights_only: bool = True
    optimized_metric: Optional[str] = None
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
    """Return a dataclass of the arguments of a constructor and its `base`, but `without` some, and of `options`.

    Paths are those under `lightning.pytorch`; an application that imports `pytorch_lightning` gets the other ones.
    """
    targets = [name_under(find_lightning(), target) for target in (base, path) if target is not None]
    parameters: dict[str, inspect.Parameter] = {}
    for target in targets:
        parameters.update((parameter.name, parameter) for parameter in read_parameters(target))
    fields: list[Any] = [("_target_", str, field(default=targets[-1]))]
    for parameter in parameters.values():
        if parameter.name not in without:
            fields.append((parameter.name, _field_type(parameter.annotation), _field(parameter)))
    fields += [(name, type(default), field(default=default)) for name, default in options.items()]
    return make_dataclass(f"{path.rpartition('.')[2]}Config", fields, kw_only=True)


def _field_type(annotation: Any) -> Any:
    """Return the type that OmegaConf checks: `Any` unless the annotation is one plain type, possibly optional."""
    alternatives = _alternatives(annotation)
    kinds = {_plain_type(alternative) for alternative in alternatives if alternative is not NoneType}
    if len(kinds) > 1 or Any in kinds:
        return Any
    return Optional[kinds.pop()] if NoneType in alternatives else kinds.pop()


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the strings that an argument can be, if it cannot be anything else but None."""
    kinds = [kind for kind in _alternatives(annotation) if kind is not NoneType]
    is_choice = all(get_origin(kind) is Literal and _plain_type(kind) is str for kind in kinds)
    return tuple(choice for kind in kinds for choice in get_args(kind)) if is_choice else ()


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
    name, default, metadata = parameter.name, parameter.default, {"choices": _choices(parameter.annotation)}
    if default is inspect.Parameter.empty:
        return field(default=MISSING, metadata=metadata)
    if isinstance(default, list | tuple):
        return field(default_factory=lambda: list(default), metadata=metadata)
    plain = default.total_seconds() if isinstance(default, timedelta) else default
    if name in _OF_RUN:
        plain = f"${{oc.select:{_OF_RUN[name]},{'null' if plain is None else f'{plain:g}'}}}"
    return field(default=plain, metadata=metadata)


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
    connected = "lightning_ddp_ext.strategies.connected"
    return {
        "train": TrainConfig,
        "strategy/balanced_dp": make_schema("lightning_ddp_ext.BalancedDataParallelStrategy", without=OBJECTS),
        "strategy/ddp_checkpoint": make_schema("lightning_ddp_ext.DDPCheckpointStrategy", without=OBJECTS),
        "strategy/ddp_join": make_schema("lightning_ddp_ext.DDPJoinStrategy", base=_EXPLICIT_DDP, without=OBJECTS),
        "strategy/balanced_ddp": make_schema(
            "lightning_ddp_ext.BalancedDDPStrategy", base=_EXPLICIT_DDP, without=(*OBJECTS, "prefetch")
        ),
        "strategy/ddp": make_schema(
            f"{connected}.ConnectedDDPStrategy",
            start_method="popen",
            find_unused_parameters=False,
            static_graph=False,
            gradient_as_bucket_view=False,
        ),
        "strategy/fsdp": make_schema(
            f"{connected}.ConnectedFSDPStrategy", base=f"{connected}.ConnectedDDPStrategy", cpu_offload=False
        ),
        "strategy/single": make_schema(f"{connected}.single_device_strategy"),
        "process_group/process_group": ProcessGroupConfig,
        "network/network": NetworkConfig,
        "cluster/local": make_schema("lightning_ddp_ext.clusters.environments.local_environment"),
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
        "callbacks/early_stopping": make_schema("lightning.pytorch.callbacks.EarlyStopping"),
        "callbacks/gradient_check": make_schema(f"{callbacks}.GradientCheck"),
        "callbacks/join_report": make_schema(f"{callbacks}.JoinReport"),
        "callbacks/prediction_writer": make_schema(f"{callbacks}.PredictionWriter"),
        "callbacks/replica_consistency": make_schema(f"{callbacks}.ReplicaConsistency"),
        "logger/csv": make_schema("lightning.pytorch.loggers.CSVLogger"),
        "logger/tensorboard": make_schema("lightning.pytorch.loggers.TensorBoardLogger"),
        "logger/wandb": make_schema("lightning.pytorch.loggers.WandbLogger"),
    }


class _SharedGroup(dict[str, Any]):
    """A group of the store that copies of the store share: `--help` makes 150, and the store copies what it returns."""

    def __deepcopy__(self, memo: object) -> "_SharedGroup":
        return self


def register_schemas() -> None:
    """Store the schemas in groups below `lightning_ddp_ext`, where the packaged files look for them."""
    store = ConfigStore.instance()
    store.repo["lightning_ddp_ext"] = _SharedGroup()
    for path, schema in make_schemas().items():
        group, _, name = f"lightning_ddp_ext/{path}".rpartition("/")
        store.store(group=group, name=name, node=schema, provider="lightning_ddp_ext")


def choose_lightning(config: DictConfig) -> str:
    """Return the Lightning that a run imports: its key `lightning`, or else the one of the model's class."""
    if config.lightning is not None:
        check_choice("lightning", config.lightning, list(NAMES), "Leave it out to follow the class of the model.")
        return str(config.lightning)
    target = OmegaConf.select(config, "model._target_")
    with suppress(Exception):  # any error of the import; constructing the model raises it again
        kind = pkgutil.resolve_name(target)  # `get_object` would write the error to the log
        if isinstance(kind, type) and not target.startswith("lightning_ddp_ext."):  # ours are for either
            return lightning_of(kind) or find_lightning()
    return find_lightning()


def use_lightning(lightning: str, config: Any) -> None:
    """Replace the paths of Lightning in a configuration by the ones under one of its names."""
    keys: Any = list(config) if isinstance(config, DictConfig) else range(len(config))
    for key in keys:
        if key == "hydra" or OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
            continue
        value = config[key]
        if isinstance(value, DictConfig | ListConfig):
            use_lightning(lightning, value)
        elif isinstance(value, str) and (path := name_under(lightning, value)) != value:
            config[key] = path


register_schemas()
