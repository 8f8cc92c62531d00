"""Errors about a source, which knows its own keys and not the section of the config that it stands in."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from titanlike.errors import UserError


class SourceError(UserError):
    """Its message begins with the key of the source's section that it is about, `paths: ...`, without the section,
    which only who opens the source knows."""


@contextlib.contextmanager
def section_errors(prefix: str) -> Generator[None]:
    """Let an error about a source name its key whole: `prefix` is "data.", "data.sources[1].", or "--" of a script."""
    section = prefix.rstrip(".-")
    try:
        yield
    except SourceError as error:
        raise UserError(f"{prefix}{error}") from error
    except UserError as error:
        if not section:
            raise UserError(str(error).replace("data.tokenizer", "--tokenizer")) from error
        raise UserError(f"{section}: {error}") from error
