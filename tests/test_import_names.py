"""Both import names of Lightning: two Trainers, one package, in one process and in processes of their own."""

import importlib
import inspect
import json
import linecache
import os
import pickle
import pkgutil
import shutil
import subprocess
import sys
import textwrap
import traceback
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import lightning_ddp_ext
from lightning_ddp_ext import _import_names
from lightning_ddp_ext.conf.schemas import choose_lightning, use_lightning

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.cpu_only("is about names")]

FIRST, SECOND = _import_names.PACKAGES
PACKAGE = Path(lightning_ddp_ext.__file__).parent
WITH_LIGHTNING = sorted(_import_names.modules_with_lightning())


def package_of(lightning):
    return importlib.import_module(_import_names.PACKAGES[lightning])


def all_modules():
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    names = (".".join(path.parts).removesuffix(".__init__") for path in paths)
    return sorted({*names} - {"__init__", "__main__", "pytorch_lightning"})


def train(lightning, strategy):
    """Train on two replicas by the Trainer of a Lightning; returns the Trainer and the parameters."""
    pl, demos = (importlib.import_module(name) for name in (lightning, f"{lightning}.demos.boring_classes"))
    torch.manual_seed(1)
    model = demos.BoringModel()
    trainer = pl.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_steps=4, limit_val_batches=0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model)
    return trainer, model.layer.weight.detach()


# ---------------------------------------------------------------- in one process


def test_both_trainers_train_alike_in_one_process():
    trained = []
    for lightning in (FIRST, SECOND):
        kind = package_of(lightning).BalancedDataParallelStrategy
        for strategy in ("balanced_dp", kind(split=[1, 3])):
            trainer, parameters = train(lightning, strategy)
            assert isinstance(trainer.strategy, kind)
            trained.append(parameters)
    assert torch.equal(trained[0], trained[2])
    assert torch.equal(trained[1], trained[3])
    assert package_of(FIRST).DDPJoinStrategy is not package_of(SECOND).DDPJoinStrategy
    for lightning in (FIRST, SECOND):
        registry = importlib.import_module(f"{lightning}.strategies").StrategyRegistry
        for name, kind in _import_names.STRATEGIES.items():
            assert type(registry.get(name)) is getattr(package_of(lightning), kind)


def make_objects(lightning):
    package = package_of(lightning)
    environment = package.ManualEnvironment(num_nodes=1, node_rank=0, main_address="node1")
    base = importlib.import_module(f"{package.__name__}.strategies.base")
    derived = type("Derived", (package.DDPJoinStrategy,), {})
    return [
        ("strategy", package.DDPJoinStrategy(), "DDPJoinStrategy"),
        ("strategy", package.BalancedDataParallelStrategy(), "BalancedDataParallelStrategy"),
        ("strategy", derived(), "DDPJoinStrategy"),
        ("strategy", base.ConnectedDDPStrategy(), "strategies.base.ConnectedDDPStrategy"),
        ("plugins", environment, "ManualEnvironment"),
        ("plugins", [environment], "ManualEnvironment"),
        ("callbacks", package.callbacks.JoinReport(), "callbacks.JoinReport"),
        ("callbacks", [package.callbacks.ReplicaConsistency()], "callbacks.ReplicaConsistency"),
    ]


@pytest.mark.parametrize(("ours", "theirs"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_an_object_for_the_other_trainer_is_refused_with_the_right_import(ours, theirs):
    options = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}
    for argument, value, public in make_objects(theirs):
        remedy = f"this is `{ours}.Trainer`. Use `{_import_names.PACKAGES[ours]}.{public}`."
        with pytest.raises(TypeError) as raised:
            importlib.import_module(ours).Trainer(**options, **{argument: value})
        assert str(raised.value).startswith(f"`{argument}` has a `")
        assert str(raised.value).endswith(remedy)
        importlib.import_module(theirs).Trainer(**options, **{argument: value})
        assert pkgutil.resolve_name(f"{_import_names.PACKAGES[ours]}.{public}") is not None


def test_a_strategy_of_fabric_for_a_trainer_and_the_reverse_are_refused_with_the_right_import():
    for name in (FIRST, SECOND):
        fabrics = importlib.import_module(_import_names._FABRICS[name])
        package, trainer = package_of(name), importlib.import_module(name).Trainer
        ours = _import_names.PACKAGES[name]
        for strategy, public in (
            (package.DDPJoinStrategy(), "DDPJoinStrategy"),
            (package.BalancedDataParallelStrategy(), "BalancedDDPStrategy"),
            (package.BalancedDataParallelStrategy, "BalancedDDPStrategy"),
            (package.ExplicitDDPStrategy(), "DDPCheckpointStrategy"),
        ):
            message = rf"made for `{name}\.Trainer`, and this is `\S+\.Fabric`\. Use `{ours}\.fabric\.{public}`"
            assert hasattr(package.fabric, public)
            with pytest.raises(TypeError, match=message):
                fabrics.Fabric(strategy=strategy, accelerator="cpu")
        for strategy in (package.fabric.DDPJoinStrategy(), package.fabric.DDPJoinStrategy):
            with pytest.raises(TypeError, match=rf"this is `{name}\.Trainer`\. Use `{ours}\.DDPJoinStrategy`"):
                trainer(strategy=strategy, accelerator="cpu", logger=False)
        for make, kind in ((trainer, package.DDPJoinStrategy), (fabrics.Fabric, package.fabric.DDPJoinStrategy)):
            with pytest.raises(TypeError, match=r"has the class `DDPJoinStrategy`. Pass an object: `DDPJoinStrategy\("):
                make(strategy=kind, accelerator="cpu")
        fabrics.Fabric(accelerator="cpu", strategy=package.fabric.DDPJoinStrategy(), devices=2)


def test_errors_and_what_needs_no_lightning_are_shared():
    second = package_of(SECOND)
    assert second.__all__ == lightning_ddp_ext.__all__
    for name in lightning_ddp_ext.__all__:
        ours, theirs = getattr(lightning_ddp_ext, name), getattr(second, name)
        needs = _import_names.PUBLIC.get(name) in WITH_LIGHTNING
        assert (ours is theirs) is not needs, name
    assert {*lightning_ddp_ext.__all__} <= {*dir(second)} & {*dir(lightning_ddp_ext)}
    trainer = importlib.import_module(SECOND).Trainer
    with pytest.raises(lightning_ddp_ext.UnsupportedFeatureError):
        trainer(strategy="balanced_dp", devices=2, accelerator="cpu", sync_batchnorm=True, logger=False)


def test_every_module_has_a_second_name():
    assert len(WITH_LIGHTNING) > 40
    assert {"strategies.ddp_join", "cli.train", "_compat.lightning"} <= {*WITH_LIGHTNING}
    assert not {"errors", "cli.main", "cli.settings", "reducer.gradient_reducer"} & {*WITH_LIGHTNING}
    for name in all_modules():
        ours, theirs = (importlib.import_module(f"{package}.{name}") for package in _import_names.PACKAGES.values())
        is_copied = name in WITH_LIGHTNING or hasattr(ours, "__path__")
        assert (theirs is not ours) == is_copied, name
        assert theirs.__file__ == ours.__file__, name
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("lightning_ddp_ext.pytorch_lightning.nonsense")


def test_nothing_of_the_first_name_is_left_in_a_second_copy():
    found = []
    for name in WITH_LIGHTNING:
        module = importlib.import_module(f"lightning_ddp_ext.pytorch_lightning.{name}")
        text = _import_names.translate_source(inspect.getsource(module))
        assert len(text.splitlines()) == len(Path(module.__file__).read_text().splitlines())
        objects = [value for value in vars(module).values() if isinstance(getattr(value, "__module__", None), str)]
        found += [(name, value) for value in objects if f"{value.__module__}.".startswith("lightning.")]
        first = [value.__module__ for value in objects if value.__module__.startswith("lightning_ddp_ext.")]
        found += [(name, one) for one in first if one.removeprefix("lightning_ddp_ext.") in WITH_LIGHTNING]
    assert found == []


def test_a_traceback_shows_the_file_and_the_line():
    kind = package_of(SECOND).BalancedDataParallelStrategy
    lines = []
    for package in _import_names.PACKAGES.values():
        with pytest.raises(ValueError, match="exclude each other") as raised:
            importlib.import_module(package).BalancedDataParallelStrategy(gpu0_batch_size=1, split=[1, 2])
        frames = traceback.extract_tb(raised.value.__traceback__)[1:]
        assert all(Path(frame.filename).is_relative_to(PACKAGE) for frame in frames)
        assert all(linecache.getline(frame.filename, frame.lineno).strip() == frame.line for frame in frames)
        lines.append([(frame.filename, frame.lineno) for frame in frames])
    assert lines[0] == lines[1]
    assert len(lines[0]) > 1
    assert inspect.getsource(kind) == inspect.getsource(lightning_ddp_ext.BalancedDataParallelStrategy)


def test_objects_of_both_packages_are_pickled_by_their_module():
    for lightning in (FIRST, SECOND):
        package = package_of(lightning)
        for kind in (package.DDPJoinStrategy, package.ManualEnvironment, package.callbacks.JoinReport):
            assert pickle.loads(pickle.dumps(kind)) is kind
        report = pickle.loads(pickle.dumps(package.callbacks.JoinReport()))
        assert type(report) is package.callbacks.JoinReport


# ---------------------------------------------------------------- names in configurations

NAMES = {
    "lightning.pytorch.Trainer": "pytorch_lightning.Trainer",
    "lightning.fabric.plugins.CheckpointIO": "lightning_fabric.plugins.CheckpointIO",
    "lightning_ddp_ext.DDPJoinStrategy": "lightning_ddp_ext.pytorch_lightning.DDPJoinStrategy",
    "lightning_ddp_ext.callbacks.JoinReport": "lightning_ddp_ext.pytorch_lightning.callbacks.JoinReport",
    "lightning_ddp_ext.demo.digits.DigitsCNN": "lightning_ddp_ext.pytorch_lightning.demo.digits.DigitsCNN",
}
SAME = ["lightning_ddp_ext.GradientReducer", "my.lightning.pytorch.Net", "lightning", "cpu", "my.pytorch_lightning.Net"]


def test_paths_in_a_configuration_get_the_name_of_the_run():
    config = {"list": [*NAMES], "values": dict(enumerate([*NAMES.values(), *SAME])), "seed": 1, "link": "${seed}"}
    for lightning, expected in ((FIRST, [*NAMES]), (SECOND, [*NAMES.values()])):
        node = OmegaConf.create(config)
        use_lightning(lightning, node)
        assert node.list == expected
        assert list(node["values"].values()) == expected + SAME
        assert (node.seed, node.link) == (1, 1)
    for path in NAMES.items():
        assert pkgutil.resolve_name(path[0]) is not pkgutil.resolve_name(path[1])


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


def run(program, *arguments, limit=280, **options):
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **options.pop("env", {})}
    done = subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=limit,
        env=environment,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPORTS = """
import importlib
for statement in {statements}:
    try:
        exec(statement)
        print("ok")
    except ImportError as error:
        print(error)
import lightning_ddp_ext
print(getattr(lightning_ddp_ext, "DDPJoinStrategy", None), "lightning" in sys.modules)
"""
STATEMENTS = [
    "from lightning_ddp_ext import DDPExtError",
    "from lightning_ddp_ext import DDPJoinStrategy",
    "from lightning_ddp_ext.callbacks import JoinReport",
    "from lightning_ddp_ext.pytorch_lightning import DDPJoinStrategy",
    "from lightning_ddp_ext.pytorch_lightning.callbacks import JoinReport",
]


@pytest.mark.slow
def test_an_import_without_its_lightning_says_what_to_install():
    def messages(*missing):
        program = WITHOUT.format(missing=set(missing)) + IMPORTS.format(statements=STATEMENTS)
        return run(["-c", program]).splitlines()

    neither = messages(*_import_names.LIBRARIES)
    assert neither[0] == "ok"
    for line, lightning in zip(neither[1:5], (FIRST, FIRST, SECOND, SECOND), strict=True):
        assert line.startswith(f"`{_import_names.PACKAGES[lightning]}.")
        assert "needs Lightning, and neither `" in line
        assert "`pip install lightning`" in line
        assert "`pip install pytorch-lightning`" in line
    assert neither[5] == "None False"
    without = messages("lightning")
    for line in without[1:3]:
        assert "is for programs that import `lightning.pytorch`, which is not installed. Import from" in line
        assert "`lightning_ddp_ext.pytorch_lightning` instead" in line
    assert [without[0], *without[3:]] == ["ok", "ok", "ok", "None False"]
    without = messages("pytorch_lightning", "lightning_fabric")
    assert without[:3] == ["ok", "ok", "ok"]
    for line in without[3:5]:
        assert "is for programs that import `pytorch_lightning`, which is not installed. Import from" in line
        assert "`lightning_ddp_ext` instead" in line


def test_the_command_without_lightning_says_what_to_install():
    program = (
        f"{WITHOUT.format(missing=set(_import_names.LIBRARIES))}\nfrom lightning_ddp_ext.__main__ import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("lightning-ddp-ext: `lightning_ddp_ext` needs Lightning, and neither `lightning` nor")
    assert done.stderr.count("\n") == 1


def test_the_version_report_needs_nothing_that_works(tmp_path):
    for name in ("torch", "lightning", "pytorch_lightning", "hydra", "torchmetrics"):
        (tmp_path / f"{name}.py").write_text("raise OSError('libcudart.so.12 is missing')")
    lines = run(["-m", "lightning_ddp_ext", "--version"]).splitlines()
    assert lines[0] == f"lightning-ddp-ext {lightning_ddp_ext.__version__}"
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}." in lines[1]
    assert [line.split(" ")[0] for line in lines[2:6]] == ["torch", "lightning", "pytorch-lightning", "torchmetrics"]
    assert lines[-3].startswith(f"torch {torch.__version__} is built for ")
    assert lines[-1].startswith("backends: gloo")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    broken = run(["-m", "lightning_ddp_ext", "--version"], env={"PYTHONPATH": path}).splitlines()
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
        assert isinstance(trainer.strategy, ({package}.DDPJoinStrategy, {package}.BalancedDataParallelStrategy))
        with open(f"{{__name__}}{{trainer.global_rank}}.json", "w") as file:
            loss = float(trainer.callback_metrics["loss_epoch"])
            json.dump([sorted(roots), loss, pl_module.layer.weight.tolist(), pl_module.seen], file)


def main(method):
    torch.manual_seed(1)
    model, data = Net(), RandomDataset(32, 21)
    is_name = method in ("ddp_join", "balanced_dp")
    reports = [] if method == "balanced_dp" else [{package}.callbacks.JoinReport()]
    trainer = pl.Trainer(
        strategy=method if is_name else {package}.DDPJoinStrategy(start_method=method), devices=2,
        callbacks=[Imported(), *reports], accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4))
"""
START = """
import importlib
import sys

method, imported, *programs = sys.argv[1:]
for name in imported.split():
    importlib.import_module(name)
modules = [importlib.import_module(program) for program in programs]
if __name__ == "__main__":
    for module in modules:
        module.main(method)
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
PROGRAMS = {"first": FIRST, "second": SECOND}


def run_programs(folder, launcher, method, *programs, imports=""):
    """Train in one process by the programs of some names; returns for each what its ranks have written."""
    folder.mkdir()
    (folder / "start.py").write_text(START)
    for program, lightning in PROGRAMS.items():
        names = {"package": _import_names.PACKAGES[lightning], "lightning": lightning}
        (folder / f"{program}.py").write_text(PROGRAM.format(**names, libraries={*_import_names.LIBRARIES}))
    run([*launcher, "start.py", method, imports, *programs], cwd=folder)
    return [[json.loads(path.read_text()) for path in sorted(folder.glob(f"{one}*.json"))] for one in programs]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["ddp_join", "torchrun", "spawn", "fork", "forkserver"])
def test_ranks_import_the_lightning_of_the_program_only_and_train_alike(method, tmp_path):
    launcher, given = (TORCHRUN, "ddp_join") if method == "torchrun" else ([], method)
    (first,) = run_programs(tmp_path / "1", launcher, given, "first")
    (second,) = run_programs(tmp_path / "2", launcher, given, "second")
    assert [rank[0] for rank in first] == [["lightning"]] * 2
    assert [rank[0] for rank in second] == [["lightning_fabric", "pytorch_lightning"]] * 2
    assert [rank[3] for rank in first] == [22, 20]
    assert first[0][1:3] == first[1][1:3]
    both = run_programs(tmp_path / "both", launcher, given, "first", "second")
    for ranks in (second, *both):
        assert [rank[1:] for rank in ranks] == [rank[1:] for rank in first]


ORDERS = [
    ("lightning_ddp_ext", FIRST, SECOND), ("lightning_ddp_ext", SECOND, FIRST), (FIRST, "lightning_ddp_ext", SECOND),
    (SECOND, "lightning_ddp_ext", FIRST), (FIRST, SECOND, "lightning_ddp_ext"),
    ("lightning_ddp_ext.pytorch_lightning", FIRST, SECOND),
    ("lightning_ddp_ext.pytorch_lightning.callbacks", "lightning_ddp_ext.callbacks"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_both_names_train_alike_in_one_process_whatever_is_imported_first(order, tmp_path):
    first, second = run_programs(tmp_path / "both", [], "balanced_dp", "first", "second", imports=" ".join(order))
    assert first == second != []


@pytest.mark.slow
def test_the_package_works_in_a_zip_file(tmp_path):
    shutil.make_archive(str(tmp_path / "package"), "zip", PACKAGE.parent, PACKAGE.name)
    program = textwrap.dedent("""
        import traceback
        from lightning_ddp_ext.pytorch_lightning import BalancedDataParallelStrategy
        import pytorch_lightning
        print(BalancedDataParallelStrategy.__module__)
        assert issubclass(BalancedDataParallelStrategy, pytorch_lightning.strategies.Strategy)
        try:
            BalancedDataParallelStrategy(gpu0_batch_size=1, split=[1, 2])
        except ValueError as error:
            print(traceback.extract_tb(error.__traceback__)[-1].line)
    """)
    printed = run(["-c", program], env={"PYTHONPATH": str(tmp_path / "package.zip")}, cwd=tmp_path).splitlines()
    assert printed[0] == "lightning_ddp_ext.pytorch_lightning.strategies.balanced_dp"
    assert printed[1].startswith("raise ValueError(")


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
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--cache-dir={tmp_path}/cache"]
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [*command, "typed.py", "mistyped.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    errors = [line for line in done.stdout.splitlines() if "typed.py" in line and ": error: " in line]
    assert [int(line.split(":")[1]) for line in errors if line.startswith("mistyped.py")] == [4, 7, 8, 9, 10]
    assert [line for line in errors if line.startswith("typed.py")] == []
