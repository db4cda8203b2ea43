"""Lightning's two import names: `lightning.pytorch`, which the sources import, and `pytorch_lightning`.

Both distributions hold the same code. The modules that need Lightning are loaded a second time, from the same files
with the other names, below `lightning_ddp_ext.pytorch_lightning`. All other modules are shared.
"""

import functools
import importlib
import importlib.resources
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import accumulate
from types import CodeType, ModuleType
from typing import Any

from lightning_ddp_ext._validation import suggest

PACKAGE = "lightning_ddp_ext"
SECOND = f"{PACKAGE}.pytorch_lightning"
# By the name of Lightning that a program imports.
PACKAGES = {"lightning.pytorch": PACKAGE, "pytorch_lightning": SECOND}
_FABRICS = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
DISTRIBUTIONS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
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

_LIGHTNING = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)(?: import \(?([\w, ]*))?", re.MULTILINE)
_FROM = re.compile(rf"\bfrom ({PACKAGE}(?:\.\w+)*) import (\(\n[^)]*\)|[^\n]*)")
_PATH = re.compile(rf"\b(lightning\.(?:pytorch|fabric)\b|{PACKAGE}(?:\.\w+)+)")
_NAME = re.compile(rf"(?:{PACKAGE}|lightning\.pytorch|lightning\.fabric|pytorch_lightning|lightning_fabric)(?:\.\w+)+")


# ---------------------------------------------------------------- names


def _sources(folder: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the text of all modules in a folder, which may lie in a zip file."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{prefix}{entry.name}.")
        elif entry.name.endswith(".py") and f"{prefix}{entry.name}" != "__init__.py":
            yield f"{prefix}{entry.name[:-3]}".removesuffix(".__init__"), entry.read_text(encoding="utf-8")


@functools.cache
def modules_with_lightning() -> frozenset[str]:
    """Return the modules of this package that import Lightning, directly or through others, relative to the package."""
    imported: dict[str, set[str]] = {}
    for name, text in _sources(importlib.resources.files(PACKAGE)):
        names = imported[name] = set()
        for module, members in _IMPORT.findall(text):
            names |= {module, *(f"{module}.{member.strip()}" for member in members.split(","))}
    found: set[str] = set()
    grows = True
    while grows:
        needing = {module for module, names in imported.items() if any(_needs(name, found) for name in names)}
        grows, found = needing != found, needing
    return frozenset(found)


def _needs(name: str, found: set[str]) -> bool:
    return name.partition(".")[0] == "lightning" or name.removeprefix(f"{PACKAGE}.") in found


def translate(path: str) -> str:
    """Return the dotted path of an object for programs that import `pytorch_lightning`."""
    if path in _LIGHTNING:
        return _LIGHTNING[path]
    name = path.removeprefix(f"{PACKAGE}.")
    modules = set(accumulate(PUBLIC.get(name, name).split("."), "{}.{}".format))
    return path if modules.isdisjoint(modules_with_lightning()) else f"{SECOND}.{name}"


def translate_source(text: str) -> str:
    """Return a text with the other name in each import and dotted path, on the same lines."""

    def translate_from(found: re.Match[str]) -> str:
        module, members = found.groups()
        paths = {translate(f"{module}.{name}") for name in re.findall(r"\w+", members)}
        is_second = any(path.startswith(SECOND) for path in paths)
        return f"from {module.replace(PACKAGE, SECOND, 1) if is_second else module} import {members}"

    return _PATH.sub(lambda found: translate(found[0]), _FROM.sub(translate_from, text))


def name_under(lightning: str, text: str) -> str:
    """Return a dotted path of Lightning or of this package under one name of Lightning; other texts as they are."""
    if not _NAME.fullmatch(text):
        return text
    first = text.replace(f"{SECOND}.", f"{PACKAGE}.")
    for name, other in _LIGHTNING.items():
        first = re.sub(rf"^{other}\b", name, first)
    return first if PACKAGES[lightning] == PACKAGE else translate_source(first)


def lightning_of(kind: type) -> str | None:
    """Return the name of the Lightning that a class derives from, or None."""
    modules = [f"{base.__module__}." for base in kind.__mro__]
    return next((name for name in PACKAGES if any(module.startswith(f"{name}.") for module in modules)), None)


def find_lightning() -> str:
    """Return the name of Lightning that is imported already, or else that is installed, preferably the first."""
    for name in PACKAGES:
        if name in sys.modules:
            return name
    for name in PACKAGES:
        if _is_installed(name):
            return name
    raise ModuleNotFoundError(_describe_missing(PACKAGE, *PACKAGES))


def _is_installed(lightning: str) -> bool:
    return importlib.util.find_spec(lightning.partition(".")[0]) is not None


def _describe_missing(what: str, lightning: str, other: str) -> str:
    command = f"pip install {DISTRIBUTIONS[lightning]}"
    if not _is_installed(other):
        return (
            f"`{what}` needs Lightning, and neither `{DISTRIBUTIONS[lightning]}` nor `{DISTRIBUTIONS[other]}` is"
            f" installed. Run `{command}` or `pip install {DISTRIBUTIONS[other]}`."
        )
    return (
        f"`{what}` is for programs that import `{lightning}`, which is not installed. Import from"
        f" `{PACKAGES[other]}` instead, which is for `{other}`, or run `{command}`."
    )


# ---------------------------------------------------------------- a second copy of the modules that need Lightning


class _SecondNameLoader(InspectLoader):
    """Loads a file of this package with the other names; tracebacks and debuggers show the file itself.

    Without a cache of bytecode: `pip uninstall` would leave its files behind, and with them the folder of the package.
    """

    def __init__(self, loader: Any, path: str) -> None:
        self._loader = loader
        self._path = path

    def is_package(self, fullname: str) -> bool:
        return bool(self._loader.is_package(fullname))

    def get_source(self, fullname: str) -> str:
        return str(self._loader.get_source(fullname))

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(translate_source(self.get_source(fullname)), self._path)


class _SharedLoader(Loader):
    """Gives a module that does not need Lightning a second name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self._name)  # instead of the empty module


class _PackageFinder(MetaPathFinder):
    """Finds modules below `lightning_ddp_ext.pytorch_lightning`; an error says what to install for either name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        lightning = next((name for name in reversed(PACKAGES) if fullname.startswith(f"{PACKAGES[name]}.")), None)
        if lightning is None or fullname in PACKAGES.values():
            return None
        name = fullname.removeprefix(f"{PACKAGES[lightning]}.")
        if PUBLIC.get(name, name) in modules_with_lightning() and not _is_installed(lightning):
            (other,) = PACKAGES.keys() - {lightning}
            missing = lightning.partition(".")[0]
            raise ModuleNotFoundError(_describe_missing(fullname, lightning, other), name=missing)
        if PACKAGES[lightning] == PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path or sys.modules[PACKAGE].__path__)
        if spec is None or spec.origin is None:
            return None
        # Packages are never shared, because the modules below them become their attributes.
        if spec.submodule_search_locations is None and name not in modules_with_lightning():
            return ModuleSpec(fullname, _SharedLoader(f"{PACKAGE}.{name}"))
        spec.loader = _SecondNameLoader(spec.loader, spec.origin)
        spec.cached = None
        return spec


def get_public(lightning: str, name: str) -> Any:
    """Return a public name of the package for one name of Lightning, whose module is imported now."""
    package = PACKAGES[lightning]
    try:
        if name in PUBLIC:
            return getattr(importlib.import_module(f"{package}.{PUBLIC[name]}"), name)
        if name in ("callbacks", "fabric") or f"{package}.{name}" == SECOND:
            return importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise
        # For `getattr` with a default. `from ... import` then asks `_PackageFinder`, whose error is the same.
        raise AttributeError(str(error)) from error
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


# ---------------------------------------------------------------- what either Lightning learns when it is imported


def _register_strategies(lightning: str, module: ModuleType) -> None:
    """Register the names of the strategies in the module `strategies` of a Lightning or of its Fabric."""
    is_fabric = module.__name__ == f"{_FABRICS[lightning]}.strategies"
    package = f"{PACKAGES[lightning]}.fabric" if is_fabric else PACKAGES[lightning]
    registry = module.STRATEGY_REGISTRY if is_fabric else module.StrategyRegistry
    for name, class_name in STRATEGIES.items():
        if not (is_fabric and name == "balanced_dp"):  # it is for the Trainer only
            make = functools.partial(_make, package, class_name)
            registry.register(name, make, description=class_name, override=True)


def _make(package: str, class_name: str, **options: Any) -> Any:
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

    strategies = sys.modules[f"{_FABRICS[lightning] if is_fabric else lightning}.strategies"]
    registry = strategies.STRATEGY_REGISTRY if is_fabric else strategies.StrategyRegistry
    kind.__init__ = construct_checked


def _refuse_other(lightning: str, is_fabric: bool, argument: str, value: object) -> None:
    """Refuse an object of this package for another Trainer or Fabric, and a class in place of an object."""
    given = value if isinstance(value, type) else type(value)
    kind = next((one for one in given.__mro__ if f"{one.__module__}.".startswith(f"{PACKAGE}.")), None)
    if kind is None:
        return
    of = "pytorch_lightning" if f"{kind.__module__}.".startswith(f"{SECOND}.") else "lightning.pytorch"
    name, module = kind.__name__, kind.__module__.removeprefix(f"{PACKAGES[of]}.")
    of_fabric = module.startswith("fabric.") if argument == "strategy" else is_fabric
    ends = (of, of_fabric), (lightning, is_fabric)
    if ends[0] != ends[1]:
        if argument == "strategy" and is_fabric:
            public = f"fabric.{_IN_FABRIC.get(name, name)}"
        else:
            folder = "callbacks" if module.startswith("callbacks.") else module
            public = name if name in PUBLIC else f"{folder}.{name}"
        made, own = (f"{_FABRICS[end]}.Fabric" if in_fabric else f"{end}.Trainer" for end, in_fabric in ends)
        raise TypeError(
            f"`{argument}` has a `{given.__name__}` that is made for `{made}`, and this is `{own}`."
            f" Use `{PACKAGES[lightning]}.{public}`."
        )
    if given is value:
        raise TypeError(f"`{argument}` has the class `{given.__name__}`. Pass an object: `{given.__name__}()`.")


# By the module of Lightning after whose import they are called, with the name of Lightning.
_CALLED: dict[str, Callable[[ModuleType], None]] = {
    f"{prefix}.{module}": functools.partial(call, lightning)
    for lightning in PACKAGES
    for prefix, module, call in (
        (lightning, "strategies", _register_strategies),
        (lightning, "trainer", _check_arguments),
        (_FABRICS[lightning], "strategies", _register_strategies),
        (_FABRICS[lightning], "fabric", _check_arguments),
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
    """Make the strategies known to each Lightning that is imported, or will be, and this package to either name."""
    if any(isinstance(finder, _LightningFinder) for finder in sys.meta_path):
        return
    for name, call in _CALLED.items():
        if (module := sys.modules.get(name)) is not None:
            call(module)
    sys.meta_path[:0] = [_PackageFinder(), _LightningFinder()]
