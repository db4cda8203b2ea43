"""Sweeps on one node."""

import json
import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_ddp_ext import DDPJoinStrategy, UnsupportedFeatureError

pytestmark = pytest.mark.timeout(900)
COMMAND = [sys.executable, "-m", "lightning_ddp_ext", "-m"]

# Every rank of a job writes a record. In one job, rank 1 may fail.
RECORDING = """
import json
import os
from pathlib import Path

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig

from lightning_ddp_ext.demo.digits import DigitsCNN


class Recording(DigitsCNN):
    def __init__(self, fails=False, **arguments):
        super().__init__(**arguments)
        self.fails = fails

    def on_train_start(self):
        hydra = HydraConfig.get()
        made = dist.is_initialized()
        record = {
            "rank": dist.get_rank() if made else 0,
            "world_size": dist.get_world_size() if made else 1,
            "backend": dist.get_backend() if made else None,
            "devices": self.trainer.num_devices,
            "overrides": list(hydra.overrides.task),
            "number": hydra.job.num,
        }
        folder = Path(hydra.runtime.output_dir)
        (folder / f"rank-{record['rank']}-{os.getpid()}.json").write_text(json.dumps(record))
        if self.fails and self.global_rank == 1:
            raise ArithmeticError("own bug of rank 1")
"""
SMALL = [
    "model=custom", "model._target_=recording.Recording", "+model.width=4", "trainer.max_steps=2", "test=false",
    "trainer.limit_val_batches=0", "callbacks=none", "logger=none", "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "plot=false",
]  # fmt: skip


def sweep(folder, *overrides, limit=600, **environment):
    (folder / "recording.py").write_text(RECORDING)
    return subprocess.run(
        [*COMMAND, *SMALL, *overrides],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def jobs(folder):
    """Return the records of all ranks by job number."""
    return {
        int(job.name): [json.loads(path.read_text()) for path in sorted(job.glob("rank-*.json"))]
        for job in folder.glob("runs/*/*/*")
        if job.is_dir() and job.name.isdecimal()
    }


def check_jobs(folder, expected):
    """Compare the jobs with (strategy, world size, devices) of each, and their folders with their configurations."""
    found = jobs(folder)
    assert len(found) == len(expected)
    for number, (strategy, world_size, devices) in enumerate(expected):
        records = found[number]
        assert [record["rank"] for record in records] == list(range(world_size))
        assert {record["world_size"] for record in records} == {world_size}
        assert {record["number"] for record in records} == {number}
        assert len({tuple(record["overrides"]) for record in records}) == 1
        assert f"strategy={strategy}" in records[0]["overrides"]
        (path,) = folder.glob(f"runs/*/*/{number}/config.yaml")
        assert OmegaConf.load(path).trainer.devices == devices


@pytest.mark.slow
def test_every_job_has_separate_processes_configuration_and_folder(tmp_path):
    strategies = ["ddp", "ddp_join", "balanced_dp"]
    done = sweep(tmp_path, f"strategy={','.join(strategies)}", "trainer.devices=2,3")
    assert done.returncode == 0, done.stderr
    ranks = {"balanced_dp": 1}
    check_jobs(tmp_path, [(name, ranks.get(name, number), number) for name in strategies for number in (2, 3)])


@pytest.mark.slow
def test_a_job_that_fails_on_one_rank_is_named_and_the_next_one_runs(tmp_path):
    done = sweep(tmp_path, "strategy=ddp_join", "trainer.devices=2", "+model.fails=true,false")
    assert done.returncode == 1
    assert "ArithmeticError: own bug of rank 1" in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("lightning-ddp-ext: job 0 of the sweep, `")
    assert "+model.fails=True" in message  # as Hydra writes it
    assert "ended with exit code" in message
    assert message.count("runs/") == 1
    assert [len(records) for _, records in sorted(jobs(tmp_path).items())] == [2, 2]


def test_every_job_that_cannot_start_is_named_and_the_first_one_again_at_the_end(call_main):
    code, printed = call_main("-m", "trainer.accumulate_grad_batches=0,-1")
    lines = printed.err.splitlines()
    assert code == 1
    named = [line for line in lines if line.startswith("lightning-ddp-ext: ")]
    starts = [f"lightning-ddp-ext: job {number} of the sweep, `trainer.accumulate_grad_batches={value}`: "
              for number, value in ((0, 0), (1, -1), (0, 0))]  # fmt: skip
    assert [line[: len(start)] for line, start in zip(named, starts, strict=True)] == starts
    assert all("must be at least 1" in line for line in named)
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS", "WORLD_SIZE"])
def test_a_sweep_that_was_started_several_times_is_refused(call_main, monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    code, printed = call_main("-m", "seed=1,2")
    lines = printed.err.splitlines()
    assert code == 1
    assert f"`--multirun` was started 2 times (`{variable}=2`)" in lines[-1]
    assert "hydra/launcher=submitit_slurm" in lines[-1]


def test_strategies_in_other_applications_refuse_to_repeat_a_sweep(monkeypatch):
    def become_job(mode):
        with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
            composed = compose("train", overrides=[f"hydra.mode={mode}"], return_hydra_config=True)
        HydraConfig.instance().set_config(composed)

    def trainer(devices=2, **options):
        return Trainer(strategy=DDPJoinStrategy(**options), accelerator="cpu", devices=devices, logger=False)

    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # restored afterwards
    become_job("MULTIRUN")
    with pytest.raises(UnsupportedFeatureError, match='Use `start_method="spawn"`'):
        trainer()
    trainer(start_method="spawn")
    trainer(devices=1)
    become_job("RUN")
    trainer()


OTHER = """
import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_ddp_ext import DDPJoinStrategy

class Recording(BoringModel):
    def on_train_start(self):
        open(f"{self.folder}/rank-{self.global_rank}-of-{self.trainer.world_size}", "w").close()

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    model, options = Recording(), dict(max_steps=2, logger=False, enable_checkpointing=False)
    model.folder = HydraConfig.get().runtime.output_dir
    strategy = DDPJoinStrategy(start_method="spawn")
    Trainer(strategy=strategy, accelerator="cpu", devices=config.devices, **options).fit(model)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_remedy_for_other_applications_is_right(tmp_path):
    (tmp_path / "other.py").write_text(OTHER)
    command = [sys.executable, "other.py", "-m", "+devices=2,3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = {job.name: {path.name for path in job.glob("rank-*")} for job in tmp_path.glob("multirun/*/*/[0-9]")}
    assert found == {"0": {"rank-0-of-2", "rank-1-of-2"}, "1": {"rank-0-of-3", "rank-1-of-3", "rank-2-of-3"}}
