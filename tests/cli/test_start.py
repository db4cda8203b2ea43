"""Help, completion and refused settings come before torch and Lightning are imported, which takes seconds."""

import os
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu_only("is about imports")

# Runs the command with each line of the input, and prints its exit code, its first line, and the imported libraries.
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
    found = sorted({"torch", *LIBRARIES} & sys.modules.keys())
    print(code, found, *printed.getvalue().splitlines()[:1], flush=True)
"""
REFUSED = {
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
# Needs the number of devices, and with it torch: a control that the libraries would be found.
NEEDS_TORCH = "strategy.split=[1,2,3]"


@pytest.mark.slow
def test_help_and_refused_settings_import_neither_torch_nor_lightning(tmp_path):
    lines = ["--help", *REFUSED, NEEDS_TORCH]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, input="\n".join(lines), capture_output=True, text=True,
        timeout=180, check=True,
    )  # fmt: skip
    printed = dict(zip(lines, done.stdout.splitlines(), strict=True))
    assert printed.pop("--help").startswith("0 [] lightning-ddp-ext trains a model")
    control = printed.pop(NEEDS_TORCH)
    assert "'torch']" in control
    assert "has 3 entries for 2 devices" in control
    for overrides, line in printed.items():
        assert line.startswith("1 [] lightning-ddp-ext: "), (overrides, line)
        assert REFUSED[overrides] in line, (overrides, line)


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
