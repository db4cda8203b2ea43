"""Strategies without the functions and modules of Python that only POSIX systems have, as on Windows."""

import subprocess
import sys

import pytest

# Names of Python's standard library that Windows lacks.
HIDING = """
import builtins, os, platform, signal, sys

import psutil, torch, torchmetrics  # their builds for other systems differ
from torch.utils.data import DataLoader, TensorDataset

platform.system = lambda: "Windows"  # as Lightning asks
import lightning.pytorch as pl

HIDDEN = {
    os: "fork forkpty geteuid getuid getpgid killpg register_at_fork sched_getaffinity setpgid setsid uname statvfs",
    signal: "SIGKILL SIGALRM SIGCHLD SIGHUP SIGUSR1 SIGUSR2 pthread_sigmask set_wakeup_fd sigwait strsignal",
}
for module, names in HIDDEN.items():
    for name in names.split():
        vars(module).pop(name, None)
for name in "fcntl grp pwd resource termios".split():
    sys.modules[name] = None
signals = {signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGSEGV, signal.SIGTERM}
signal.valid_signals = lambda: signals
opening, exists = builtins.open, os.path.exists


def is_hidden(name):  # from the package; psutil reads /proc on this system
    return str(name).startswith("/proc") and sys._getframe(2).f_globals["__name__"].startswith("lightning_ddp_ext")


def open_file(name, *args, **options):
    if is_hidden(name):
        raise FileNotFoundError(name)
    return opening(name, *args, **options)


builtins.open = open_file
os.path.exists = lambda name: not is_hidden(name) and exists(name)
sys.platform = "win32"
"""
TRAINING = """
from lightning_ddp_ext import BalancedDataParallelStrategy, BalancedDDPStrategy
from lightning_ddp_ext.callbacks import BalanceReport
from lightning_ddp_ext.resume.preemption import shield_workers


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.layer(batch[0]).sum(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


torch.manual_seed(0)
rows = torch.randn(21, 4, dtype=torch.float64)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=8)
trained = []
for strategy, devices in [("auto", 1), (locals()[sys.argv[1]](split=[1, 3]), 2)]:
    torch.manual_seed(1)
    net = Net().double()
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[BalanceReport()],
    )
    trainer.fit(net, loader)
    trainer.save_checkpoint("net.ckpt")
    trainer.test(net, loader, ckpt_path="net.ckpt", verbose=False)
    trained.append(net.layer.weight)
torch.testing.assert_close(*trained, rtol=0, atol=1e-12)
workers = DataLoader([0], num_workers=1)
shield_workers(workers, rank=0, requeue_signal=signal.SIGTERM)
assert workers.worker_init_fn is None
print("trained as one device")
"""


def run_python(code, folder, *arguments):
    (folder / "program.py").write_text(code)
    command = [sys.executable, "program.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


USES = {
    "import fcntl": "ModuleNotFoundError",
    "os.fork()": "AttributeError",
    "os.geteuid()": "AttributeError",
    "signal.SIGKILL": "AttributeError",
    "eval(\"open('/proc/stat')\", {'__name__': 'lightning_ddp_ext'})": "FileNotFoundError",
}
ATTEMPTS = "".join(
    f"try:\n    {use}\n    print('found')\nexcept Exception as error:\n    print(type(error).__name__)\n"
    for use in USES
)


@pytest.mark.parametrize(
    "strategy", ["BalancedDataParallelStrategy", pytest.param("BalancedDDPStrategy", marks=pytest.mark.slow)]
)
def test_a_strategy_trains_without_the_names_of_posix_which_are_really_hidden(strategy, tmp_path):
    run = run_python(HIDING + TRAINING + ATTEMPTS, tmp_path, strategy)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-6:] == ["trained as one device", *USES.values()]
