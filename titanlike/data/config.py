"""The `[data]` and `[validation]` sections."""

from titanlike.section import Section


class DataConfig(Section):
    """Where the text comes from."""

    source: str = "python-stdlib"
    """The source text of the running Python's standard library."""


class ValidationConfig(Section):
    """Held-out text."""
