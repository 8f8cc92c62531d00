"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`.

A tokenizer has:
- `vocab_size`: ids are in [0, vocab_size)
- `end_id`: the id that ends a document
- `fingerprint`: a string that is equal for tokenizers that give equal ids, and that checkpoints and token files keep
- `chat_template`: how a conversation becomes text, a Jinja template that may name the `special_tokens` by their roles,
  such as `bos_token`; None if there is none
- `encode(text) -> list of ids`, without any special token; `encode_batch(texts)`; `decode(ids) -> text`
"""

from __future__ import annotations

import functools
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
    chat_template: str | None
    special_tokens: dict[str, str]

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
    bytes_per_token = (*[1] * 256, 0)
    chat_template = None
    special_tokens: dict[str, str] = {}  # noqa: RUF012 - never changed

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
        config = _read_config(path.parent / "tokenizer_config.json")
        self.special_tokens = {
            role: token["content"] if isinstance(token, dict) else token
            for role, token in config.items()
            if role.endswith("_token") and (isinstance(token, str) or (isinstance(token, dict) and "content" in token))
        }
        self.chat_template = _chat_template(path.parent / "chat_template.jinja", config)
        self.end_id = self._find_end(path)

    def _find_end(self, path: Path) -> int:
        named = self.special_tokens.get("eos_token")
        for name in (*((named,) if named is not None else ()), *END_NAMES):
            found = self._backend.token_to_id(name)
            if found is not None:
                return int(found)
        raise UserError(
            f"data.tokenizer: {path} has no end-of-text token that could end a document: name it as eos_token in a "
            f"tokenizer_config.json beside it, or give the vocabulary one of {', '.join(END_NAMES)}"
        )

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_with_template(self, text: str) -> list[int]:
        """The ids of a text with the special tokens that the file's own template puts around it, as transformers has
        it."""
        return self._backend.encode(text).ids

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

    @functools.cached_property
    def bytes_per_token(self) -> list[int] | None:
        """How many bytes of text each id stands for, special tokens none. None where that depends on the tokens around
        it: in all but byte-level vocabularies, whose tokens have a letter for each byte."""
        content = json.loads(self._backend.to_str())
        if (content.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        counts = [0] * self.vocab_size
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            counts[number] = len(token)
        for added in content["added_tokens"]:
            counts[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return counts


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise UserError(f"data.tokenizer: {path} is not a JSON object")
    return config


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """As Hugging Face keeps it: a file of its own, or in tokenizer_config.json, alone or as one of several by name."""
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else None


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
