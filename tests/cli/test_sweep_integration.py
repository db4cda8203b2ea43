"""Sweeps on one node."""

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_ddp_ext import DDPJoinStrategy, UnsupportedFeatureError
from tests.cli.commands import command
from tests.support.programs import run_python

pytestmark = pytest.mark.timeout(900)

# Every rank of a job leaves a file. In one job, rank 1 may fail.
RECORDING = """
from hydra.core.hydra_config import HydraConfig
from lightning_ddp_ext.demo.digits import DigitsCNN

class Recording(DigitsCNN):
    def __init__(self, fails=False, **arguments):
        super().__init__(**arguments)
        self.fails, self.folder = fails, HydraConfig.get().runtime.output_dir

    def on_train_start(self):
        open(f"{self.folder}/rank-{self.global_rank}-of-{self.trainer.world_size}", "w").close()
        if self.fails and self.global_rank == 1:
            raise ArithmeticError("own bug of rank 1")
"""
SMALL = [
    "model=custom", "model._target_=recording.Recording", "+model.width=4", "data=digits", "trainer.max_steps=2",
    "test=false",
    "trainer.limit_val_batches=0", "callbacks=none", "logger=none", "trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "plot=false",
]  # fmt: skip


def sweep(folder, *overrides, code=0):
    (folder / "recording.py").write_text(RECORDING)
    return command(folder, "-m", *SMALL, *overrides, code=code, limit=600, OMP_NUM_THREADS="1")


def ranks_of_jobs(folder):
    """Return the sorted files that the ranks of each job have left, by the folder of the job."""
    jobs = sorted(job for job in folder.glob("**/*") if job.name.isdecimal())
    return {job: sorted(path.name for path in job.glob("rank-*")) for job in jobs}


def names_of(world_size):
    return [f"rank-{rank}-of-{world_size}" for rank in range(world_size)]


@pytest.mark.slow
def test_every_job_has_separate_processes_configuration_and_folder(tmp_path):
    sweep(tmp_path, "strategy=ddp_join,balanced_dp", "trainer.devices=2")
    found = ranks_of_jobs(tmp_path / "runs")
    assert [*found.values()] == [*map(names_of, (2, 1))]
    configs = [OmegaConf.load(job / "config.yaml") for job in found]
    names = [config.strategy._target_.rpartition(".")[2] for config in configs]
    assert names == ["DDPJoinStrategy", "BalancedDataParallelStrategy"]
    logs = [(job / "train.log").read_text() for job in found]
    assert [log.count("`Trainer.fit` stopped: `max_steps=2` reached.") for log in logs] == [1] * 2


@pytest.mark.slow
def test_a_job_that_fails_on_one_rank_is_named_and_the_next_one_runs(tmp_path):
    done = sweep(tmp_path, "strategy=ddp_join", "trainer.devices=2", "+model.fails=true,false", code=1)
    assert "ArithmeticError: own bug of rank 1" in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("lightning-ddp-ext: job 0 of the sweep, `")
    assert "+model.fails=True" in message  # as Hydra writes it
    assert "ended with exit code" in message
    assert message.count("runs/") == 1
    assert [*ranks_of_jobs(tmp_path / "runs").values()] == [names_of(2)] * 2


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
from lightning.pytorch import Trainer
from lightning_ddp_ext import DDPJoinStrategy
from lightning_ddp_ext.demo.digits import DigitsData
from recording import Recording

@hydra.main(version_base="1.3", config_path=None)
def main(config):
    strategy, options = DDPJoinStrategy(start_method="spawn"), dict(logger=False, enable_checkpointing=False)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=config.devices, max_steps=2, **options)
    trainer.fit(Recording(width=4), DigitsData())

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_remedy_for_other_applications_is_right(tmp_path):
    (tmp_path / "recording.py").write_text(RECORDING)
    (tmp_path / "other.py").write_text(OTHER)
    run_python("other.py", "-m", "+devices=2,3", cwd=tmp_path, limit=600)
    assert [*ranks_of_jobs(tmp_path / "multirun").values()] == [names_of(2), names_of(3)]
