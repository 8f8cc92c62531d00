"""A small corpus and a tokenizer trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tokenizer.json of a byte-level BPE of 600 ids, trained on some of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from titanlike.data.records import stdlib_paths

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [Path(path).read_text(encoding="utf-8", errors="replace") for path in stdlib_paths()[:40]]
    tokenizer.train_from_iterator(texts, trainer)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder
