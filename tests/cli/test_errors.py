"""Mistakes end with one readable line, and errors of the user's code with their traceback."""

import errno
import importlib.util

import pytest

from lightning_ddp_ext.cli import train
from tests.cli.commands import OWN, command, names_setting

MISTAKES = {
    "strategy.gpu0_batchsize=2": "Did you mean `gpu0_batch_size`? Valid: balance, batch_dim",
    "strategy.gpu0_batch_size=two": "`strategy.gpu0_batch_size`: Value 'two' of type 'str' could not be",
    "strategy.gpu0_batch_size=-1": "in `strategy`: `gpu0_batch_size` must be at least 0, got -1",
    "strategy=balanced": "`strategy=balanced` does not exist. Did you mean `balanced_dp`? Valid: balanced_ddp, ",
    "strategy.split=[1,x]": "`strategy.split[1]`: Value 'x' of type 'str' could not be converted to Float",
    "strategy=[1": "`strategy=[1` is not a valid override",
    "sede=1": "`sede` is not a setting. Did you mean `seed`?",
    "lr=0.1": "`lr` is not a setting. Did you mean `model.learning_rate`?",
    "batch_size=64": "`batch_size` is not a setting. Did you mean `data.batch_size`?",
    "resume=last": "`resume` is not a setting. Did you mean `ckpt_path`?",
    "split=[1,2]": "`split` is not a setting. Did you mean `strategy.split`?",
    "strategy=ddp_join strategy.gpu0_batch_size=2": "It is an argument of the strategies `balanced_dp` and `bal",
    "strategy=ddp_join strategy.backend=gloo": "not a setting. Did you mean `process_group_backend`?",
    "strategy=ddp_join strategy.checkpointing=x": "not a setting. Did you mean `activation_checkpointing`?",
    "docter": "`docter` is not a valid override. Did you mean `doctor`?",
    "+strategy.gpu0_bsz=4": "in `strategy`: `gpu0_bsz` is not an argument of this strategy. Did you mean `gpu0_batch",
    "model=byte_transformer": "`model=byte_transformer` cannot train on `data=digits`. Add `data=stdlib_text`",
    "data=stdlib_stream": "`model=digits_cnn` cannot train on `data=stdlib_stream`. Add `data=digits`",
    "network.interface=eth0": "Choose an option first, `network=...` (auto, interface, loopback)",
    "model=custom": "`model._target_` has no value. Set it with `model._target_=...`.",
    "model._target_=nowhere.Net data=digits": "in `model`: No module named 'nowhere'",
    "model._target_=nowhere.Net": "`model._target_=nowhere.Net` would train on `data=digits`, the default. Add `data=",
    "model._target_=lightning_ddp_ext.demo.digits.DigitsCN": "has no `DigitsCN`. Did you mean `DigitsCNN`?",
    "strategy.gpu0_batch_size=2 strategy.split=[1,2]": "exclude each other",
    "strategy.split=[1,2,3]": "has 3 entries for 2 devices",
    "network=loopback": "`network=loopback` is set, but `strategy=balanced_dp` runs in one process",
    "process_group=gloo": "or choose `balanced_ddp`, `ddp_checkpoint` or `ddp_join`",
    "strategy=single trainer.devices=2": "`strategy=single` uses one device",
    "strategy=ddp network=interface network.interface=nosuch0": "interface `nosuch0` not found",
    "strategy=ddp network=interface": "no interface named",
    "strategy=ddp process_group=mpi": "no backend `mpi`; available: gloo",
    "strategy=ddp process_group=gloo process_group.init_method=x://y": "`init_method=x://y` is of no known",
    "strategy=ddp cluster=manual cluster.num_nodes=2": "`cluster.node_rank` has no value",
    "logger=null": "with `logger=null`: a group is null or a number. Leave it out for its default; callbacks",
    "ckpt_path=nope.ckpt": "`ckpt_path=nope.ckpt` does not exist",
    "trainer.sync_batchnorm=true": "cannot synchronise batch normalisation",
    "strategy=ddp_join strategy.uneven_inputs=stopp": "`uneven_inputs` must be one of 'join', 'stop'",
    "data.train_fractions=[0.7,0.2]": "in `data`: `train_fractions` must add up to 1, got [0.7, 0.2]",
    "strategy=ddp_join data.train_fractions=[1.0]": "got [1.0] for 2 processes",
    "strategy=ddp data.train_fractions=[0.7,0.3]": "`strategy=ddp` needs equally many",
    # Each of these was a traceback, a hang or a message that named no setting.
    "model.width=1000000000000": "",
    "model.learning_rate=-1": "",
    "seed=inf": "",
    "trainer.limit_train_batches=abc": "",
    "trainer.check_val_every_n_epoch=0": "",
    "trainer.val_check_interval=0": "",
    "trainer.max_time=abc": "",
    "trainer.devices=1000000000000": "",
    "callbacks.checkpoint._target_=builtins.dict": "",
    "logger.csv=7": "",
    "strategy=fsdp": "",
    "strategy=ddp_join process_group=gloo process_group.timeout_seconds=-1": "",
    "strategy=ddp_join cluster.num_nodes=2": "",
    "model=byte_transformer data=stdlib_text model.heads=0": "",
}
# Mistakes that show when a run starts.
MISTAKES_AT_THE_START = [
    "trainer.profiler=7",
    "trainer.val_check_interval=1000",
    "trainer.max_steps=-1 trainer.max_epochs=-1",
    "strategy.batch_dim=7",
    "experiment=slow_replica model.milliseconds_per_sample=[1.0]",
    "strategy=single experiment=byte_transformer model.block_size=16",
    "strategy=single experiment=byte_transformer data.max_bytes=1000",
    "strategy=single ckpt_path=best",
    "strategy=single ckpt_path=nowhere://file",
]


@pytest.mark.slow
def test_a_mistake_ends_with_one_line_that_names_the_setting(call_main, tmp_path):
    for overrides, expected in MISTAKES.items():
        code, printed = call_main(*overrides.split())
        assert (code, printed.out, printed.err.count("\n")) == (1, "", 1), (overrides, printed.err)
        (line,) = printed.err.splitlines()
        assert line.startswith("lightning-ddp-ext: ")
        assert expected in line
        assert expected or names_setting(overrides.split()[-1].partition("=")[0], line), (overrides, line)
    assert not list(tmp_path.iterdir())  # no run folder


def test_a_refused_run_leaves_no_folder_unless_other_files_are_in_it(call_main, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.csv").touch()
    for folder in ([], ["hydra.run.dir=runs/other"], ["hydra.run.dir=mine"], ["hydra.run.dir=."]):
        code, printed = call_main("strategy.split=[1,2,3]", *folder)
        assert (code, "has 3 entries for 2 devices" in printed.err) == (1, True)
        assert not (tmp_path / "runs").exists()
    assert (tmp_path / "mine" / "results.csv").exists()
    assert tmp_path.exists()


def test_a_mistake_that_shows_when_a_run_starts_ends_without_a_traceback(call_main):
    for overrides in MISTAKES_AT_THE_START:
        code, printed = call_main(*overrides.split(), "trainer.enable_progress_bar=false")
        line = printed.err.splitlines()[-1]
        assert (code, "Traceback" in printed.err) == (1, False), overrides
        assert line.startswith("lightning-ddp-ext: ")
        assert names_setting(overrides.split()[-1].partition("=")[0], line), (overrides, line)


def test_a_damaged_checkpoint_ends_with_one_line_under_a_strategy_of_lightning_too(call_main, tmp_path):
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(b"PK damaged")
    code, printed = call_main("strategy=single", f"ckpt_path={path}", "trainer.enable_progress_bar=false")
    assert (code, "Traceback" in printed.err) == (1, False)
    assert f": `ckpt_path={path}` cannot be read as a checkpoint" in printed.err.splitlines()[-1]


def test_the_process_of_a_mistake_prints_one_line_and_exits_with_1(tmp_path):
    done = command(tmp_path, "strategy.gpu0_batchsize=2")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_traceback_of_a_mistake_is_printed_on_request(tmp_path):
    done = command(tmp_path, "strategy.split=[1,2,3]", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr


@pytest.mark.slow
def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(
        OWN.replace("loss = self", "raise ArithmeticError('own bug')\n        loss = self")
    )
    done = command(
        tmp_path, "model=custom", "model._target_=mine.Net", "+model.width=2", "data=custom", "data._target_=mine.Data"
    )
    assert done.returncode == 1
    assert "ArithmeticError: own bug" in done.stderr
    assert 'mine.py", line' in done.stderr
    assert "Raised in replica 0 of 2 on device cpu, whose chunk is samples 0 to 3 of a batch of 8." in done.stderr


@pytest.mark.parametrize("step", ["training_step", "test_step"])
def test_an_error_that_explains_itself_is_one_line_also_in_the_test(call_main, tmp_path, step):
    (tmp_path / f"{step}_of_mine.py").write_text(
        OWN
        + f"""
from lightning_ddp_ext.errors import OtherRankError

def fail(self, batch, batch_idx):
    raise OtherRankError("rank 1 failed: boom")

Net.{step} = fail
"""
    )
    code, printed = call_main(
        "strategy=single", "model=custom", f"model._target_={step}_of_mine.Net", "+model.width=2", "data=custom",
        f"data._target_={step}_of_mine.Data", "trainer.accelerator=cpu", "trainer.max_steps=1", "callbacks=none",
        "logger=none", "plot=false", "trainer.enable_progress_bar=false",
    )  # fmt: skip
    assert code == 1
    assert "Traceback" not in printed.err
    assert printed.err.splitlines()[-1].startswith("lightning-ddp-ext: ")
    assert printed.err.endswith("rank 1 failed: boom\n")


def test_a_full_disk_of_the_run_folder_is_one_line_with_a_remedy(call_main, monkeypatch, tmp_path):
    def fill(config, folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "config.yaml"))

    monkeypatch.setattr(train, "keep_config", fill)
    code, printed = call_main("strategy=single", "trainer.accelerator=cpu")
    line = printed.err.splitlines()[-1]
    assert (code, "Traceback" in printed.err) == (1, False)
    assert line.startswith("lightning-ddp-ext: a disk is full: [Errno 28] No space left on device: ")
    assert line.endswith("Free some space, or choose another run folder with `hydra.run.dir=...`.")


def test_digits_without_scikit_learn_are_one_line_that_says_what_to_install(call_main, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name != "sklearn" and find_spec(name, *rest))
    code, printed = call_main("strategy=single", "trainer.accelerator=cpu")
    assert code == 1
    assert printed.err.splitlines()[-1].endswith(
        "Run `pip install scikit-learn`, or choose other data, such as `experiment=byte_transformer`."
    )
