"""The tokenizer files of a Hugging Face export: copied, or written for the byte tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

END_OF_BYTES = 256  # titanlike.tokenizer.ByteTokenizer.end_id
END_TEXT = "<|endoftext|>"


def tokenizer_files(fingerprint: str, source: str) -> tuple[dict[str, bytes], int | None, str]:
    """(files by name, id of the end token, a sentence about them) for a checkpoint's tokenizer.

    `fingerprint` is what the checkpoint was trained with, `source` its config's `data.tokenizer`: "bytes", a
    `tokenizer.json`, or its folder. Without the very same file nothing is written, and the sentence says why.
    """
    if fingerprint == "bytes":
        return byte_tokenizer_files(), END_OF_BYTES, "tokenizer: bytes, written as tokenizer.json"
    path = Path(source) / "tokenizer.json" if Path(source).is_dir() else Path(source)
    if not path.is_file():
        return {}, None, f"no tokenizer files: {path}, which the run used, is not there"
    content = path.read_bytes()
    if "sha256:" + hashlib.sha256(content).hexdigest() != fingerprint:
        return {}, None, f"no tokenizer files: {path} is not the file that the run used"
    from titanlike.tokenizer import FileTokenizer

    end_id = FileTokenizer(path).end_id
    copied = {"tokenizer.json": content}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (path.parent / name).is_file():
            copied[name] = (path.parent / name).read_bytes()
    if "tokenizer_config.json" not in copied:
        copied["tokenizer_config.json"] = _tokenizer_config(_token_of(content, end_id))
    return copied, end_id, f"tokenizer: copied from {path.parent}"


def _token_of(content: bytes, token_id: int) -> str:
    for token in json.loads(content).get("added_tokens", []):
        if token["id"] == token_id:
            return token["content"]
    return next(token for token, number in json.loads(content)["model"]["vocab"].items() if number == token_id)


def _tokenizer_config(end: str) -> bytes:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
    return json.dumps(config, indent=1).encode()


def _printable() -> dict[int, str]:
    """GPT-2's alphabet of byte-level tokenizers: printable bytes stand for themselves, others for 256, 257, ..."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def byte_tokenizer_files() -> dict[str, bytes]:
    """`tokenizer.json` of a tokenizer whose ids are the bytes of UTF-8, and 256 the end of a text."""
    alphabet = _printable()
    end: dict[str, Any] = {"id": END_OF_BYTES, "content": END_TEXT, "special": True}
    end |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {alphabet[byte]: byte for byte in range(256)},
            "merges": [],
        },
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False, indent=1).encode(),
        "tokenizer_config.json": _tokenizer_config(END_TEXT),
    }
