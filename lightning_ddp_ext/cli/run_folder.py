"""The folder of a run: what is left there, and what an earlier start of the same job has left."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig, OmegaConf


def keep_config(config: DictConfig, folder: Path) -> None:
    """Write the whole configuration down, for the owner only: it may hold keys from the environment."""
    path = folder / "config.yaml"
    path.touch(mode=0o600)
    path.chmod(0o600)  # also where there was one
    OmegaConf.save(config, path, resolve=True)


def keep_metrics(folder: Path) -> None:
    """Keep what a job has logged before it was requeued; Lightning's logger would delete it."""
    metrics = folder / "metrics.csv"
    if metrics.exists():
        kept = [int(number) for path in folder.glob("metrics-*.csv") if (number := path.stem[8:]).isdecimal()]
        metrics.rename(folder / f"metrics-{max(kept, default=0) + 1}.csv")


def checkpoint_to_resume(given: str | None, trainer: Trainer) -> str | None:
    """Choose what to go on from.

    Args:
        given: What the configuration asks for.
        trainer: The Trainer.

    Returns:
        That. For a job that SLURM has started again, the newer one of what it has left when it was preempted, `"hpc"`,
        and what its callbacks have saved last, `"last"`: a node may have failed since.
    """
    if not has_started_before():
        return given
    left = _newest(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt"))
    saved = _newest(_last_checkpoints(trainer))
    if left > saved:
        return "hpc"
    # A path is from before. What is not on a mounted disk, only Lightning finds; it says so if there is nothing.
    return "last" if saved or given is None else given


def has_started_before() -> bool:
    """Tell whether this is a job that SLURM has put into the queue again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0


def _last_checkpoints(trainer: Trainer) -> Iterator[Path]:
    """Go through what Lightning takes for `ckpt_path="last"`."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            yield from Path(callback.dirpath).glob(f"{callback.CHECKPOINT_NAME_LAST}*{callback.FILE_EXTENSION}")


def _newest(paths: Iterable[Path]) -> float:
    """Return when the newest of some files was written; 0 if there is none."""
    return max((path.stat().st_mtime for path in paths), default=0.0)
