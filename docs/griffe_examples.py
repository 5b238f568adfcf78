"""Lets mkdocstrings show an "Example:" section as code.

griffe, which reads the docstrings for mkdocstrings, takes only "Examples:" for doctests. It would render the singular
as prose, and ">>>" as three nested quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Reads "Example:" as "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mend the docstring of one object before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
