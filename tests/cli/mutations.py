"""Random mistakes on the command line and in constructors."""

import datetime
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import lightning_ddp_ext

CONF = Path(lightning_ddp_ext.__file__).parent / "conf"
MUTATIONS = int(os.environ.get("LIGHTNING_DDP_EXT_MUTATIONS", "500"))
SHARE = 0.12  # of command lines, which are slow; the others are arguments of constructors
SEED = 6

# Together, the bases have every setting that works without a GPU.
BASES = [
    [],
    ["strategy=single", "experiment=byte_transformer", "callbacks=gradient_check"],
    ["experiment=slow_replica", "callbacks=replica_consistency"],
    ["strategy=ddp_join", "process_group=gloo", "network=auto", "callbacks=join_report"],
    ["strategy=ddp_join", "experiment=stdlib_stream"],
    ["strategy=ddp_checkpoint", "callbacks=replica_consistency"],
    ["strategy=ddp", "process_group=gloo", "network=loopback"],
    ["strategy=ddp", "cluster=manual", "cluster.num_nodes=2", "cluster.node_rank=0", "cluster.main_address=127.0.0.1"],
]

VALUES = [
    "abc", "''", "'ünïcode ☃'", "[1,2]", "[]", "[[1],[x]]", "{a:1}", "{a:{b:[1,{c:2}]}}", "null", "true", "-1", "0",
    "7", "2.5", "-0.5", "nan", "inf", "-inf", "1e308", "1000000000000000000000000000000", "'two words'",
    "no.such.Class", "/no/such/file", "'" + 3000 * "x" + "'", "'99:99:99:99'", "'${nowhere}'", "auto", "none",
    "'a\\nb'",
]  # fmt: skip

OBJECTS = [
    None, True, -1, 0, 3, 2.5, float("nan"), float("inf"), 1e308, 10**30, "", "abc", "ünïcode ☃", b"bytes", [], [1],
    ["a"], [[1]], (1, 2), {}, {"a": 1}, {1, 2}, object(), object, len, lambda batch: "x", 1 + 2j,
    datetime.timedelta(0), datetime.timedelta(-1), datetime.timedelta.max, "x" * 3000, "/no/such/file", "tcp://:0",
    "file://x", "a..b",
]  # fmt: skip


class Override(NamedTuple):
    """Right arguments of the command, one more that may be wrong, and the key that an error has to name."""

    base: tuple[str, ...]
    text: str
    key: str


class Argument(NamedTuple):
    """An argument of a constructor that may be wrong."""

    target: str
    name: str
    value: Any


def check_readable(kind, mutations, problems, refused, capsys):
    """Print how many mutations were refused, and fail with the problems of the messages."""
    with capsys.disabled():
        print(f"\n{len(mutations)} {kind}: {refused} refused, {len(mutations) - refused} accepted", end=" ")
    assert not problems, f"{len(problems)} of {len(mutations)}:\n" + "\n".join(problems)
    assert 0 < refused < len(mutations)


def settings() -> dict[tuple[str, ...], list[str]]:
    """List the keys of all settings for each base."""
    found = {}
    with initialize_config_module("lightning_ddp_ext.conf", version_base="1.3"):
        for base in BASES:
            config = OmegaConf.to_container(compose("train", overrides=base), resolve=False)
            found[tuple(base)] = sorted(_keys(config, ""))
    return found


def _keys(node: Any, prefix: str) -> Iterator[str]:
    for key, value in node.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{name}.")
        if prefix or not isinstance(value, dict):
            yield name


def groups() -> dict[str, list[str]]:
    """List the packaged options by group."""
    return {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in CONF.iterdir()}


def draw_overrides(number: int, seed: int) -> list[Override]:
    """Draw wrong or odd arguments of the command."""
    draw = random.Random(seed)
    keys, options = settings(), groups()
    return [_draw_override(draw, keys, options) for _ in range(number)]


def _draw_override(
    draw: random.Random, keys: dict[tuple[str, ...], list[str]], options: dict[str, list[str]]
) -> Override:
    base = draw.choice(list(keys))
    key = draw.choice(keys[base])
    kind = draw.choice(["value"] * 6 + ["misspelt", "removed", "below", "group"])
    if kind == "value":
        return Override(base, f"{key}={draw.choice(VALUES)}", key)
    if kind == "misspelt":
        wrong = _misspell(draw, key)
        return Override(base, f"{wrong}={draw.choice(VALUES)}", wrong)
    if kind == "removed":
        return Override(base, f"~{key}", key)
    if kind == "below":
        return Override(base, f"+{key}.{draw.choice(['deeper', 'a.b.c'])}={draw.choice(VALUES)}", key)
    group = draw.choice(sorted(options))
    others = sorted({*itertools.chain(*options.values())})
    wrong = ["nosuch", "null", "''", "[]", "[a,b]", "{a:1}", "1", draw.choice(others)]
    return Override(base, f"{group}={draw.choice(wrong)}", group)


def _misspell(draw: random.Random, key: str) -> str:
    at = draw.randrange(1, len(key))
    way = draw.choice(["double", "drop", "swap"])
    if way == "double":
        return f"{key[:at]}{key[at - 1]}{key[at:]}"
    if way == "drop":
        return f"{key[:at]}{key[at + 1 :]}" or "x"
    return f"{key[: at - 1]}{key[at]}{key[at - 1]}{key[at + 1 :]}"


def draw_arguments(arguments: dict[str, list[str]], number: int, seed: int) -> list[Argument]:
    """Draw wrong or odd arguments, given the names of the arguments of each constructor."""
    draw = random.Random(seed)
    everything = [(target, name) for target, names in arguments.items() for name in names]
    return [Argument(*draw.choice(everything), draw.choice(OBJECTS)) for _ in range(number)]
