"""Arguments that a strategy does not have: Lightning would accept any, and fail within `fit`."""

import difflib
import inspect

_NOT_NEEDED = {
    "find_unused_parameters": "parameters that no rank uses are found in every step",
    "static_graph": "nothing is assumed about the graph",
    "gradient_as_bucket_view": "gradients are views of the buckets already",
    "broadcast_buffers": "buffers are equal after every step already",
}


def refuse_unknown(unknown: dict[str, object], strategy: type) -> None:
    """Refuse arguments by name.

    Args:
        unknown: What was given.
        strategy: The class whose constructor knows the other arguments.

    Raises:
        TypeError: If there are any.
    """
    for name in unknown:
        if name in _NOT_NEEDED:
            raise TypeError(f"`{name}` is not needed: {_NOT_NEEDED[name]}. Delete the argument.")
        names = list(inspect.signature(strategy).parameters)
        close = difflib.get_close_matches(name, names, n=1)
        remedy = f"Did you mean `{close[0]}`?" if close else "See its documentation for those that are."
        raise TypeError(f"`{name}` is not an argument of this strategy. {remedy}")
