"""The public names, and the order in which folders of the package import each other."""

import re

import lightning_ddp_ext
import lightning_ddp_ext.callbacks
from tests.support.programs import run_python
from tests.support.sources import PACKAGE, imports_of, sources, trees


def test_public_names_are_these():
    assert sorted(lightning_ddp_ext.__all__) == [
        "ActivationCheckpointingError", "BackendError", "BalancedDDPStrategy", "BalancedDataParallelStrategy",
        "BatchSplitError", "CheckedSLURMEnvironment", "CheckpointRefusedError", "ClassWeights", "ClusterError",
        "DDPCheckpointStrategy", "DDPExtError", "DDPJoinStrategy", "ExplicitDDPStrategy", "GradientReducer",
        "LoggedKeysError", "ManualEnvironment", "NetworkInterfaceError", "OtherRankError", "RankJoinedError",
        "RanksOutOfStepError", "RendezvousError", "ReplicaMismatchError", "TokenBudgetBatchSampler", "TokenCount",
        "UnevenInputsError", "UnsupportedFeatureError", "UnsynchronizedGradientsError", "__version__",
        "scatter_objects",
    ]  # fmt: skip
    assert lightning_ddp_ext.callbacks.__all__ == [
        "BalanceReport", "GradientCheck", "JoinReport", "PredictionWriter", "ReplicaConsistency", "read_predictions",
    ]  # fmt: skip
    for module in (lightning_ddp_ext, lightning_ddp_ext.callbacks):
        assert all(hasattr(module, name) for name in module.__all__)


IMPORTS = """
import sys
import lightning.fabric, lightning.pytorch

for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
    del sys.modules[name]  # which Lightning imports if it is installed
from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy, DDPCheckpointStrategy, DDPJoinStrategy
from lightning_ddp_ext.callbacks import BalanceReport, GradientCheck, JoinReport, PredictionWriter, ReplicaConsistency

strategy = DDPJoinStrategy()
lightning.pytorch.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)  # asks whether this is a sweep
print(sorted({name.partition(".")[0] for name in sys.modules} & {"hydra", "omegaconf", "rich"}))
"""


def test_strategies_and_callbacks_import_neither_hydra_nor_rich():
    assert run_python("-c", IMPORTS, cwd=PACKAGE.parent).stdout == "[]\n"


def test_no_kind_of_accelerator_is_a_special_case():
    special = re.compile(r"""torch\.cuda|["']cuda["']""")
    assert [path.name for path, text in sources().items() if special.search(text)] == []


def test_no_two_modules_have_one_name():
    names = [path.name for path in sources() if path.name != "__init__.py"]
    assert sorted(names) == sorted({*names})


UPSTREAM = ["lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics"]
PLAIN_TORCH = ["activation_checkpointing", "batches", "consistency", "distributed", "reducer"]
# A folder, or a module beside the folders, imports from those to its right only.
LAYERS = [
    "cli", "callbacks", "fabric", "strategies", "steps", "shares", "loaders", "resume", "replicas",
    "clusters", "activation_checkpointing", "reducer", "consistency", "distributed", "batches", "_compat",
]  # fmt: skip


def test_imports_follow_the_order_of_folders():
    found = []
    for path, tree in trees().items():
        place = path.with_suffix("")
        for name in imports_of(tree):
            package, folder, module = (*name.split("."), "", "")[:3]
            is_lightning = folder == "_lightning" or (folder == "_compat" and module.startswith("lightning"))
            is_upwards = {folder, place.parts[0]} <= {*LAYERS} and (LAYERS.index(folder) < LAYERS.index(place.parts[0]))
            is_private = package in UPSTREAM and any(part.startswith("_") for part in name.split("."))
            if (
                (place.parts[0] in PLAIN_TORCH and is_lightning)
                or (package == "lightning_ddp_ext" and is_upwards)
                or (place.parts[0] != "_compat" and is_private)
            ):
                found.append(f"{place} imports {name}")
    assert found == []
