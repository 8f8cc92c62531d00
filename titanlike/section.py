"""The base of every config section: frozen, strict about unknown keys, documented field by field."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the TOML config. The docstring under each field is its help text; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
