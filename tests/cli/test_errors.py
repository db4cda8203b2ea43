"""Mistakes end with one readable line, errors of the user's code with their traceback; bash completes settings."""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import pytest

from lightning_ddp_ext.cli import train
from tests.cli.commands import OWN, command, names_setting
from tests.support.programs import run_python

# Mistakes that are refused before torch and Lightning are imported, which takes seconds, and others.
EARLY = {
    "trainer.max_epoch=3": "`trainer.max_epoch` is not a setting. Did you mean `max_epochs`?",
    "strategy=ddp_jion": "`strategy=ddp_jion` does not exist. Did you mean `ddp_join`?",
    "strategy.gpu0_batch_size=two": "`strategy.gpu0_batch_size`: Value 'two'",
    "strategy.gpu0_batch_size=-1": "in `strategy`: `gpu0_batch_size` must be at least 0, got -1",
    "strategy=balanced_ddp strategy.split=[0,0]": "in `strategy`: `split` must hold non-negative numbers",
    "strategy=ddp_join strategy.uneven_inputs=stopp": "in `strategy`: `uneven_inputs` must be one of 'join', 'stop'",
    "strategy=ddp_checkpoint strategy.start_method=thread": "in `strategy`: `start_method` must be one of 'popen'",
    "strategy=ddp cluster=manual cluster.num_nodes=2": "`cluster.node_rank` has no value",
    "model.width=${nowhere}": "`model.width=${nowhere}`: Interpolation key 'nowhere' not found",
    "seed=-1": "`seed` must be at least 0, got -1",
    "trainer.accumulate_grad_batches=0": "`trainer.accumulate_grad_batches` must be at least 1, got 0",
    "network=loopback": "`network=loopback` is set, but `strategy=balanced_dp` runs in one process",
    "ckpt_path=nope.ckpt": "`ckpt_path=nope.ckpt` does not exist",
    "lightning=lightning": "`lightning` must be one of ",
}
LATE = {
    "strategy.gpu0_batchsize=2": "Did you mean `gpu0_batch_size`? Valid: balance, batch_dim",
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
    "process_group=gloo": "or choose `balanced_ddp`, `ddp_checkpoint` or `ddp_join`",
    "strategy=single trainer.devices=2": "`strategy=single` uses one device",
    "strategy=ddp network=interface network.interface=nosuch0": "interface `nosuch0` not found",
    "strategy=ddp network=interface": "no interface named",
    "strategy=ddp process_group=mpi": "no backend `mpi`; available: gloo",
    "strategy=ddp process_group=gloo process_group.init_method=x://y": "`init_method=x://y` is of no known",
    "logger=null": "with `logger=null`: a group is null or a number. Leave it out for its default; callbacks",
    "trainer.sync_batchnorm=true": "cannot synchronise batch normalisation",
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


# Runs the command with each line of the input; prints exit code, number of lines, imported libraries, and first line.
PROGRAM = """
import contextlib, io, os, sys
import lightning_ddp_ext
from hydra.core.global_hydra import GlobalHydra
from lightning_ddp_ext.__main__ import main
from lightning_ddp_ext._import_names import LIBRARIES

for line in sys.stdin.read().splitlines():
    sys.argv, code, printed = ["lightning-ddp-ext", *line.split()], 0, io.StringIO()
    os.environ["HYDRA_FULL_ERROR"] = "0"
    GlobalHydra.instance().clear()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    found, lines = sorted({"torch", *LIBRARIES} & sys.modules.keys()), printed.getvalue().splitlines()
    print(code, len(lines), found, *lines[:1], flush=True)
"""


@pytest.mark.slow
@pytest.mark.cpu_only("is about imports")
def test_a_mistake_ends_with_one_line_that_names_the_setting_and_some_before_torch_and_lightning_are_imported(tmp_path):
    lines = ["--help", *EARLY, *LATE]
    done = run_python("-c", PROGRAM, cwd=tmp_path, input="\n".join(lines))
    printed = dict(zip(lines, done.stdout.splitlines(), strict=True))
    assert re.match(r"0 \d+ \[\] lightning-ddp-ext trains a model", printed.pop("--help"))
    for overrides, line in printed.items():
        expected = (EARLY | LATE)[overrides]
        assert line.startswith("1 1 [] lightning-ddp-ext: " if overrides in EARLY else "1 1 ["), (overrides, line)
        assert "] lightning-ddp-ext: " in line
        assert expected in line, (overrides, line)
        assert expected or names_setting(overrides.split()[-1].partition("=")[0], line), (overrides, line)
    assert "'torch']" in printed["strategy.split=[1,2,3]"]  # the libraries would be found
    assert not list(tmp_path.iterdir())  # no run folder


def test_a_refused_run_leaves_no_folder_unless_other_files_are_in_it(complaint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "results.csv").touch()
    for folder in ([], ["hydra.run.dir=runs/other"], ["hydra.run.dir=mine"], ["hydra.run.dir=."]):
        assert "has 3 entries for 2 devices" in complaint("strategy.split=[1,2,3]", *folder)
        assert not (tmp_path / "runs").exists()
    assert (tmp_path / "mine" / "results.csv").exists()
    assert tmp_path.exists()


def test_a_mistake_that_shows_when_a_run_starts_ends_without_a_traceback(complaint):
    for overrides in MISTAKES_AT_THE_START:
        line = complaint(*overrides.split(), "trainer.enable_progress_bar=false")
        assert names_setting(overrides.split()[-1].partition("=")[0], line), (overrides, line)


def test_a_damaged_checkpoint_ends_with_one_line_under_a_strategy_of_lightning_too(complaint, tmp_path):
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(b"PK damaged")
    line = complaint("strategy=single", f"ckpt_path={path}", "trainer.enable_progress_bar=false")
    assert f": `ckpt_path={path}` cannot be read as a checkpoint" in line


def test_the_process_of_a_mistake_prints_one_line_and_exits_with_1(tmp_path):
    done = command(tmp_path, "strategy.gpu0_batchsize=2", code=1)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_traceback_of_a_mistake_is_printed_on_request(tmp_path):
    done = command(tmp_path, "strategy.split=[1,2,3]", code=1, HYDRA_FULL_ERROR="1")
    assert "Traceback (most recent call last)" in done.stderr


@pytest.mark.slow
def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text(
        OWN.replace("loss = self", "raise ArithmeticError('own bug')\n        loss = self")
    )
    done = command(
        tmp_path,
        "model=custom",
        "model._target_=mine.Net",
        "+model.width=2",
        "data=custom",
        "data._target_=mine.Data",
        code=1,
    )
    assert "ArithmeticError: own bug" in done.stderr
    assert 'mine.py", line' in done.stderr
    assert "Raised in replica 0 of 2 on device cpu, whose chunk is samples 0 to 3 of a batch of 8." in done.stderr


@pytest.mark.parametrize("step", ["training_step", "test_step"])
def test_an_error_that_explains_itself_is_one_line_also_in_the_test(complaint, tmp_path, step):
    (tmp_path / f"{step}_of_mine.py").write_text(
        OWN
        + f"""
from lightning_ddp_ext.errors import OtherRankError

def fail(self, batch, batch_idx):
    raise OtherRankError("rank 1 failed: boom")

Net.{step} = fail
"""
    )
    line = complaint(
        "strategy=single", "model=custom", f"model._target_={step}_of_mine.Net", "+model.width=2", "data=custom",
        f"data._target_={step}_of_mine.Data", "trainer.accelerator=cpu", "trainer.max_steps=1", "callbacks=none",
        "logger=none", "plot=false", "trainer.enable_progress_bar=false",
    )  # fmt: skip
    assert line.endswith("rank 1 failed: boom")


def test_a_full_disk_of_the_run_folder_is_one_line_with_a_remedy(complaint, monkeypatch, tmp_path):
    def fill(config, folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "config.yaml"))

    monkeypatch.setattr(train, "keep_config", fill)
    line = complaint("strategy=single", "trainer.accelerator=cpu")
    assert line.startswith("lightning-ddp-ext: a disk is full: [Errno 28] No space left on device: ")
    assert line.endswith("Free some space, or choose another run folder with `hydra.run.dir=...`.")


def test_digits_without_scikit_learn_are_one_line_that_says_what_to_install(complaint, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name != "sklearn" and find_spec(name, *rest))
    assert complaint("strategy=single", "trainer.accelerator=cpu").endswith(
        "Run `pip install scikit-learn`, or choose other data, such as `experiment=byte_transformer`."
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_groups_options_and_keys(tmp_path):
    script = tmp_path / "lightning-ddp-ext"
    script.write_text(f"#!{sys.executable}\nfrom lightning_ddp_ext.__main__ import main\nmain()\n")
    script.chmod(0o755)
    complete = """
        eval "$(lightning-ddp-ext -sc install=bash)"
        for COMP_LINE in "lightning-ddp-ext strategy=ddp_" "lightning-ddp-ext trainer.max_e"; do
            COMP_WORDS=($COMP_LINE); COMP_CWORD=1; COMP_POINT=${#COMP_LINE}
            hydra_bash_completion; echo "${COMPREPLY[@]}"
        done
        complete -p lightning-ddp-ext | sed "s/.* -F //"
    """
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", complete], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "strategy=ddp_checkpoint strategy=ddp_join", "trainer.max_epochs=",
        "hydra_bash_completion lightning-ddp-ext",
    ], done.stderr  # fmt: skip
