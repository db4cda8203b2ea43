"""Nothing in the package reads a pickle, which would run code, except where a reason is given here."""

import ast

from tests.support.sources import trees

# Names that read pickles, or run text as code.
READERS = {
    "Unpickler", "_tensor_to_object", "all_gather_object", "broadcast_object_list", "eval", "exec", "gather_object",
    "recv_object_list", "scatter_object_list", "send_object_list",
}  # fmt: skip
# Names that may be used of modules that read pickles.
MODULES = {
    "pickle": {"UnpicklingError", "dumps"}, "cloudpickle": set(), "dill": set(), "joblib": set(), "marshal": set(),
    "shelve": set(), "multiprocessing.connection": set(),
}  # fmt: skip
SAFE_OPTIONS = {
    "torch.load": ("weights_only", True), "numpy.load": ("allow_pickle", False), "np.load": ("allow_pickle", False)
}  # fmt: skip

OF_A_FORK = "results of forks of this process, through pipes that no other process can open"
EXCEPTIONS = {
    "verification/processes.py: multiprocessing.connection.Connection": OF_A_FORK,
    "verification/processes.py: multiprocessing.connection.wait": OF_A_FORK,
    "verification/processes.py: pickle.loads": OF_A_FORK,
    "conf/schemas.py: eval": "annotations and defaults in sources of this package and of Lightning, as an import does",
    "_compat/torch.py: _tensor_to_object": "object collectives that users call in the uneven phase",
}


def find_readers(tree):
    """Find the names of everything in a module that reads pickles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if alias.name in READERS:
                    yield alias.name
                elif name in SAFE_OPTIONS or alias.name not in MODULES.get(node.module, {alias.name}):
                    yield name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                is_renamed = alias.asname is not None and f"{alias.asname}.load" not in SAFE_OPTIONS
                if MODULES.get(alias.name) == set() or (is_renamed and alias.name in {*MODULES, "torch", "numpy"}):
                    yield alias.name
        elif isinstance(node, ast.Attribute):
            module = ast.unparse(node.value)
            if node.attr in READERS - {"eval", "exec"}:  # `model.eval()` is something else
                yield node.attr
            if node.attr not in MODULES.get(module, {node.attr}):
                yield f"{module}.{node.attr}"
        elif isinstance(node, ast.Name) and node.id in READERS:
            yield node.id
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SAFE_OPTIONS:
            option, safe = SAFE_OPTIONS[ast.unparse(node.func)]
            given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            if given.get(option) is not safe:
                yield ast.unparse(node.func)


def test_no_pickle_is_read():
    found = {f"{path}: {name}" for path, tree in trees().items() for name in find_readers(tree)}
    assert sorted(found - EXCEPTIONS.keys()) == [], "send tensors and plain data, see distributed/exchange.py"
    assert sorted(EXCEPTIONS.keys() - found) == [], "these exceptions are not needed any more"


def test_readers_of_pickles_are_found():
    readers = [
        "dist.all_gather_object(gathered, value)", "from torch.distributed import broadcast_object_list",
        "import pickle\nvalue = pickle.loads(data)", "from pickle import load", "import dill", "torch.load(path)",
        "torch.load(path, weights_only=False)", "numpy.load(path, allow_pickle=True)", "value = eval(text)",
        "gather = dist.gather_object", "import pickle as p", "from torch import load", "import torch as t",
    ]  # fmt: skip
    others = [
        "from pickle import UnpicklingError", "data = pickle.dumps(value)", "torch.load(path, weights_only=True)",
        "numpy.load(path, allow_pickle=False)", "model.eval()", "gather_objects(value, group)",
    ]  # fmt: skip
    assert [source for source in readers if not list(find_readers(ast.parse(source)))] == []
    assert [source for source in others if list(find_readers(ast.parse(source)))] == []
