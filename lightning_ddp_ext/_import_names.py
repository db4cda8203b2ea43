"""Lightning's two import names: `lightning.pytorch` and `pytorch_lightning`, of which a process uses one.

Both distributions hold the same code with distinct classes. The choice is made when the first module that needs
Lightning is imported, and `_lightning` has the names of the chosen one. This module imports neither.
"""

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_ddp_ext._validation import suggest

PACKAGE = "lightning_ddp_ext"
FIRST, SECOND = "lightning.pytorch", "pytorch_lightning"
NAMES = (FIRST, SECOND)
FABRICS = {FIRST: "lightning.fabric", SECOND: "lightning_fabric"}
DISTRIBUTIONS = {FIRST: "lightning", SECOND: "pytorch-lightning"}
LIBRARIES = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})  # all top-level packages of Lightning

# The public names that need torch or Lightning, and their modules.
PUBLIC = {
    "BalancedDDPStrategy": "strategies.balanced_ddp",
    "BalancedDataParallelStrategy": "strategies.balanced_dp",
    "CheckedSLURMEnvironment": "clusters.environments",
    "ClassWeights": "batches.label_counts",
    "DDPCheckpointStrategy": "strategies.ddp_checkpoint",
    "DDPJoinStrategy": "strategies.ddp_join",
    "ExplicitDDPStrategy": "strategies.explicit_ddp",
    "GradientReducer": "reducer.gradient_reducer",
    "ManualEnvironment": "clusters.environments",
    "TokenBudgetBatchSampler": "batches.token_batches",
    "TokenCount": "batches.label_counts",
    "scatter_objects": "distributed.exchange",
}
STRATEGIES = {
    "balanced_ddp": "BalancedDDPStrategy",
    "balanced_dp": "BalancedDataParallelStrategy",
    "ddp_checkpoint": "DDPCheckpointStrategy",
    "ddp_join": "DDPJoinStrategy",
}
# The nearest strategies for Fabric of those that it lacks.
_IN_FABRIC = {"BalancedDataParallelStrategy": "BalancedDDPStrategy", "ExplicitDDPStrategy": "DDPCheckpointStrategy"}

_chosen: str | None = None


# ---------------------------------------------------------------- the choice


def find_lightning() -> str:
    """Return the name of Lightning that is chosen, else imported already, else installed, preferably the first."""
    if _chosen is not None:
        return _chosen
    candidates = [name for name in NAMES if name in sys.modules] or [*filter(_is_installed, NAMES)]
    if not candidates:
        first, second = DISTRIBUTIONS.values()
        raise ModuleNotFoundError(
            f"`{PACKAGE}` needs Lightning, and neither `{first}` nor `{second}` is installed. Run `pip install {first}`"
            f" or `pip install {second}`.",
            name="lightning",
        )
    return candidates[0]


def _is_installed(lightning: str) -> bool:
    return importlib.util.find_spec(lightning.partition(".")[0]) is not None


def choose(lightning: str | None = None) -> str:
    """Choose the Lightning of this process, by default the one that `find_lightning` returns; return its name.

    Raises:
        ImportError: If the other one has been chosen before, or this one is not installed.
    """
    global _chosen
    found = find_lightning()
    wanted = lightning or found
    if _chosen not in (None, wanted):
        raise ImportError(f"`{PACKAGE}` already works for `{_chosen}` in this process. {_remedy(wanted)}")
    if not _is_installed(wanted):
        raise ModuleNotFoundError(
            f"`{wanted}` is not installed. Run `pip install {DISTRIBUTIONS[wanted]}`, or import from `{PACKAGE}`, which"
            f" takes `{found}`.",
            name=wanted.partition(".")[0],
        )
    _chosen = wanted
    return wanted


def _remedy(wanted: str) -> str:
    module = f"{PACKAGE}.pytorch_lightning" if wanted == SECOND else wanted
    return f"Import `{module}` before anything else of `{PACKAGE}`; a process uses one of Lightning's two names."


def name_under(lightning: str, text: str) -> str:
    """Return a dotted path of Lightning under one of its names; other texts as they are."""
    for other in NAMES:
        for name, replacement in ((other, lightning), (FABRICS[other], FABRICS[lightning])):
            if re.fullmatch(rf"{re.escape(name)}(\.\w+)+", text):
                return replacement + text.removeprefix(name)
    return text


def lightning_of(kind: type) -> str | None:
    """Return the name of the Lightning that a class derives from, or None."""
    modules = [f"{base.__module__}." for base in kind.__mro__]
    return next((name for name in NAMES if any(module.startswith(f"{name}.") for module in modules)), None)


def get_public(name: str) -> Any:
    """Return a public name of the package, whose module is imported now."""
    if name in PUBLIC:
        return getattr(importlib.import_module(f"{PACKAGE}.{PUBLIC[name]}"), name)
    if name in ("callbacks", "fabric", "pytorch_lightning"):
        return importlib.import_module(f"{PACKAGE}.{name}")
    raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")


# ---------------------------------------------------------------- what either Lightning learns when it is imported


def _register_strategies(lightning: str, module: ModuleType) -> None:
    """Register the names of the strategies in the module `strategies` of a Lightning or of its Fabric."""
    is_fabric = module.__name__ == f"{FABRICS[lightning]}.strategies"
    registry = module.STRATEGY_REGISTRY if is_fabric else module.StrategyRegistry
    for name, class_name in STRATEGIES.items():
        if not (is_fabric and name == "balanced_dp"):  # it is for the Trainer only
            make = functools.partial(_make, lightning, f"{PACKAGE}.fabric" if is_fabric else PACKAGE, class_name)
            registry.register(name, make, description=class_name, override=True)
    if not is_fabric:  # whose own `"dp"` is torch's `DataParallel`
        of_programs = "strategy of Lightning 1.x: `balanced_dp` with equal chunks"
        registry.register("dp", functools.partial(_make_dp, lightning), description=of_programs, override=True)


def _make_dp(lightning: str, **options: Any) -> Any:
    """Return the strategy for programs of Lightning 1.x that ask for `"dp"`, and say which one it is."""
    strategy = _make(lightning, PACKAGE, STRATEGIES["balanced_dp"], **{"balance": "even", **options})
    importlib.import_module(f"{PACKAGE}._lightning").rank_zero_info(
        '`strategy="dp"` is `"balanced_dp"` with equal chunks. Write `"balanced_dp"` to divide batches by speed.'
    )
    return strategy


def _make(lightning: str, package: str, class_name: str, **options: Any) -> Any:
    choose(lightning)
    return getattr(importlib.import_module(package), class_name)(**options)


def _check_arguments(lightning: str, module: ModuleType) -> None:
    """Have the Trainer or Fabric in a module of Lightning refuse misspelt names, classes, objects for another."""
    is_fabric = hasattr(module, "Fabric")
    kind = module.Fabric if is_fabric else module.Trainer
    construct = kind.__init__

    @functools.wraps(construct)
    def construct_checked(made: Any, *args: Any, **options: Any) -> None:
        for name in ("strategy", "plugins", "callbacks"):
            given = options.get(name)
            for value in given if isinstance(given, list | tuple) else (given,):
                _refuse_other(lightning, is_fabric, name, value)
        strategy: Any = options.get("strategy")
        is_unknown = isinstance(strategy, str) and strategy.lower() not in registry
        remedy = suggest(strategy.lower(), filter(registry.__contains__, STRATEGIES)) if is_unknown else ""
        if remedy:  # Lightning's own error lists the names of all others
            raise ValueError(f"`strategy={strategy!r}` does not exist.{remedy}")
        construct(made, *args, **options)

    strategies = sys.modules[f"{FABRICS[lightning] if is_fabric else lightning}.strategies"]
    registry = strategies.STRATEGY_REGISTRY if is_fabric else strategies.StrategyRegistry
    kind.__init__ = construct_checked


def _refuse_other(lightning: str, is_fabric: bool, argument: str, value: object) -> None:
    """Refuse an object of this package for another Trainer or Fabric, and a class in place of an object."""
    given = value if isinstance(value, type) else type(value)
    kind = next((one for one in given.__mro__ if f"{one.__module__}.".startswith(f"{PACKAGE}.")), None)
    if kind is None:
        return
    name, module = kind.__name__, kind.__module__.removeprefix(f"{PACKAGE}.")
    of_fabric = module.startswith("fabric.") if argument == "strategy" else is_fabric
    own = f"{FABRICS[lightning]}.Fabric" if is_fabric else f"{lightning}.Trainer"
    if _chosen not in (None, lightning):
        raise TypeError(
            f"`{argument}` has a `{given.__name__}` for `{_chosen}`, and this is `{own}`. {_remedy(lightning)}"
        )
    if of_fabric != is_fabric:
        made = f"{lightning}.Trainer" if is_fabric else f"{FABRICS[lightning]}.Fabric"
        public = f"fabric.{_IN_FABRIC.get(name, name)}" if is_fabric else name if name in PUBLIC else f"{module}.{name}"
        raise TypeError(
            f"`{argument}` has a `{given.__name__}` that is made for `{made}`, and this is `{own}`."
            f" Use `{PACKAGE}.{public}`."
        )
    if given is value:
        raise TypeError(f"`{argument}` has the class `{given.__name__}`. Pass an object: `{given.__name__}()`.")


# By the module of Lightning after whose import they are called, with the name of Lightning.
_CALLED: dict[str, Callable[[ModuleType], None]] = {
    f"{prefix}.{module}": functools.partial(call, lightning)
    for lightning in NAMES
    for prefix, module, call in (
        (lightning, "strategies", _register_strategies),
        (lightning, "trainer", _check_arguments),
        (FABRICS[lightning], "strategies", _register_strategies),
        (FABRICS[lightning], "fabric", _check_arguments),
    )
}


class _LightningFinder(MetaPathFinder):
    """Calls the functions above when the program imports a Lightning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CALLED:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _CALLED[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Make the strategies known to each Lightning that is imported, or will be."""
    if any(isinstance(finder, _LightningFinder) for finder in sys.meta_path):
        return
    for name, call in _CALLED.items():
        if (module := sys.modules.get(name)) is not None:
            call(module)
    sys.meta_path.insert(0, _LightningFinder())
