"""The names people import, and which rooms of the package may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_ddp_ext
import lightning_ddp_ext.callbacks

PACKAGE = Path(lightning_ddp_ext.__file__).parent


def test_public_names_are_these():
    assert sorted(lightning_ddp_ext.__all__) == [
        "ActivationCheckpointingError",
        "BackendError",
        "BalancedDataParallelStrategy",
        "BatchSplitError",
        "CheckedSLURMEnvironment",
        "CheckpointRefusedError",
        "ClusterError",
        "DDPCheckpointStrategy",
        "DDPExtError",
        "DDPJoinStrategy",
        "ExplicitDDPStrategy",
        "GradientReducer",
        "LoggedKeysError",
        "ManualEnvironment",
        "NetworkInterfaceError",
        "OtherRankError",
        "RankJoinedError",
        "RanksOutOfStepError",
        "RendezvousError",
        "ReplicaMismatchError",
        "UnevenInputsError",
        "UnsupportedFeatureError",
        "UnsynchronizedGradientsError",
        "__version__",
    ]
    assert lightning_ddp_ext.callbacks.__all__ == ["BalanceReport", "GradientCheck", "JoinReport", "ReplicaConsistency"]
    for module in (lightning_ddp_ext, lightning_ddp_ext.callbacks):
        assert all(hasattr(module, name) for name in module.__all__)


def test_importing_registers_the_strategies():
    assert StrategyRegistry["balanced_dp"]["strategy"] is lightning_ddp_ext.BalancedDataParallelStrategy
    assert StrategyRegistry["ddp_checkpoint"]["strategy"] is lightning_ddp_ext.DDPCheckpointStrategy
    assert StrategyRegistry["ddp_join"]["strategy"] is lightning_ddp_ext.DDPJoinStrategy
    assert issubclass(lightning_ddp_ext.BalancedDataParallelStrategy, Strategy)


@pytest.mark.parametrize(
    "program",
    [
        "import lightning_ddp_ext, lightning.pytorch as pl",
        pytest.param("import lightning.pytorch as pl, lightning_ddp_ext", marks=pytest.mark.slow),
        pytest.param(
            "import lightning_ddp_ext.strategies, lightning_ddp_ext, lightning.pytorch as pl", marks=pytest.mark.slow
        ),
    ],
)
def test_the_order_of_imports_does_not_matter(program):
    check = (
        'print(type(pl.Trainer(strategy="balanced_dp", accelerator="cpu", devices=2, logger=False).strategy).__name__)'
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{check}"], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "BalancedDataParallelStrategy"


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


PLAIN_TORCH = ["activation_checkpointing", "batches", "consistency", "distributed", "reducer"]
# A folder imports from folders to its right only.
LAYERS = [
    "cli", "callbacks", "strategies", "join", "resume", "ranks", "replicas", "clusters", "activation_checkpointing",
    "reducer", "consistency", "distributed", "batches", "_compat",
]  # fmt: skip


def modules():
    return [(path.relative_to(PACKAGE), list(imports_of(path))) for path in sorted(PACKAGE.rglob("*.py"))]


def test_folders_of_plain_torch_never_import_lightning():
    forbidden = ("lightning", "lightning_ddp_ext._compat.lightning", "lightning_ddp_ext._compat.loops")
    found = [
        f"{path} imports {name}"
        for path, names in modules()
        for name in names
        if path.parts[0] in PLAIN_TORCH and (name.split(".")[0] == "lightning" or name.startswith(forbidden[1:]))
    ]
    assert not found


def test_imports_point_to_lower_layers():
    found = []
    for path, names in modules():
        for name in names:
            package, folder = (*name.split("."), "")[:2]
            if package == "lightning_ddp_ext" and {folder, path.parts[0]} <= {*LAYERS}:
                found += [f"{path} imports {name}"] if LAYERS.index(folder) < LAYERS.index(path.parts[0]) else []
    assert not found


def test_private_names_of_upstream_are_used_in_compat_only():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("lightning.", "torch.", "torchmetrics.")
            ):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                found += [f"{path} imports {private}"] if private and "_compat" not in path.parts else []
    assert not found
