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


def test_tensors_of_tests_lie_on_a_device_unless_they_say_otherwise():
    with devices.tensors_on_device(torch.device("meta")):
        layer = nn.Linear(2, 3)
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(1))
        on_cpu = torch.zeros(2, device="cpu")
    assert {layer.weight.device.type, drawn.device.type} == {"meta"}
    assert on_cpu.device.type == torch.zeros(1).device.type == "cpu"


@pytest.mark.slow
def test_the_kit_adds_a_part_to_the_result(tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"
    earlier = {"speed": {"tests": [], "seconds": 1, "date": "", "speed": {}}}
    file.write_text(json.dumps({"machine": kit.describe_machine(), "accelerator": "cpu", "parts": earlier}))
    monkeypatch.setattr(kit, "files_of_part", lambda part: ["tests/gpu/test_parity.py"])
    arguments = ["--accelerator=cpu", f"--out={tmp_path}", "-k", "recurrent and balanced_dp", "features"]
    assert kit.main(arguments) == 0
    parts = json.loads(file.read_text())["parts"]
    assert parts.keys() == {"features", "speed"}
    assert [test["outcome"] for test in parts["features"]["tests"]] == ["passed"]
    assert "## Speed" in (tmp_path / "gpu.md").read_text()
    assert kit.main([*arguments[:3], "recurrent and ddp_join", "features"]) == 0  # added to the first one
    monkeypatch.setattr(kit, "files_of_part", lambda part: ["tests/gpu/missing.py"])
    assert kit.main(arguments) == 1
    outcomes = [test["outcome"] for test in json.loads(file.read_text())["parts"]["features"]["tests"]]
    assert outcomes == ["passed", "passed", "failed"]
    with pytest.raises(SystemExit):
        kit.main(["--accelerator=meta", *arguments[1:]])
