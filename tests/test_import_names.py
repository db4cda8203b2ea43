"""Both import names of Lightning: a process uses one, whichever the program imports."""

import ast
import importlib
import json
import os
import sys

import pytest
import torch
from omegaconf import OmegaConf

import lightning_ddp_ext
from lightning_ddp_ext import callbacks, fabric
from lightning_ddp_ext._import_names import DISTRIBUTIONS, FABRICS, FIRST, LIBRARIES, SECOND
from lightning_ddp_ext.conf.schemas import choose_lightning, use_lightning
from tests.support.programs import run_python
from tests.support.sources import PACKAGE, imports_of, trees

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.cpu_only("is about names")]


def run(*arguments, env=None, **options):
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return run_python(*arguments, env={"PYTHONPATH": path, **(env or {})}, **options)


# ---------------------------------------------------------------- one list of names, twice


def test_both_lists_of_names_are_alike_and_no_other_module_imports_lightning():
    importing = set()
    for path, tree in trees().items():
        if {name.partition(".")[0] for name in imports_of(tree)} & LIBRARIES:
            importing.add(path.name)
            (choice,) = (node for node in tree.body if isinstance(node, ast.If))
            firsts, seconds = ("\n".join(map(ast.unparse, part)) for part in (choice.body, choice.orelse))
            assert firsts.replace(FIRST, SECOND).replace(FABRICS[FIRST], FABRICS[SECOND]) == seconds
    assert importing == {"_lightning.py", "lightning_names.py"}


# ---------------------------------------------------------------- refusals

TRAINER = "from {0} import Trainer\nTrainer(accelerator='cpu', devices=2, logger=False, strategy={1})"
JOIN, JOIN_OF_SECOND = (f"from lightning_ddp_ext{name} import DDPJoinStrategy" for name in ("", ".pytorch_lightning"))
AFTER = "Import `{}` before anything else of `lightning_ddp_ext`; a process uses one of Lightning's two names."
OTHERS = {
    "sorted imports": (
        f"{JOIN}\n{TRAINER.format(SECOND, 'DDPJoinStrategy()')}",
        f"TypeError: `strategy` has a `DDPJoinStrategy` for `{FIRST}`, and this is `pytorch_lightning.Trainer`."
        f" {AFTER.format('lightning_ddp_ext.pytorch_lightning')}",
    ),
    "the second first": (
        f"import {SECOND}\n{JOIN}\n{TRAINER.format(FIRST, 'DDPJoinStrategy()')}",
        f"TypeError: `strategy` has a `DDPJoinStrategy` for `{SECOND}`, and this is `lightning.pytorch.Trainer`."
        f" {AFTER.format(FIRST)}",
    ),
    "a name": (
        f"{JOIN_OF_SECOND}\n{TRAINER.format(FIRST, repr('ddp_join'))}",
        f"ImportError: `lightning_ddp_ext` already works for `{SECOND}` in this process. {AFTER.format(FIRST)}",
    ),
    "both modules": (
        f"{JOIN}\n{JOIN_OF_SECOND}",
        f"ImportError: `lightning_ddp_ext` already works for `{FIRST}` in this process."
        f" {AFTER.format('lightning_ddp_ext.pytorch_lightning')}",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_the_other_lightning_is_refused_with_a_remedy(case):
    program, expected = OTHERS[case]
    done = run("-W", "ignore", "-c", program, code=1)
    assert done.stderr.strip().splitlines()[-1] == expected


def test_a_strategy_of_fabric_for_a_trainer_and_the_reverse_are_refused_with_the_right_import():
    trainer, own_fabric = importlib.import_module(FIRST).Trainer, importlib.import_module(FABRICS[FIRST]).Fabric
    for strategy, public in (
        (lightning_ddp_ext.DDPJoinStrategy(), "DDPJoinStrategy"),
        (lightning_ddp_ext.BalancedDataParallelStrategy, "BalancedDDPStrategy"),
        (lightning_ddp_ext.ExplicitDDPStrategy(), "DDPCheckpointStrategy"),
    ):
        message = rf"made for `\S+\.Trainer`, and this is `\S+\.Fabric`\. Use `lightning_ddp_ext\.fabric\.{public}`"
        assert hasattr(fabric, public)
        with pytest.raises(TypeError, match=message):
            own_fabric(strategy=strategy, accelerator="cpu")
    with pytest.raises(TypeError, match=r"this is `\S+\.Trainer`\. Use `lightning_ddp_ext\.DDPJoinStrategy`"):
        trainer(strategy=fabric.DDPJoinStrategy(), accelerator="cpu", logger=False)
    for make, kind in ((trainer, lightning_ddp_ext.DDPJoinStrategy), (own_fabric, fabric.DDPJoinStrategy)):
        with pytest.raises(TypeError, match=r"has the class `DDPJoinStrategy`. Pass an object: `DDPJoinStrategy\("):
            make(strategy=kind, accelerator="cpu")
    with pytest.raises(TypeError, match="has the class `JoinReport`"):
        trainer(callbacks=[callbacks.JoinReport], accelerator="cpu", logger=False)
    own_fabric(accelerator="cpu", strategy=fabric.DDPJoinStrategy(), devices=2)


# ---------------------------------------------------------------- names in configurations

NAMES = {
    "lightning.pytorch.Trainer": "pytorch_lightning.Trainer",
    "lightning.fabric.plugins.CheckpointIO": "lightning_fabric.plugins.CheckpointIO",
}
SAME = ["lightning_ddp_ext.DDPJoinStrategy", "my.lightning.pytorch.Net", "lightning", "cpu", "my.pytorch_lightning.Net"]


def test_paths_in_a_configuration_get_the_name_of_the_run():
    config = {"list": [*NAMES], "values": dict(enumerate([*NAMES.values(), *SAME])), "seed": 1, "link": "${seed}"}
    for lightning, expected in ((FIRST, [*NAMES]), (SECOND, [*NAMES.values()])):
        node = OmegaConf.create(config)
        use_lightning(lightning, node)
        assert node.list == expected
        assert list(node["values"].values()) == expected + SAME
        assert (node.seed, node.link) == (1, 1)


def test_the_command_follows_the_class_of_the_model():
    def choose(target, lightning=None):
        return choose_lightning(OmegaConf.create({"lightning": lightning, "model": {"_target_": target}}))

    assert choose("pytorch_lightning.demos.boring_classes.BoringModel") == SECOND
    assert choose("lightning.pytorch.demos.boring_classes.BoringModel") == FIRST
    assert choose("lightning.pytorch.demos.boring_classes.BoringModel", SECOND) == SECOND
    assert choose("lightning_ddp_ext.demo.digits.DigitsCNN") == FIRST
    assert choose("nowhere.Net") == choose("os.getcwd") == choose("???") == FIRST
    with pytest.raises(ValueError, match="`lightning` must be one of "):
        choose("os.getcwd", "lightning")


# ---------------------------------------------------------------- in processes of their own

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        missing = {missing}
        return None if fullname.partition(".")[0] in missing else super().find_spec(fullname, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


IMPORTS = """
import lightning_ddp_ext
from lightning_ddp_ext import DDPExtError, GradientReducer
for statement in {statements}:
    try:
        exec(statement)
        print("ok")
    except ImportError as error:
        print(error)
"""
STATEMENTS = [
    "from lightning_ddp_ext import DDPJoinStrategy",
    "from lightning_ddp_ext.callbacks import JoinReport",
    "from lightning_ddp_ext.pytorch_lightning.callbacks import JoinReport",
]


@pytest.mark.slow
def test_an_import_without_lightning_says_what_to_install():
    def messages(*missing):
        program = WITHOUT.format(missing=set(missing)) + IMPORTS.format(statements=STATEMENTS)
        return run("-c", program).stdout.splitlines()

    message = "`lightning_ddp_ext` needs Lightning, and neither `{}` nor `{}` is installed. Run `pip install {}` or"
    neither = messages(*LIBRARIES)
    assert all(line.startswith(message.format(*DISTRIBUTIONS.values(), "lightning")) for line in neither)
    assert len(neither) == 3
    assert messages("lightning") == ["ok", "ok", "ok"]
    *firsts, second = messages("pytorch_lightning", "lightning_fabric")
    assert firsts == ["ok", "ok"]
    assert second.startswith(f"`lightning_ddp_ext` already works for `{FIRST}`")
    missing = WITHOUT.format(missing={"pytorch_lightning", "lightning_fabric"})
    (line,) = run("-c", missing + IMPORTS.format(statements=STATEMENTS[2:])).stdout.splitlines()
    assert line.startswith("`pytorch_lightning` is not installed. Run `pip install pytorch-lightning`, or import from")


def test_the_command_without_lightning_says_what_to_install():
    program = f"{WITHOUT.format(missing=set(LIBRARIES))}\nfrom lightning_ddp_ext.__main__ import main\nmain()"
    done = run("-c", program, code=1)
    assert done.stdout == ""
    assert done.stderr.startswith("lightning-ddp-ext: `lightning_ddp_ext` needs Lightning, and neither `lightning` nor")
    assert done.stderr.count("\n") == 1


def test_the_version_report_needs_nothing_that_works(tmp_path):
    for name in ("torch", "lightning", "pytorch_lightning", "hydra", "torchmetrics"):
        (tmp_path / f"{name}.py").write_text("raise OSError('libcudart.so.12 is missing')")
    lines = run("-m", "lightning_ddp_ext", "--version").stdout.splitlines()
    assert lines[0] == f"lightning-ddp-ext {lightning_ddp_ext.__version__}"
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}." in lines[1]
    assert [line.split(" ")[0] for line in lines[2:6]] == ["torch", "lightning", "pytorch-lightning", "torchmetrics"]
    assert lines[-3].startswith(f"torch {torch.__version__} is built for ")
    assert lines[-1].startswith("backends: gloo")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    broken = run("-m", "lightning_ddp_ext", "--version", env={"PYTHONPATH": path}).stdout.splitlines()
    assert broken[: len(lines) - 3] == lines[:-3]
    assert broken[len(lines) - 3 :] == ["torch cannot be used: OSError: libcudart.so.12 is missing"]


PROGRAM = """
import json
import sys

import torch
from torch.utils.data import DataLoader

import {package}
import {lightning} as pl
from {lightning}.demos.boring_classes import BoringModel, RandomDataset


class Net(BoringModel):
    seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += len(batch)
        loss = self.step(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


class Imported(pl.Callback):
    def on_train_end(self, trainer, pl_module):
        roots = {{name.partition(".")[0] for name in sys.modules}} & {libraries}
        assert isinstance(trainer.strategy, {package}.DDPJoinStrategy)
        with open(f"{{__name__}}{{trainer.global_rank}}.json", "w") as file:
            loss = float(trainer.callback_metrics["loss_epoch"])
            json.dump([sorted(roots), loss, pl_module.layer.weight.tolist(), pl_module.seen], file)


def main(method):
    torch.manual_seed(1)
    model, data = Net(), RandomDataset(32, 21)
    trainer = pl.Trainer(
        strategy=method if method == "ddp_join" else {package}.DDPJoinStrategy(start_method=method), devices=2,
        callbacks=[Imported(), {package}.callbacks.JoinReport()], accelerator="cpu", max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
"""
# How ranks start, which strategy, and the modules that the program imports before the others.
STARTS = {
    "ddp_join": ("ddp_join", "lightning_ddp_ext"), "forkserver": ("forkserver", ""),
}  # fmt: skip


def train(folder, lightning, start):
    """Train in a process by the program of a name; return what its ranks have written."""
    folder.mkdir()
    package = "lightning_ddp_ext" if lightning == FIRST else "lightning_ddp_ext.pytorch_lightning"
    program = PROGRAM.format(package=package, lightning=lightning, libraries={*LIBRARIES})
    (folder / "program.py").write_text(program)
    method, imported = STARTS[start]
    begin = f"import importlib, sys\nfor name in {imported.split()!r}:\n    importlib.import_module(name)\n"
    (folder / "start.py").write_text(f"{begin}import program\nif __name__ == '__main__':\n    program.main({method!r})")
    run("start.py", cwd=folder)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("program*.json"))]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", STARTS)
def test_ranks_import_the_lightning_of_the_program_only_and_train_alike(start, tmp_path):
    first, second = (train(tmp_path / name, name, start) for name in (FIRST, SECOND))
    assert all(rank[0] == ["lightning"] for rank in first)
    assert all(rank[0] == ["lightning_fabric", "pytorch_lightning"] for rank in second)
    assert [rank[1:] for rank in first] == [rank[1:] for rank in second] != []
    assert [rank[3] for rank in first] == [22, 20]
    assert first[0][1:3] == first[1][1:3]


TYPED = """
import pytorch_lightning
from lightning_ddp_ext import UnsupportedFeatureError
from lightning_ddp_ext.pytorch_lightning import DDPJoinStrategy, DDPExtError, ManualEnvironment, callbacks
from lightning_ddp_ext.pytorch_lightning.callbacks import JoinReport

strategy = DDPJoinStrategy(uneven_inputs="stop")
environment = ManualEnvironment(num_nodes=1, node_rank=0, main_address="node1")
reports: list[pytorch_lightning.Callback] = [JoinReport(), callbacks.GradientCheck()]
trainer = pytorch_lightning.Trainer(strategy=strategy, plugins=[environment], callbacks=reports)
shadow: bool = strategy.is_shadow
error: DDPExtError = UnsupportedFeatureError("")
"""
MISTYPED = """
import lightning_ddp_ext
import pytorch_lightning
from lightning_ddp_ext.pytorch_lightning import Nonsense
from lightning_ddp_ext.pytorch_lightning.callbacks import JoinReport

strategy = lightning_ddp_ext.pytorch_lightning.DDPJoinStrategy(uneven_inputs=1)
trainer = pytorch_lightning.Trainer(strategy=lightning_ddp_ext.DDPJoinStrategy())
callback: int = JoinReport()
lightning_ddp_ext.nonsense
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_classes_of_both_packages(tmp_path):
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mistyped.py").write_text(MISTYPED)
    options = ["--strict", "--no-error-summary", f"--cache-dir={tmp_path}/cache"]
    environment = {"MYPYPATH": str(PACKAGE.parent)}
    done = run("-m", "mypy", *options, "typed.py", "mistyped.py", code=1, cwd=tmp_path, env=environment)
    errors = [line for line in done.stdout.splitlines() if "typed.py" in line and ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors if line.startswith("mistyped.py")] == [4, 7, 8, 9, 10]
    assert [line for line in errors if line.startswith("typed.py")] == []
