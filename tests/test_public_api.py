"""The names people import, and which rooms of the package may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_ddp_ext
import lightning_ddp_ext.callbacks
import lightning_ddp_ext.testing

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
    assert sorted(lightning_ddp_ext.testing.__all__) == ["RankError", "RankTimeoutError", "run_processes"]
    for module in (lightning_ddp_ext, lightning_ddp_ext.callbacks, lightning_ddp_ext.testing):
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


def files_below(*rooms):
    return [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]


@pytest.mark.parametrize("path", files_below("data", "parallel", "network", "testing"), ids=lambda path: path.stem)
def test_the_rooms_for_plain_torch_know_nothing_of_lightning(path):
    forbidden = {"lightning", "lightning_ddp_ext._compat.lightning", "lightning_ddp_ext.integration"}
    for name in imports_of(path):
        assert name.split(".")[0] != "lightning"
        assert not any(name.startswith(f"{other}.") or name == other for other in forbidden)


LAYERS = ["cli", "callbacks", "strategies", "integration", "data", "network", "parallel", "_compat"]


@pytest.mark.parametrize("path", files_below(*LAYERS), ids=lambda path: "/".join(path.parts[-2:]))
def test_imports_point_downwards(path):
    own = LAYERS.index(path.relative_to(PACKAGE).parts[0])
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "lightning_ddp_ext" and len(parts) > 1 and parts[1] in LAYERS:
            assert LAYERS.index(parts[1]) >= own, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [p for p in files_below("") if "_compat" not in p.parts], ids=lambda p: p.stem)
def test_private_names_of_upstream_are_used_in_compat_only(path):
    upstream = ("lightning.", "torch.", "torchmetrics.")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(upstream):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not private, f"{path.name} imports {private} from {node.module}"
