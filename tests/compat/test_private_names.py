"""Private names of other packages are in `_compat` only, and `docs/private_names.md` says why each is needed."""

import ast
import importlib
import inspect
import re

import pytest

from tests.support.sources import PACKAGE, trees

PAGE = PACKAGE.parent / "docs" / "private_names.md"
UPSTREAM = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
# Documented in spite of the underscore: Python's, Hydra's, and the dictionaries of an `nn.Module`.
DOCUMENTED = {
    "_fields", "_exit", "_current_frames", "_target_", "_convert_", "_execution_whitelist_", "_modules", "_parameters",
    "_buffers",
}  # fmt: skip
# Methods of the Trainer's strategies and loaders that ours override, so that they are outside of `_compat`.
OVERRIDDEN = {"_configure_launcher", "_state_dicts", "_load_state_dicts"}


def is_private(name):
    return re.fullmatch(r"_[^\W_]\w*", name) is not None


def own_names(folder=""):
    """Return the names that the package or one folder defines: functions, classes, variables and attributes."""
    found = set()
    for tree in (tree for path, tree in trees().items() if path.parts[0].startswith(folder)):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return found


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_used(tree):
    """Yield the private names that a module imports, reads, sets, or looks up by a string."""
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            if not (paths[0] or paths[1]).startswith("lightning_ddp_ext"):
                yield from (part for path in paths for part in path.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.keyword) and is_private(node.arg or ""):
            yield node.arg
        elif isinstance(node, ast.Constant) and node not in parts and is_private(str(node.value)):
            yield node.value


def test_private_names_of_other_packages_are_used_in_compat_only():
    own = own_names()
    assert len(own) > 1000
    found = {
        f"{path}: {name}"
        for path, tree in trees().items()
        if path.parts[0] != "_compat"
        for name in names_used(tree)
        if name not in own | DOCUMENTED
    }
    assert found == set()


def test_classes_do_not_use_private_names_of_their_bases():
    """A name that the package defines, such as `_timeout`, may be one of a base class as well."""
    pytest.importorskip("lightning")  # the modules themselves import this name
    found, derived = set(), 0
    for path in trees():
        if path.parts[0] in ("_compat", "pytorch_lightning") or path.stem == "__main__":
            continue
        module = ".".join([PACKAGE.name, *path.with_suffix("").parts]).removesuffix(".__init__")
        for cls in vars(importlib.import_module(module)).values():
            if inspect.isclass(cls) and cls.__module__ == module:
                bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in UPSTREAM]
                derived += bool(bases)
                of_bases = set().union(*map(names_of_class, bases))
                found |= {f"{cls.__name__}.{name}" for name in names_of_class(cls) & of_bases - DOCUMENTED}
    assert derived > 10
    assert {name for name in found if name.partition(".")[2] not in OVERRIDDEN} == set()
    assert {name.partition(".")[2] for name in found} == OVERRIDDEN


def names_of_class(cls):
    """Return the private names that a class defines, or reads and sets on itself."""
    try:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # written in C
        return {name for name in vars(cls) if is_private(name)}
    used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and is_self(n.value)}
    return {name for name in used | set(vars(cls)) if is_private(name) and name != "_abc_impl"}


def test_the_page_lists_the_private_names_that_are_used():
    used = OVERRIDDEN.union(*(names_used(tree) for path, tree in trees().items() if path.parts[0] == "_compat"))
    own = own_names("_compat")
    listed = set(re.findall(r"`(?:\w+\.)*(_\w+)`", PAGE.read_text()))
    assert len(used) > 50
    assert used - own - listed - DOCUMENTED == set()
    assert listed - used == set()
