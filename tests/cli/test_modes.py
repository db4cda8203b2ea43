"""Modes of the command besides training, and the result that a sweeper optimizes."""

import json
import re
import sys

import pytest
import yaml

from tests.cli.commands import OWN, command

CUSTOM = ["model=custom", "model._target_=net.Net", "data=custom", "data._target_=net.Data", "plot=false"]
QUIET = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]


def run(folder, name, *overrides, **options):
    (folder / "net.py").write_text(OWN)
    return command(folder, *CUSTOM, *QUIET, f"hydra.run.dir={name}", *overrides, OMP_NUM_THREADS="1", **options)


def results(folder, name):
    return json.loads((folder / name / "results.json").read_text())


@pytest.mark.slow
def test_a_checkpoint_is_validated_tested_and_used_for_predictions_as_after_its_training(tmp_path):
    run(tmp_path, "trained", "strategy=ddp_join", "trainer.max_epochs=1")
    trained = results(tmp_path, "trained")
    assert {*trained} == {"my_val", "my_test"}
    checkpoint = "ckpt_path=trained/checkpoints/last.ckpt"
    for mode, name, strategy in (("validate", "my_val", "ddp_join"), ("test", "my_test", "balanced_dp")):
        done = run(tmp_path, mode, f"strategy={strategy}", f"mode={mode}", checkpoint)
        assert results(tmp_path, mode) == {name: pytest.approx(trained[name], rel=1e-6)}
        assert "optimizer steps" not in done.stdout
    done = run(tmp_path, "untrained", "strategy=single", "mode=test")
    assert "`mode=test` without `ckpt_path` uses the weights with which the model is constructed" in done.stderr
    assert results(tmp_path, "untrained")["my_test"] != pytest.approx(trained["my_test"], rel=1e-3)
    predicting = ["mode=predict", checkpoint, "callbacks=prediction_writer"]
    run(tmp_path, "predict", "strategy=ddp_join", *predicting)
    assert [*(tmp_path / "predict" / "predictions").rglob("*")]
    done = run(tmp_path, "refused", "strategy=balanced_dp", *predicting, code=1)
    assert 'Use `strategy="ddp_join"` or `"balanced_ddp"`, also for a single device' in done.stderr


def test_a_mode_that_cannot_run_is_one_message(complaint, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "net", raising=False)
    (tmp_path / "net.py").write_text(OWN)
    for overrides, message in (
        (["mode=tests"], "`mode` must be one of 'train', 'validate', 'test', 'predict', got 'tests'"),
        (["mode=test", "data._target_=net.WithoutTest"], "`mode=test` needs a `test_dataloader` of the data"),
        (["mode=predict"], "`mode=predict` has no callback that keeps predictions. Set `callbacks=prediction_writer`"),
    ):
        assert message in complaint(*CUSTOM, *QUIET, "strategy=single", *overrides)
    del sys.modules["net"]


@pytest.mark.slow
@pytest.mark.parametrize(("logger", "files"), [("tensorboard", "*tfevents*"), ("wandb", "*.wandb")])
def test_loggers_of_other_packages_record_what_the_table_records(tmp_path, logger, files):
    stopping = ["callbacks=early_stopping", "callbacks.early_stopping.monitor=my_val"]
    stopping += ["callbacks.early_stopping.divergence_threshold=0.0"]  # any value is above
    overrides = ["strategy=ddp_join", f"logger={logger}", *stopping, "trainer.max_epochs=9"]
    done = run(tmp_path, "run", *overrides, WANDB_MODE="offline")
    assert {*results(tmp_path, "run")} == {"my_test", "my_val"}
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 3  # one validation, one test
    recorded = b"".join(path.read_bytes() for path in (tmp_path / "run").rglob(files))
    assert [name in recorded for name in (b"my_val", b"my_test", b"my_train")] == [True, True, False]
    listed = [line.split()[-2] for line in done.stdout.splitlines() if f" {logger}/" in line]
    assert listed == [f"{logger}/"]


@pytest.mark.slow
@pytest.mark.parametrize(("debug", "steps"), [("fast", 1), ("overfit", 50)])
def test_a_model_is_tried_on_one_batch(tmp_path, debug, steps):
    done = run(tmp_path, "run", "strategy=ddp_join", f"debug={debug}")
    assert re.search(rf"optimizer steps\s+│ {steps}\s", done.stdout)
    assert ("my_test" in results(tmp_path, "run")) == (debug == "fast")
    assert (tmp_path / "run" / "metrics.csv").exists() == (debug == "overfit")


@pytest.mark.slow
def test_a_sweeper_finds_the_best_job(tmp_path):
    sweep = ["--multirun", "hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1"]
    choices = ["hydra.sweeper.direction=minimize", "+model.rate=interval(0.0,0.5)", "hydra.sweeper.sampler.seed=1"]
    (tmp_path / "net.py").write_text(OWN)
    overrides = [*sweep, *CUSTOM, *QUIET, *choices, "test=false", "trainer.max_epochs=1"]
    for name, jobs in (("ddp_join", 2), ("single", 4)):  # in processes of each job, and in the process of the sweep
        own = [f"strategy={name}", f"hydra.sweeper.n_trials={jobs}", f"hydra.sweep.dir={name}"]
        command(tmp_path, *overrides, *own, "optimized_metric=my_val", limit=280, OMP_NUM_THREADS="1")
        values = [results(tmp_path, f"{name}/{number}")["my_val"] for number in range(jobs)]
        best = yaml.safe_load((tmp_path / name / "optimization_results.yaml").read_text())
        assert best["best_value"] == min(values) < max(values)
        settings = yaml.safe_load((tmp_path / name / str(values.index(min(values))) / "config.yaml").read_text())
        assert [*best["best_params"].values()] == [settings["model"]["rate"]]
    done = command(tmp_path, *overrides, *own, "optimized_metric=value", code=1, OMP_NUM_THREADS="1")
    assert "`optimized_metric=value` was not logged: the run has logged my_val. Use one of its keys" in done.stderr
