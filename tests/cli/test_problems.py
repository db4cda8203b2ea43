import pytest
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_ddp_ext.cli.errors import describe


def problem(*overrides, build="strategy"):
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        try:
            node = compose("train", overrides=list(overrides))
            OmegaConf.resolve(node[build])
            instantiate(node[build])
        except (HydraException, OmegaConfBaseException) as error:
            return describe(error)
    raise AssertionError(f"{overrides} was accepted")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "strategy.gpu0_batchsize=2",
            [
                "`strategy.gpu0_batchsize` is not a setting",
                "Did you mean `gpu0_batch_size`?",
                "Valid: balance, batch_dim",
            ],
        ),
        ("strategy.gpu0_batch_size=two", ["`strategy.gpu0_batch_size`", "'two'", "Integer"]),
        (
            "strategy=balanced",
            ["`strategy=balanced` does not exist", "`balanced_dp`", "ddp_checkpoint, ddp_join, fsdp"],
        ),
        ("strategy.gpu0_batch_size=-1", ["in `strategy`: `gpu0_batch_size` must be at least 0, got -1"]),
        ("strategy.split=[1,x]", ["`strategy.split[1]`", "'x'", "Float"]),
        ("strategy.split=3", ["`strategy.split`"]),
        ("strategy=[1", ["`strategy=[1` is not a valid override"]),
        ("sede=1", ["`sede` is not a setting", "Did you mean `seed`?"]),
        (
            "network.interface=eth0",
            [
                "`network.interface` is not a setting",
                "Choose an option first, `network=...` (auto, interface, loopback)",
            ],
        ),
        ("trainer.max_epoch=1", ["`trainer.max_epoch` is not a setting", "Did you mean `max_epochs`?"]),
    ],
)
def test_a_mistake_is_one_message_that_names_the_key_and_what_is_valid(override, parts):
    message = problem(override)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_a_missing_value_is_asked_for():
    message = problem("model=custom", build="model")
    assert message == "`model._target_` has no value. Set it with `model._target_=...`."


def test_a_class_that_cannot_be_found_is_named():
    message = problem("model._target_=nowhere.Net", build="model")
    assert message.startswith("in `model`: ")
    assert "nowhere" in message
