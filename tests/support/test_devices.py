import json

import pytest
import torch
from torch import nn

from lightning_ddp_ext import DDPCheckpointStrategy
from tests.gpu import kit
from tests.support import devices


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine with one GPU, of which nothing is used."""
    monkeypatch.setenv(devices.VARIABLE, "cuda")
    monkeypatch.setattr(devices, "device_count", lambda: 1)


def test_replicas_and_ranks_share_a_device_where_devices_are_fewer(one_gpu):
    assert devices.devices(3) == [torch.device("cuda", 0)] * 3
    assert devices.backend(1) == "nccl"
    assert devices.backend(2) == "gloo"
    strategy = DDPCheckpointStrategy(process_group_backend="gloo")
    options = devices.trainer_options(strategy, 2)
    assert options == {"accelerator": "cuda", "strategy": strategy, "devices": 1}
    assert strategy.parallel_devices == [torch.device("cuda", 0)] * 2


@pytest.mark.cpu_only("names the CPU")
def test_a_trainer_on_cpus_gets_its_options_unchanged():
    assert devices.trainer_options("ddp_join", 2) == {"accelerator": "cpu", "strategy": "ddp_join", "devices": 2}


def test_tensors_of_tests_lie_on_a_device_unless_they_say_otherwise():
    with devices.tensors_on_device(torch.device("meta")):
        layer = nn.Linear(2, 3)
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(1))
        on_cpu = torch.zeros(2, device="cpu")
    assert {layer.weight.device.type, drawn.device.type} == {"meta"}
    assert on_cpu.device.type == torch.zeros(1).device.type == "cpu"


def test_a_page_has_the_result_of_each_test_and_the_end_of_each_failure():
    tests = [
        {"test": "tests/gpu/test_a.py::test_waits[one]", "outcome": "passed", "lines": [], "values": {"peak": "1 | 2"}},
        {"test": "tests/gpu/test_a.py::test_fails", "outcome": "failed", "lines": ["E   AssertionError: 3"]},
    ]
    result = {"machine": {"GPU": "1 x Model"}, "parts": {"features": {"tests": tests, "seconds": 5, "date": "today"}}}
    page = kit.make_page(result)
    for line in (
        "| GPU | 1 x Model |", "| features | 1 passed, 1 failed | 5 | today |",
        "| waits[one] | passed | peak: 1 \\| 2 |", "E   AssertionError: 3",
    ):  # fmt: skip
        assert line in page.splitlines()


@pytest.mark.slow
def test_the_kit_adds_a_part_to_the_result(tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"parts": {"speed": {"tests": [], "seconds": 1, "date": "", "speed": {}}}}))
    monkeypatch.setattr(kit, "feature_files", lambda: ["tests/gpu/test_parity.py"])
    arguments = ["--accelerator=cpu", f"--out={tmp_path}", "-k", "fingerprints", "features"]
    assert kit.main(arguments) == 0
    parts = json.loads(file.read_text())["parts"]
    assert parts.keys() == {"features", "speed"}
    assert [test["outcome"] for test in parts["features"]["tests"]] == ["passed"] * 6
    assert "## Speed" in (tmp_path / "gpu.md").read_text()
