"""Counters of samples, as steps keep them in attributes and buffers."""

from collections.abc import Hashable, Sequence


class SampleCounters:
    """Recognises counters that each replica has raised by the number of its samples, and that are to be added up.

    With chunks of one sample, a counter of samples looks like one of steps: it is one if it has been before.
    """

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def recognise(self, key: Hashable, raised: Sequence[float], sizes: Sequence[int]) -> bool:
        """Tell whether a number counts samples.

        Args:
            key: Names the number.
            raised: By how much each replica has raised it.
            sizes: Samples of each of them.
        """
        if list(raised) != list(sizes) or (set(sizes) == {1} and key not in self._known):
            return False
        self._known.add(key)
        return True
