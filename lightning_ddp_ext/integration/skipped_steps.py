"""Parts of a batch - of a rank, or of a replica - for which `training_step` returns None."""

import warnings


class SkipWarning:
    """The warning that `training_step` has returned None for a part of a batch; shown once."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, part: str) -> None:
        """Warn, unless that was done before.

        Args:
            part: Where it returned None, such as `"rank 1"`.
        """
        if self._is_shown:
            return
        self._is_shown = True
        warnings.warn(
            f"`training_step` returned None on {part}, whose samples have no weight in the gradient of this step."
            " Ignore this warning if that is on purpose. Log with `sync_dist=True` before returning None, if at all.",
            category=UserWarning,
            stacklevel=3,
        )
