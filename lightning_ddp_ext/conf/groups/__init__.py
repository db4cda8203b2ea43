"""The groups strategy, process_group, network and cluster alone, for the search path of other Hydra applications.

Importing it, as `pkg://lightning_ddp_ext.conf.groups` does, stores the packaged files of these groups.
"""

import importlib.resources

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

for _group in ("strategy", "process_group", "network", "cluster"):
    for _file in importlib.resources.files("lightning_ddp_ext.conf").joinpath(_group).iterdir():
        _text = _file.read_text(encoding="utf-8")
        _package = "_global_" if _text.startswith("# @package _global_") else None
        ConfigStore.instance().store(_file.name, OmegaConf.create(_text), _group, _package, "lightning_ddp_ext")
