"""Text that was not written here, on a terminal or in a log: of a model, of documents, of files' and tensors' names.

A model that knows bytes makes any of them, and an escape sequence moves the cursor, renames the window or worse.
"""

from __future__ import annotations

import re

# Control characters but newline and tab; those that turn the direction of the rest of a line; halves of characters,
# which cannot be written at all.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with control characters as Python writes them: `\\x1b`, `\\r`, `\\u202e`. Newlines and tabs stay."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def printable_json(text: str) -> str:
    """The same for JSON, which stays the same value: what `json.dumps` leaves, such as DEL and the second controls."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
