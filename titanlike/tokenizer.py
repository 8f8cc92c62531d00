"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`.

A tokenizer has:
- `vocab_size`: ids are in [0, vocab_size)
- `end_id`: the id that ends a document
- `fingerprint`: a string that is equal for tokenizers that give equal ids, and that checkpoints and token files keep
- `encode(text) -> list of ids`, without any special token; `encode_batch(texts)`; `decode(ids) -> text`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from titanlike.errors import UserError

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end|>", "[EOS]", "<|im_end|>", "[SEP]")
"""Names under which vocabularies keep their end-of-text token, tried in this order where no file names it."""


class Tokenizer(Protocol):
    """What the rest of titanlike asks of a tokenizer."""

    vocab_size: int
    end_id: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, as arrays of an unsigned type."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""
        ...


class ByteTokenizer:
    """One id per byte of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    end_id = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        """Open the file. `tokenizer_config.json` beside it, if there is one, names the end token.

        Raises:
            UserError: no such file, not a tokenizer, or a vocabulary without an end token.
        """
        from tokenizers import Tokenizer as Backend

        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"data.tokenizer: {path} cannot be read: {error.strerror}") from None
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"data.tokenizer: {path} is not a tokenizer.json of Hugging Face: {error}") from None
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.fingerprint = "sha256:" + hashlib.sha256(content).hexdigest()
        self.end_id = self._find_end(path)

    def _find_end(self, path: Path) -> int:
        names: list[str] = []
        beside = path.parent / "tokenizer_config.json"
        if beside.is_file():
            end: Any = None
            try:
                end = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError):
                raise UserError(f"data.tokenizer: {beside} is not a JSON object") from None
            name = end.get("content") if isinstance(end, dict) else end
            names = [name] if isinstance(name, str) else []
        for name in [*names, *END_NAMES]:
            found = self._backend.token_to_id(name)
            if found is not None:
                return int(found)
        raise UserError(
            f"data.tokenizer: {path} has no end-of-text token that could end a document: name it as eos_token in "
            f"{beside.name} beside it, or give the vocabulary one of {', '.join(END_NAMES)}"
        )

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        dtype = token_dtype(self.vocab_size)
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError):  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
            whole = [text.encode("utf-8", errors="replace").decode("utf-8") for text in texts]
            encodings = self._backend.encode_batch_fast(whole, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=True)


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The type that token ids are stored as: uint16 where the vocabulary fits, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: "bytes", a `tokenizer.json`, or a folder that has one.

    Raises:
        UserError: there is no such tokenizer.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(tokenizer_file(name))


def tokenizer_file(name: str) -> Path:
    """The `tokenizer.json` that `data.tokenizer` names, as a file or by its folder.

    Raises:
        UserError: there is none.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UserError(f'data.tokenizer: {path} does not exist; give "bytes", or the path of a tokenizer.json')
    return path
