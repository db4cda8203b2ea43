"""Predictions of all ranks in files, in the order of the data, also of a run that was interrupted."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext._lightning import BasePredictionWriter, LightningModule, Trainer
from lightning_ddp_ext._validation import check_flag
from lightning_ddp_ext.batches.sample_counts import as_indices, hash_of
from lightning_ddp_ext.consistency import fingerprint_all
from lightning_ddp_ext.distributed.exchange import broadcast_object
from lightning_ddp_ext.distributed.serialization import name_skipped, pack, unpack
from lightning_ddp_ext.errors import UnsupportedFeatureError
from lightning_ddp_ext.loaders.predictions import Finished, PredictionPlace, merge_parts
from lightning_ddp_ext.strategies.explicit_ddp import ExplicitDDPStrategy

_MERGED, _RUN, _PARTS = "predictions.pt", "run.json", "parts"
_EMPTY = "Write into an empty folder."


class _Entry(NamedTuple):
    """A line of an index: where the prediction of one rank for a batch is in the file of the same name."""

    dataloader_idx: int
    place: PredictionPlace
    content: int  # hash of the indices of the batch
    offset: int
    length: int


class PredictionWriter(BasePredictionWriter):
    """Writes predictions of `trainer.predict` batch by batch, merges them, and continues an interrupted run.

    Each rank appends its predictions, with the indices of their samples, to a separate file in `folder`, which all
    ranks have to see. When all are there, rank 0 writes `predictions.pt`, a dictionary with the lists `"predictions"`
    and `"indices"`: an entry for each batch, in the order in which one process predicts them; for several loaders, a
    list for each. `read_predictions` reads one batch after another instead.

    If the run was interrupted, the same `trainer.predict` with the same folder predicts the missing batches only, also
    on another number of ranks if these share the data. Another model, or a loader that makes other batches, is refused.
    `trainer.predict` then returns the predictions that were missing; pass `return_predictions=False` to keep none.

    Predictions are tensors, arrays, plain values, dataclasses and containers of these. The callback needs `ddp_join` or
    `balanced_ddp`, with any number of devices.

    Args:
        folder: The folder of the predictions, empty at first.
        merge: Whether to write `predictions.pt`, for which rank 0 reads all predictions into memory.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `folder` is a file.
    """

    def __init__(self, folder: str | Path, merge: bool = True) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise TypeError(f"`folder` must be the path of a folder, got {folder!r}. Use one for each prediction.")
        if os.path.isfile(folder):  # `Path.is_file` raises errors for names that are too long
            raise ValueError(f"`folder` must be the path of a folder, got the file {str(folder)!r}. Use another name.")
        check_flag("merge", merge)
        super().__init__("batch")
        self.folder = Path(folder)
        self.merge = merge
        self._files = ExitStack()
        self._data: BinaryIO | None = None
        self._index: Any = None
        self._run = 0
        self._is_unmerged = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            return
        if not (isinstance(trainer.strategy, ExplicitDDPStrategy) and trainer.strategy.agrees):
            raise UnsupportedFeatureError(
                f"`PredictionWriter` does not know the order of batches under `{type(trainer.strategy).__name__}`. Use"
                ' `strategy="ddp_join"` or `"balanced_ddp"`, also for a single device.'
            )
        if trainer.strategy.find_finished is not None:
            raise UnsupportedFeatureError("the Trainer has two callbacks `PredictionWriter`. Use one.")
        trainer.strategy.find_finished = partial(self._begin, trainer, pl_module)
        super().setup(trainer, pl_module, stage)

    def _begin(self, trainer: Trainer, module: LightningModule) -> Finished:
        """Begin a run on all ranks; return the batches that have been predicted."""
        error, state = "", None
        if trainer.is_global_zero:
            try:
                state = self._prepare(trainer, module)
            except UnsupportedFeatureError as problem:
                error = str(problem)
        # Also an error, because the other ranks would wait for the state.
        error, state = broadcast_object((error, state), None, 0)
        if error:
            raise UnsupportedFeatureError(error)
        self._run, contents = state
        self._is_unmerged = True
        if not (self.folder / _RUN).exists():
            raise UnsupportedFeatureError(
                f"rank {trainer.global_rank} does not see the `folder` {self.folder} of rank 0. Use a file system that"
                " all nodes share."
            )

        def finished(dataloader_idx: int, source: int) -> Sequence[int]:
            kinds = {other > 0 for number, other in contents if number == dataloader_idx}
            if kinds - {source > 0}:
                raise UnsupportedFeatureError(
                    f"`folder={self.folder}` has predictions of data that ranks have divided in another way. {_EMPTY}"
                )
            found: Sequence[int] = contents.get((dataloader_idx, source), ())
            return found

        return finished

    def _prepare(self, trainer: Trainer, module: LightningModule) -> tuple[int, dict[tuple[int, int], list[int]]]:
        """Return the number of this run, and the hashes of the first batches of each loader and source."""
        assert isinstance(trainer.strategy, ExplicitDDPStrategy)
        tensors = {name: value.cpu() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
        own = {
            "model": fingerprint_all(tensors),
            "batch_dim": trainer.strategy.batch_dim,
            "ranks": trainer.world_size,
            "run": 0,
        }
        path = self.folder / _RUN
        (self.folder / _PARTS).mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text()) if path.exists() else {**own, "run": -1}
        if before["model"] != own["model"]:
            raise UnsupportedFeatureError(f"`folder={self.folder}` has predictions of another model. {_EMPTY}")
        own["run"] = before["run"] + 1
        indexes = {index: _read_index(index) for index in sorted((self.folder / _PARTS).glob("*.jsonl"))}
        entries = [entry for of_file in indexes.values() for entry in of_file]
        if before["ranks"] != own["ranks"] and any(entry.place.source for entry in entries):
            raise UnsupportedFeatureError(
                f"`folder={self.folder}` has predictions of {before['ranks']} ranks with data of their own, and"
                f" {own['ranks']} continue. Use as many ranks, or an empty folder."
            )
        contents = _first_contents(entries)
        for index, of_file in indexes.items():
            kept = [one for one in of_file if one.place.number < len(contents[one.dataloader_idx, one.place.source])]
            _replace_file(index, "".join(map(_to_line, kept)))
        _replace_file(path, json.dumps(own))
        (self.folder / _MERGED).unlink(missing_ok=True)
        return own["run"], contents

    @override
    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert isinstance(trainer.strategy, ExplicitDDPStrategy)
        place, content = trainer.strategy.predictions.place, trainer.strategy.predictions.content
        assert place is not None
        indices = as_indices(batch_indices) if batch_indices else None
        packed = pack((indices, prediction))
        if packed.skipped:
            raise TypeError(
                f"rank {place.rank}: {name_skipped(packed.skipped)} in a prediction cannot be written. Return tensors,"
                " plain values and containers of these."
            )
        if self._data is None:
            name = f"{self._run:04d}-{place.rank:05d}"
            self._data = self._files.enter_context((self.folder / _PARTS / f"{name}.bin").open("wb"))
            self._index = self._files.enter_context((self.folder / _PARTS / f"{name}.jsonl").open("w"))
        if content is None:
            content = 0 if indices is None else hash_of(indices)
        entry = _Entry(dataloader_idx, place, content, self._data.tell(), packed.data.numel())
        self._data.write(packed.data.numpy().tobytes())
        self._data.flush()  # before the index, which only has predictions that are there
        self._index.write(_to_line(entry))
        self._index.flush()

    @override
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        trainer.strategy.barrier()  # rank 0 merges files that every rank has closed
        self._merge(trainer)
        trainer.strategy.barrier()  # no rank returns before the merged file is there

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        if stage == "predict":  # if no batch was missing, Lightning does not begin to predict
            self._merge(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        self._files.close()
        self._data = self._index = None

    def _merge(self, trainer: Trainer) -> None:
        """Write the merged file on rank 0."""
        is_due, self._is_unmerged = self._is_unmerged and self.merge and trainer.is_global_zero, False
        if not is_due:
            return
        loaders = range(trainer.predict_loop.num_dataloaders)
        found = [list(read_predictions(self.folder, dataloader_idx)) for dataloader_idx in loaders]
        columns = {
            name: [[one[column] for one in of_loader] for of_loader in found]
            for column, name in enumerate(("indices", "predictions"))
        }
        path = self.folder / _MERGED
        temporary = path.with_suffix(".tmp")
        torch.save({name: value if len(value) > 1 else value[0] for name, value in columns.items()}, temporary)
        temporary.replace(path)


def read_predictions(folder: str | Path, dataloader_idx: int = 0) -> Iterator[tuple[list[Any] | None, Any]]:
    """Read what `PredictionWriter` has written, one batch after another, in the order of one process.

    Only one prediction is in memory at a time, and no code of the files is run.

    Args:
        folder: The folder of the callback. The run may have been interrupted: missing batches are left out.
        dataloader_idx: Which loader, if `trainer.predict` got several.

    Yields:
        The indices of the samples in the dataset, None for streams and other iterables, and the prediction of a batch.
        Tensors are on the CPU.

    Raises:
        FileNotFoundError: If nothing has been written there.
    """
    run = json.loads((Path(folder) / _RUN).read_text())
    parts = [
        (entry.place, (index.with_suffix(".bin"), entry))
        for index in sorted((Path(folder) / _PARTS).glob("*.jsonl"))
        for entry in _read_index(index)
        if entry.dataloader_idx == dataloader_idx
    ]
    yield from merge_parts(parts, run["batch_dim"], _read)


def _read(part: tuple[Path, _Entry]) -> Any:
    path, entry = part
    with path.open("rb") as file:
        file.seek(entry.offset)
        return unpack(torch.frombuffer(bytearray(file.read(entry.length)), dtype=torch.uint8))[0]


def _to_line(entry: _Entry) -> str:
    return json.dumps(entry) + "\n"


def _read_index(path: Path) -> list[_Entry]:
    """Return the entries of an index; the last line and its data may be incomplete."""
    data = path.with_suffix(".bin")
    size = data.stat().st_size if data.exists() else 0
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    entries = [_Entry(number, PredictionPlace(*place), *rest) for number, place, *rest in map(json.loads, lines)]
    return [entry for entry in entries if entry.offset + entry.length <= size]


def _first_contents(entries: Sequence[_Entry]) -> dict[tuple[int, int], list[int]]:
    """Return the hashes of the first batches of each loader and source, before the first one that is incomplete."""
    found: dict[tuple[int, int], dict[int, list[_Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        found[entry.dataloader_idx, entry.place.source][entry.place.number].append(entry)
    contents: dict[tuple[int, int], list[int]] = {}
    for key, numbered in found.items():
        contents[key] = []
        while (of_batch := numbered.get(len(contents[key]))) and len(of_batch) == of_batch[0].place.parts:
            contents[key].append(of_batch[0].content)
    return contents


def _replace_file(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
