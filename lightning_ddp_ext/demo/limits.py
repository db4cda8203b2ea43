"""What the arguments of the demo models and data may be: generous, but nothing that fills the memory or never ends."""

from lightning_ddp_ext.arguments import check_integer, check_number

_DEFAULT = "Leave it out for the default."
_MOST = {
    "batch_size": 10**6, "block_size": 2**16, "files": 10**6, "max_bytes": 10**12, "width": 4096, "depth": 256,
    "heads": 4096,
}  # fmt: skip
_LAST_SEED = 2**63 - 1


def check_sizes(**sizes: object) -> None:
    """Check arguments that count something, by name.

    Raises:
        TypeError: If one is not an integer.
        ValueError: If one is below 1, or absurdly large.
    """
    for name, value in sizes.items():
        check_integer(name, value, least=1, most=_MOST[name], remedy=_DEFAULT)


def check_seed(seed: object) -> None:
    """Check the seed of a generator.

    Raises:
        TypeError: If it is not an integer.
        ValueError: If torch does not take it.
    """
    check_integer("seed", seed, most=_LAST_SEED, remedy=_DEFAULT)


def check_learning_rate(learning_rate: object) -> None:
    """Check a learning rate.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is negative or not finite.
    """
    check_number("learning_rate", learning_rate, least=0, remedy=_DEFAULT)
