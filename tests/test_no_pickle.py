"""Nothing in the package reads a pickle, which would run code, except where a reason is given here."""

import ast
from pathlib import Path

import pytest

import lightning_ddp_ext

PACKAGE = Path(lightning_ddp_ext.__file__).parent

# Calls and names that read pickles, or run text as code.
READING = {
    "Unpickler", "_tensor_to_object", "all_gather_object", "broadcast_object_list", "eval", "exec", "gather_object",
    "recv_object_list", "scatter_object_list", "send_object_list",
}  # fmt: skip
# Modules of which nothing may be used but the names behind them.
MODULES = {
    "pickle": {"UnpicklingError", "dumps"}, "cloudpickle": set(), "dill": set(), "joblib": set(), "marshal": set(),
    "shelve": set(), "multiprocessing.connection": set(),
}  # fmt: skip
LOADERS = {"torch.load": "weights_only", "numpy.load": "allow_pickle", "np.load": "allow_pickle"}

EXCEPTIONS = {
    (
        "_compat/collectives.py",
        "_tensor_to_object",
    ): "what users send by their own object collectives in the uneven phase",
}


def found_in(source):
    """Names of what reads pickles in a source text."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                allowed = MODULES.get(node.module, {alias.name})
                if f"{node.module}.{alias.name}" in LOADERS:
                    yield f"{node.module}.{alias.name}"
                if alias.name in READING or alias.name not in allowed:
                    yield alias.name if alias.name in READING else f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                is_known = alias.asname is None or f"{alias.asname}.load" in LOADERS
                if MODULES.get(alias.name) == set() or (alias.name in {*MODULES, "torch", "numpy"} and not is_known):
                    yield alias.name
        elif isinstance(node, ast.Attribute):
            module = ast.unparse(node.value)
            if node.attr in READING - {"eval", "exec"}:  # `model.eval()` is another thing
                yield node.attr
            if node.attr not in MODULES.get(module, {node.attr}):
                yield f"{module}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in READING:
            yield node.id
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in LOADERS and not is_safe(node, LOADERS[name]):
                yield name


def is_safe(call, option):
    """Whether a call of a loader says that it does not read pickles."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    wanted = option == "weights_only"
    return option in given and getattr(given[option], "value", None) is wanted


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: "/".join(path.parts[-2:]))
def test_no_pickle_is_read(path):
    name = path.relative_to(PACKAGE).as_posix()
    unexplained = [what for what in found_in(path.read_text()) if (name, what) not in EXCEPTIONS]
    assert not unexplained, f"{name} reads pickles: {unexplained}. Send objects by distributed/exchange.py."


def test_every_exception_is_still_needed():
    for name, what in EXCEPTIONS:
        assert what in set(found_in((PACKAGE / name).read_text())), f"{name} does not use {what} any more"


@pytest.mark.parametrize(
    "source",
    [
        "dist.all_gather_object(gathered, value)",
        "from torch.distributed import broadcast_object_list",
        "import pickle\nvalue = pickle.loads(data)",
        "from pickle import load",
        "import dill",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "value = eval(text)",
        "gather = dist.gather_object",
        "import pickle as p",
        "from torch import load",
        "import torch as t",
    ],
)
def test_what_reads_pickles_would_be_found(source):
    assert list(found_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "from pickle import UnpicklingError",
        "data = pickle.dumps(value)",
        "torch.load(path, weights_only=True)",
        "numpy.load(path, allow_pickle=False)",
        "model.eval()",
        "gather_objects(value, group)",
    ],
)
def test_what_reads_none_is_not_mistaken_for_it(source):
    assert not list(found_in(source))
