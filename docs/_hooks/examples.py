"""Lets mkdocstrings print doctests under `Example:` as code; it expects `Examples:`."""

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^(\s*)Example:(?=\n\s*>>>)", re.MULTILINE)


class DoctestExamples(griffe.Extension):
    """Renames the heading in every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
