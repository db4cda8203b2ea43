"""The folder of a run: what is left there, and what an earlier start of the same job has left."""

import os
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
        That, or `"hpc"` for what a job has left that SLURM has started again, if it is newer.
    """
    left = [path.stat().st_mtime for path in preemption_checkpoints(Path(trainer.default_root_dir))]
    if left and given == "last":
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        folders = [callback.dirpath for callback in callbacks if callback.dirpath]
        saved = [path.stat().st_mtime for folder in folders for path in Path(folder).glob("*.ckpt")]
        return "hpc" if max(left) > max(saved, default=0.0) else given
    return "hpc" if left else given  # a path is from before


def preemption_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints that earlier starts of this job have left when they were preempted."""
    return [*folder.glob("hpc_ckpt_*.ckpt")] if int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0 else []
