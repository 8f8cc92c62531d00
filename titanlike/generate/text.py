"""Text out of tokens as they come: whole characters for a terminal, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

HELD = 8
"""Tokens that may wait for the rest of a character; more are text that has none."""


class TextStream:
    """Turns tokens into pieces of text that end between characters; the pieces add up to the text of all tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._begin = 0  # the tokens from here to _end give context to the decoder (some drop a leading space)
        self._end = 0  # the tokens before this have been given out

    def push(self, ids: Sequence[int], last: bool = False) -> str:
        """The text that these tokens complete; `last`: no more will come."""
        self._ids += ids
        whole = self._decode(self._ids[self._begin :])
        if whole.endswith("�") and not last and len(self._ids) - self._end < HELD:
            return ""
        known = self._decode(self._ids[self._begin : self._end])
        self._begin, self._end = self._end, len(self._ids)
        return whole[len(known) :]


class StopStrings:
    """Finds the end of a text that should stop at one of several strings."""

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self.strings = [string for string in strings if string]
        self._decode = decode
        # As many tokens as the longest string has bytes can hold it, and a few more for a character that is cut.
        self._tokens = max((len(string.encode()) for string in self.strings), default=0) + 4
        self.longest = max((len(string) for string in self.strings), default=0)

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the text of `ids` ends with or just after a stop string. To be asked after every token."""
        if not self.strings:
            return False
        tail = self._decode(ids[-self._tokens :])
        return any(string in tail for string in self.strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string in it."""
        places = [place for string in self.strings if (place := text.find(string)) >= 0]
        return text[: min(places)] if places else text
