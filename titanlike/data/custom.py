"""A user's own source: a class that the config names by its import path.

It is made as `Class(tokenizer, seq_len, **arguments)`, and is one of two:

- a collection of samples: `len(it)` and `it[i]` for i in [0, len). A sample is a row of its own, at most seq_len + 1
  ids. The order, the passes, the held-out part and the cursor are made from the numbers i.
- a stream of documents: `iter(it)`, which begins at the beginning or where `it.load_state_dict(state)` said, and
  `it.state_dict()`, JSON: where the stream stands after the document that it gave last. Documents are concatenated and
  cut.

A sample or document is a text, which is tokenised and gets the end token, or a sequence of ids, which is taken as it
is. A `fingerprint` attribute, a string, tells a checkpoint whether the content is still the same.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from titanlike.data.batch import Row
from titanlike.data.permutation import key_of, permute
from titanlike.data.rows import ShuffledRows
from titanlike.data.source_errors import SourceError
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer

Item = str | Any
"""A text, or a sequence of ids."""


def make(path: str, tokenizer: Tokenizer, seq_len: int, arguments: Mapping[str, Any]) -> Any:
    """The object that the class at `path` makes.

    Raises:
        UserError: there is no such class, it cannot be made, or it is neither a collection nor a stream.
    """
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", path):
        raise SourceError(f"source = {path!r} is not an import path such as package.module:Class")
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SourceError(
            f"source = {path!r}: the module {module_name!r} cannot be imported ({error}): is its folder on PYTHONPATH?"
        ) from error
    made_from = getattr(module, class_name, None)
    if not isinstance(made_from, type):
        raise SourceError(f"source = {path!r}: the module {module_name!r} has no class {class_name!r}")
    try:
        made = made_from(tokenizer, seq_len, **arguments)
    except TypeError as error:
        raise SourceError(f"source = {path!r}: it cannot be made with its arguments: {error}") from error
    if not (_is_collection(made) or all(hasattr(made, n) for n in ("__iter__", "state_dict", "load_state_dict"))):
        raise SourceError(
            f"source = {path!r}: the class needs __len__ and __getitem__, or __iter__, state_dict and load_state_dict"
        )
    if _is_collection(made) and len(made) == 0:
        raise SourceError(f"source = {path!r} is empty: its length is 0")
    return made


def is_stream(made: Any) -> bool:
    """Whether the object is a stream, not a collection."""
    return not _is_collection(made)


def _is_collection(made: Any) -> bool:
    return hasattr(made, "__len__") and hasattr(made, "__getitem__")


def fingerprint(path: str, made: Any, arguments: Mapping[str, Any]) -> str:
    """What a checkpoint keeps of the object."""
    own = getattr(made, "fingerprint", None)
    return str(own) if own is not None else f"{path} {dict(arguments)!r} {'' if is_stream(made) else len(made)}".strip()


def ids_of(item: Item, tokenizer: Tokenizer, where: str) -> np.ndarray:
    """The ids of a text with the end token, or of a sequence of ids.

    Raises:
        UserError: it is neither, or an id is negative.
    """
    if isinstance(item, str):
        return np.array([*tokenizer.encode(item), tokenizer.end_id], dtype=np.int64)
    try:
        ids = np.asarray(item)
    except ValueError:
        ids = np.zeros((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) < 2:
        raise UserError(f"{where} is not a text or a sequence of 2 or more ids, but {type(item).__name__}")
    if ids.min() < 0:
        raise UserError(f"{where} has the id {ids.min()}")
    return ids


class CollectionRows(ShuffledRows):
    """The samples of a user's collection, but for those that are held out; or those alone."""

    def __init__(
        self, made: Any, tokenizer: Tokenizer, seq_len: int, name: str, seed: int, *, fraction: float, held_out: bool
    ) -> None:
        n = len(made)
        count = min(round(n * fraction), n - 1)
        chosen = permute(np.arange(count), n, key_of("validation", seed)) if count else np.empty(0, dtype=np.int64)
        self._held = np.sort(chosen)
        self._before = self._held - np.arange(count)  # how many samples are left before each held-out one
        super().__init__(count if held_out else n - count, name, seed)
        self._made = made
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._held_out = held_out

    def rows(self, numbers: np.ndarray, sample_ids: Sequence[str]) -> list[Row]:
        return [self._row(number, name) for number, name in zip(numbers.tolist(), sample_ids)]

    def _row(self, number: int, sample_id: str) -> Row:
        if self._held_out:
            index = int(self._held[number])
        else:
            index = number + int(np.searchsorted(self._before, number, side="right"))
        where = f"sample {index} of the source {self.name}"
        ids = ids_of(self._made[index], self._tokenizer, where)
        if len(ids) > self._seq_len + 1:
            raise UserError(f"{where} has {len(ids)} ids, more than seq_len + 1 = {self._seq_len + 1}")
        return Row(ids, np.empty(0, dtype=np.int64), sample_id)
