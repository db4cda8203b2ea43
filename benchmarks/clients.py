"""Published applications, unchanged, under each strategy.

Each application trains a small model on data that is made here. Runs differ in `strategy` and `devices` of the Trainer,
and in the batch size where each rank has a loader of its own. The table compares parameters with the application's run
in one process on the whole batches, relative to how far they have moved, and ranks bit by bit after every step. The
last batch has a single sample, so that some ranks have none, except under `ddp_checkpoint`.

Run it with `python benchmarks/clients.py [NAME ...]`; all take 20 minutes. Applications are installed from PyPI, each
into an environment on top of this one, about 300 MB in `~/.cache/lightning_ddp_ext/clients`. Some need other versions
of Python or torch, whose environments `make versions` builds.
"""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `tests`

from measuring.command import start_parser  # noqa: E402

from tests.support.processes import RankError, RankTimeoutError, run_processes  # noqa: E402
from tests.versions import run as versions  # noqa: E402

CACHE = Path.home() / ".cache" / "lightning_ddp_ext" / "clients"
FIRST, SECOND = "lightning.pytorch", "pytorch_lightning"
GLOBAL_BATCH, EPOCHS, LIMIT = 12, 2, 300
LAUNCHED = {"TORCHELASTIC_RUN_ID": "clients", "GROUP_RANK": "0"}  # as torchrun does
LARGEST_DIFFERENCE = 1e-5  # Adam raises the rounding of float32, in which chemprop and gluonts train
EVEN, UNEVEN = 36, 37  # samples: the last one is a batch of its own


@dataclass(frozen=True)
class Run:
    """How an application is trained: the strategy, its processes and devices, and the samples."""

    strategy: str
    processes: int
    devices: int
    samples: int
    divides: int = 1  # among so many ranks the application divides its batch size itself

    @property
    def batch_size(self) -> int:
        """The batch size of the application's loader."""
        return GLOBAL_BATCH // self.divides


def in_one_process(run: Run, is_shuffled: bool) -> Run:
    """Return the run in one process with the same batches.

    Lightning shuffles for `ddp`, also in one process, and `balanced_ddp` draws other permutations than one device does.
    """
    strategy = "ddp_find_unused_parameters_true" if run.divides > 1 else "auto"
    return Run("balanced_ddp" if is_shuffled and run.strategy == "balanced_ddp" else strategy, 1, 1, run.samples)


RUNS = [
    Run("balanced_dp", 1, 2, UNEVEN),
    Run("ddp_checkpoint", 2, 2, EVEN, divides=2),
    Run("ddp_join", 2, 2, UNEVEN, divides=2),
    Run("balanced_ddp", 2, 2, UNEVEN),
    Run("balanced_ddp", 3, 3, UNEVEN),
]


STRATEGIES = {
    "balanced_dp": "BalancedDataParallelStrategy",
    "ddp_checkpoint": "DDPCheckpointStrategy",
    "ddp_join": "DDPJoinStrategy",
    "balanced_ddp": "BalancedDDPStrategy",
}

# ---------------------------------------------------------------- applications
# Each trains a model on `run.samples` samples, in their order, with the given arguments of a Trainer.


def train_darts(run: Run, options: dict[str, Any]) -> None:
    """Train N-BEATS on windows of a series."""
    import numpy
    from darts import TimeSeries
    from darts.models import NBEATSModel

    series = TimeSeries.from_values(numpy.sin(numpy.arange(run.samples + 11) / 3) + numpy.arange(run.samples + 11) / 50)
    model = NBEATSModel(
        8, 4, generic_architecture=True, num_stacks=2, layer_widths=16, batch_size=run.batch_size, n_epochs=EPOCHS,
        pl_trainer_kwargs=options, random_state=0, optimizer_kwargs={"lr": 1e-2},
    )  # fmt: skip
    model.fit(series, val_series=series, dataloader_kwargs={"shuffle": False})


def train_neuralforecast(run: Run, options: dict[str, Any]) -> None:
    """Train N-HiTS on series, each of which is a sample."""
    import numpy
    import pandas
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    length, steps = 40, numpy.arange(40)
    frame = pandas.DataFrame({
        "unique_id": numpy.repeat(numpy.arange(run.samples), length),
        "ds": numpy.tile(pandas.date_range("2020-01-01", periods=length), run.samples),
        "y": numpy.concatenate([numpy.sin(steps / 3 + number) + number / 50 for number in range(run.samples)]),
    })  # fmt: skip
    batches = -(-run.samples // GLOBAL_BATCH)
    model = NHITS(
        h=4, input_size=8, max_steps=EPOCHS * batches, batch_size=run.batch_size, windows_batch_size=None,
        valid_batch_size=run.batch_size, val_check_steps=batches, mlp_units=3 * [[16, 16]], random_seed=0, **options,
    )  # fmt: skip
    NeuralForecast([model], freq="D").fit(frame, val_size=4)


def train_schnetpack(run: Run, options: dict[str, Any]) -> None:
    """Train SchNet on energies of molecules with 3 to 5 atoms."""
    import ase
    import numpy
    import schnetpack
    import torch
    from schnetpack.data import ASEAtomsData, AtomsDataModule

    draw = numpy.random.default_rng(0)
    molecules = [ase.Atoms(f"C{2 + size % 3}O", draw.normal(size=(3 + size % 3, 3))) for size in range(run.samples + 5)]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        data = ASEAtomsData.create("data.db", distance_unit="Ang", property_unit_dict={"energy": "eV"})
        data.add_systems([{"energy": numpy.array([float(atoms.positions.std())])} for atoms in molecules], molecules)
        model = schnetpack.model.NeuralNetworkPotential(
            schnetpack.representation.SchNet(8, 2, schnetpack.nn.GaussianRBF(8, 5.0), schnetpack.nn.CosineCutoff(5.0)),
            input_modules=[schnetpack.atomistic.PairwiseDistances()],
            output_modules=[schnetpack.atomistic.Atomwise(n_in=8, output_key="energy")],
            postprocessors=[schnetpack.transform.CastTo64()],
        )
        output = schnetpack.task.ModelOutput("energy", torch.nn.MSELoss(), metrics={})
        task = schnetpack.task.AtomisticTask(model, [output], torch.optim.AdamW, {"lr": 1e-2})
        lists = schnetpack.transform.ASENeighborList(cutoff=5.0)
        loaders = AtomsDataModule(
            "data.db", run.batch_size, num_train=run.samples, num_val=5, num_test=0, num_workers=0, split_file=None,
            transforms=[lists],
        )  # fmt: skip
        importlib.import_module("pytorch_lightning").Trainer(max_epochs=EPOCHS, **options).fit(task, loaders)
        os.chdir("/")


def train_pytorch_tabular(run: Run, options: dict[str, Any]) -> None:
    """Train an MLP with embeddings of categories."""
    import numpy
    import pandas
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    draw = numpy.random.default_rng(0)
    frame = pandas.DataFrame({name: draw.normal(size=run.samples) for name in "ab"})
    frame["kind"] = draw.integers(3, size=run.samples).astype(str)
    frame["target"] = frame.a - frame.b * (frame.kind == "1")
    trainer = {key: options.pop(key) for key in ("devices", "accelerator")}
    callbacks = options.pop("callbacks")
    del options["logger"], options["enable_progress_bar"], options["enable_checkpointing"]
    model = TabularModel(
        data_config=DataConfig(["target"], ["a", "b"], ["kind"]),
        model_config=CategoryEmbeddingModelConfig("regression", layers="16-8", batch_norm_continuous_input=False),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=run.batch_size, max_epochs=EPOCHS, early_stopping=None, checkpoints=None, load_best=False,
            progress_bar="none", trainer_kwargs=options, **trainer,
        ),
        verbose=False,
    )  # fmt: skip
    model.fit(frame, frame.iloc[:7], callbacks=callbacks, seed=0)


def train_lightly(run: Run, options: dict[str, Any]) -> None:
    """Train a backbone and a linear classifier on images."""
    import pytorch_lightning
    import torch
    from lightly.utils.benchmarking.linear_classifier import FinetuneClassifier

    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(run.samples, 3, 8, 8, generator=draw), torch.randint(5, (run.samples,), generator=draw)
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, run.batch_size)
    backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.AdaptiveAvgPool2d(2))
    model = FinetuneClassifier(
        backbone, GLOBAL_BATCH // run.processes, lr=1.0, feature_dim=16, num_classes=5, topk=(1, 2)
    )
    pytorch_lightning.Trainer(max_epochs=EPOCHS, **options).fit(model, loader, loader)


def train_chemprop(run: Run, options: dict[str, Any]) -> None:
    """Train message passing on molecules."""
    import numpy
    from chemprop import data, featurizers, models, nn
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    smiles = ["C" * (1 + number // 4) + "ONSF"[number % 4] for number in range(run.samples)]
    points = [data.MoleculeDatapoint.from_smi(text, numpy.array([float(len(text)) / 9])) for text in smiles]
    dataset = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    loader = DataLoader(dataset, run.batch_size, collate_fn=data.collate_batch)
    model = models.MPNN(
        nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32, hidden_dim=16),
        batch_norm=False, metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
    )  # fmt: skip
    Trainer(max_epochs=EPOCHS, **{**options, "precision": 32}).fit(model, loader, loader)


def train_pytorch_forecasting(run: Run, options: dict[str, Any]) -> None:
    """Train a temporal fusion transformer on windows of series."""
    import numpy
    import pandas
    from lightning.pytorch import Trainer
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.data import NaNLabelEncoder
    from pytorch_forecasting.metrics import QuantileLoss

    steps = numpy.arange(12)
    frame = pandas.concat(
        pandas.DataFrame({"series": str(number), "step": steps, "value": numpy.sin(steps / 3 + number) + number / 9})
        for number in range(run.samples)
    )
    data = TimeSeriesDataSet(
        frame.reset_index(drop=True), time_idx="step", target="value", group_ids=["series"], max_encoder_length=8,
        min_encoder_length=8, max_prediction_length=4, static_categoricals=["series"],
        time_varying_unknown_reals=["value"], categorical_encoders={"series": NaNLabelEncoder().fit(frame.series)},
    )  # fmt: skip
    loader = data.to_dataloader(train=True, batch_size=run.batch_size, shuffle=False, drop_last=False)
    model = TemporalFusionTransformer.from_dataset(
        data, hidden_size=8, attention_head_size=2, dropout=0.0, hidden_continuous_size=8, loss=QuantileLoss(),
        learning_rate=1e-2, log_interval=-1,
    )  # fmt: skip
    Trainer(max_epochs=EPOCHS, **options).fit(model, loader, data.to_dataloader(train=False, batch_size=run.batch_size))


def train_nequip(run: Run, options: dict[str, Any]) -> None:
    """Train NequIP on energies and forces of three atoms; its loss is already summed over ranks."""
    import ase.io
    import numpy
    from ase.calculators.singlepoint import SinglePointCalculator
    from lightning.pytorch import Trainer
    from nequip.data import AtomicDataDict
    from nequip.data.dataset import ASEDataset
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.train import NequIPLightningModule
    from nequip.utils.global_state import set_global_state
    from torch.utils.data import DataLoader

    set_global_state()
    draw = numpy.random.default_rng(0)
    molecules = [ase.Atoms("OH2", draw.normal(size=(3, 3))) for _ in range(run.samples)]
    for atoms in molecules:
        atoms.calc = SinglePointCalculator(atoms, energy=float(atoms.positions.std()), forces=atoms.positions)
    with tempfile.TemporaryDirectory() as folder:
        ase.io.write(f"{folder}/data.xyz", molecules, format="extxyz")
        data = ASEDataset(
            f"{folder}/data.xyz", [ChemicalSpeciesToAtomTypeMapper(["H", "O"]), NeighborListTransform(r_max=4.0)]
        )
    loader = DataLoader(data, run.batch_size, collate_fn=AtomicDataDict.batched_from_list)
    model = NequIPLightningModule(
        {
            "_target_": "nequip.model.NequIPGNNModel", "seed": 0, "model_dtype": "float64", "type_names": ["H", "O"],
            "r_max": 4.0, "num_layers": 2, "num_features": 4, "radial_mlp_width": 8, "avg_num_neighbors": 2.0,
        },
        num_datasets={"train": 1, "val": 1, "test": 0},
        optimizer={"_target_": "torch.optim.Adam", "lr": 0.01},
        loss={"_target_": "nequip.train.EnergyForceLoss"},
        val_metrics={"_target_": "nequip.train.EnergyForceMetrics"},
    )  # fmt: skip
    Trainer(max_epochs=EPOCHS, **options).fit(model, loader, loader)


def train_transformers(run: Run, options: dict[str, Any]) -> None:
    """Train a text classifier of HuggingFace, made from a configuration."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from transformers import BertConfig, BertForSequenceClassification

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
            without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.model = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **without))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch).loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    draw = torch.Generator().manual_seed(0)
    data = [
        {"input_ids": torch.randint(50, (8,), generator=draw), "labels": torch.randint(3, (), generator=draw)}
        for _ in range(run.samples)
    ]
    loader = torch.utils.data.DataLoader(data, run.batch_size)
    Trainer(max_epochs=EPOCHS, **options).fit(Classifier(), loader, loader)


def train_gluonts(run: Run, options: dict[str, Any]) -> None:
    """Train a feed-forward network on random windows of a stream."""
    import numpy
    import pandas
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch.model.simple_feedforward import SimpleFeedForwardEstimator

    steps = numpy.arange(60)
    days = pandas.period_range("2020", periods=60, freq="D")
    waves = {str(number): numpy.sin(steps / 3 + number).astype("float32") for number in range(7)}
    frames = {name: pandas.DataFrame({"target": wave}, days) for name, wave in waves.items()}
    options = {**options, "max_epochs": EPOCHS, "precision": 32, "enable_checkpointing": True}
    estimator = SimpleFeedForwardEstimator(
        prediction_length=4, context_length=8, hidden_dimensions=[8, 8], batch_size=run.batch_size, batch_norm=False,
        num_batches_per_epoch=-(-run.samples // GLOBAL_BATCH), trainer_kwargs=options,
    )  # fmt: skip
    estimator.train(PandasDataset(frames, target="target"))


@dataclass(frozen=True)
class Client:
    """An application: how to train with it, and what to install."""

    train: Callable[[Run, dict[str, Any]], None]
    lightning: str  # import name
    requirements: tuple[str, ...] = ()  # the application by default
    options: tuple[str, ...] = ()  # of pip
    row: str = ""  # of `tests/versions/run.py`, if it needs other versions than this environment has
    is_shuffled: bool = False  # always, so that processes draw different permutations
    is_stream: bool = False  # which every rank reads; only `balanced_dp` and `balanced_ddp` share it
    weight_by: str = "samples"


IMAGES = ("lightly", "lightly-utils", "torchvision==0.29.1", "pillow", "tqdm")
CLIENTS = {
    "darts": Client(train_darts, SECOND, ("darts", "pytorch-lightning")),
    "neuralforecast": Client(train_neuralforecast, SECOND, is_shuffled=True),
    "schnetpack": Client(train_schnetpack, SECOND, row="2.12", is_shuffled=True),
    "pytorch-tabular": Client(train_pytorch_tabular, SECOND, is_shuffled=True),
    # torchvision is built for torch with CUDA, for which `make versions` has stand-ins.
    "lightly": Client(train_lightly, SECOND, IMAGES, ("--no-deps",), row="2.14"),
    "chemprop": Client(train_chemprop, FIRST),
    "pytorch-forecasting": Client(train_pytorch_forecasting, FIRST),
    "nequip": Client(train_nequip, FIRST, weight_by="sum"),
    "gluonts": Client(train_gluonts, FIRST, ("gluonts[torch]",), is_stream=True),
    "transformers": Client(train_transformers, FIRST),
}


# ---------------------------------------------------------------- one run


@dataclass
class Outcome:
    """Result of a run on one rank."""

    parameters: dict[str, Any]
    digest: str  # of the whole state
    steps: int
    seconds: float  # of all steps but the first
    comparisons: int
    initial: dict[str, Any]


def train(name: str, run: Run) -> Outcome:
    """Train one application on this rank."""
    warnings.simplefilter("ignore")
    import torch

    client = CLIENTS[name]
    lightning = importlib.import_module(client.lightning)
    prefix = "lightning_ddp_ext." + ("" if client.lightning == FIRST else "pytorch_lightning.")
    ours = importlib.import_module(prefix.rstrip("."))
    strategy: Any = run.strategy
    if strategy in STRATEGIES and client.weight_by != "samples":
        strategy = getattr(ours, STRATEGIES[strategy])(weight_by=client.weight_by)
    consistency = importlib.import_module(prefix + "callbacks").ReplicaConsistency(every_n_steps=1)

    outcomes: list[Outcome] = []

    def parameters_of(module: Any) -> dict[str, Any]:
        return {name: value.detach().double().numpy().copy() for name, value in module.named_parameters()}

    class Recorder(lightning.Callback):  # type: ignore[misc, name-defined]
        """Times batches, and keeps the result of the fit; applications may copy callbacks."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.initial = parameters_of(module)

        def on_train_batch_end(self, *args: Any) -> None:
            self.ends.append(time.perf_counter())

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            tensors = [value for value in module.state_dict().values() if isinstance(value, torch.Tensor)]
            content = b"".join(value.detach().flatten().view(torch.uint8).numpy().tobytes() for value in tensors)
            compared = next(one for one in trainer.callbacks if hasattr(one, "comparisons"))
            outcomes.append(Outcome(
                parameters_of(module),
                hashlib.sha256(content).hexdigest(),
                trainer.global_step, self.ends[-1] - self.ends[0], compared.comparisons, self.initial,
            ))  # fmt: skip

    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        client.train(run, {
            "strategy": strategy, "devices": run.devices, "accelerator": "cpu", "callbacks": [Recorder(), consistency],
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "default_root_dir": folder, "precision": "64-true", "num_sanity_val_steps": 0,
        })  # fmt: skip
    return outcomes[0]


# ---------------------------------------------------------------- all runs of an application


def measure(name: str) -> list[str]:
    """Return the cells of an application's line: versions, steps, and the result of each run."""
    client = CLIENTS[name]
    torch = version("torch").partition("+")[0]
    found = f"{name} {version(name)}, torch {torch}, Lightning {version('pytorch-lightning')}"
    references: dict[Run, Outcome] = {}
    cells, steps = [], 0
    for run in RUNS:
        if client.is_stream and run.divides > 1:
            cells.append("-")
            continue
        alone = in_one_process(run, client.is_shuffled)
        try:
            with redirect_stdout(None):  # what the ranks print
                if alone not in references:
                    references[alone] = run_processes(train, 1, name, alone, timeout=LIMIT)[0]
                outcomes = run_processes(train, run.processes, name, run, timeout=LIMIT, env=LAUNCHED)
        except (RankError, RankTimeoutError) as error:
            reason = str(error).splitlines()[0]
            print(f"{name}, {run.strategy}: {reason}", flush=True)
            cells.append("refused" if "lightning_ddp_ext.errors" in reason else "FAILED")
            continue
        cells.append(describe(run, outcomes, references[alone]))
        steps = max(steps, outcomes[0].steps)
    return [found, f"`{client.lightning}`", str(steps), *cells]


def describe(run: Run, outcomes: list[Outcome], alone: Outcome) -> str:
    """Describe a run beside its reference: the largest difference of a rank, and the ratio of the times."""
    are_equal = len({outcome.digest for outcome in outcomes}) == 1
    were_compared = run.processes == 1 or all(outcome.comparisons == outcome.steps for outcome in outcomes)
    if not are_equal or not were_compared or outcomes[0].steps != alone.steps:
        return "FAILED"
    moved = norm_of_difference(alone.parameters, alone.initial)
    difference = max(norm_of_difference(outcome.parameters, alone.parameters) for outcome in outcomes) / moved
    if difference > LARGEST_DIFFERENCE:
        return f"FAILED, {difference:.0e}"
    return f"{difference:.0e}, {outcomes[0].seconds / alone.seconds:.1f}"


def norm_of_difference(ones: dict[str, Any], others: dict[str, Any]) -> float:
    """Return the norm over all parameters."""
    return float(sum(((ones[name] - other) ** 2).sum() for name, other in others.items()) ** 0.5)


def prepare(name: str) -> Path:
    """Return the interpreter of an application's environment, which falls back to the packages of this one."""
    client = CLIENTS[name]
    base = Path(sys.executable)
    if client.row:
        ((row, interpreter),) = versions.find_interpreters([versions.ROWS[client.row]], may_replace=False)
        base = versions.prepare(row, interpreter)
    script = "import site; print(site.getsitepackages()[0])"
    below = subprocess.run([base, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
    requirements = client.requirements or (name,)
    digest = hashlib.sha256(repr((below, requirements)).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
        (next(folder.glob("lib/python*/site-packages")) / "base.pth").write_text(below)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *client.options, *requirements], check=True, stderr=subprocess.DEVNULL)
        complete.touch()
    return python


def main() -> int:
    """Measure the given applications, or all, and print the table; returns 1 if a run has failed."""
    parser = start_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(CLIENTS)}; by default all of them")
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    parser.add_argument("--measure", choices=CLIENTS, help=argparse.SUPPRESS)  # in the application's environment
    given = parser.parse_args()
    if given.measure:
        given.output.write_text(json.dumps(measure(given.measure)))
        return 0
    if unknown := sorted(set(given.names) - CLIENTS.keys()):
        parser.error(f"no applications {', '.join(unknown)}; there are {', '.join(CLIENTS)}")
    heads = [f"`{run.strategy}`, {run.devices} {'replicas' if run.processes == 1 else 'ranks'}" for run in RUNS]
    rows = [["application", "imports", "steps", *heads], ["---"] * (3 + len(RUNS))]
    for name in given.names or CLIENTS:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "cells.json")
            command = [prepare(name), __file__, "--measure", name, "--output", output]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False, cwd=folder)
            cells = json.loads(output.read_text()) if output.exists() else [name, "", "", *["FAILED"] * len(RUNS)]
        rows.append(cells)
        print(" | ".join(cells), flush=True)
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
    print(table)
    if given.output:
        given.output.write_text(table)
    return int("FAILED" in table)


if __name__ == "__main__":
    sys.exit(main())
