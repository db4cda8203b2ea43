"""Strategies that `Trainer(strategy=...)` knows by a name."""

from typing import Any

from typing_extensions import override

from lightning_ddp_ext._compat.lightning import OneTrainerStrategy


class Registered(OneTrainerStrategy):
    """Part of a strategy that has a name.

    Attributes:
        strategy_name: The name; empty for a class that only others derive from.
    """

    strategy_name = ""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the name known to Lightning, unless it is."""
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)
