"""Text to ids and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from titanlike.errors import UserError
from titanlike.tokenizer import ByteTokenizer, load_tokenizer, token_dtype

TEXTS = ["def f(x):\n    return x\n", "naïve 日本 🙂", "", " leading and trailing ", "\ud83d half a pair"]


def test_bytes_come_back_as_they_went_in() -> None:
    tokenizer = ByteTokenizer()
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS)):
        assert tokenizer.encode(text) == ids.tolist() == list(text.encode("utf-8", errors="replace"))
        assert tokenizer.decode([*ids, tokenizer.end_id]) == text.replace("\ud83d", "?")
    assert tokenizer.decode([0xE6, 0x97]) == "\N{REPLACEMENT CHARACTER}"
    assert (tokenizer.vocab_size, tokenizer.end_id, token_dtype(257)) == (257, 256, np.uint16)


def test_a_tokenizer_file_gives_the_ids_of_its_library(tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    for name in (tokenizer_folder, tokenizer_folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(name))
        batch = tokenizer.encode_batch(TEXTS)
        for text, ids in zip(TEXTS[:-1], batch):
            assert tokenizer.encode(text) == ids.tolist() == backend.encode(text).ids
            assert tokenizer.decode([*ids, tokenizer.end_id]) == text
        assert tokenizer.decode(batch[-1]) == "? half a pair"
        assert tokenizer.vocab_size == backend.get_vocab_size()
        assert tokenizer.end_id == backend.token_to_id("<|endoftext|>")


def test_the_end_token_is_the_one_that_the_folder_names(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    for end in ("Ġ", {"content": "Ġ", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "chat_template": "{{ 1 }}"}))
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer.end_id == model["model"]["vocab"]["Ġ"]
        assert (tokenizer.chat_template, tokenizer.special_tokens) == ("{{ 1 }}", {"eos_token": "Ġ"})
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ 2 }}"


def test_equal_files_have_equal_fingerprints(tokenizer_folder: Path, tmp_path: Path) -> None:
    content = (tokenizer_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content)
    same = load_tokenizer(str(tmp_path)).fingerprint
    assert same == load_tokenizer(str(tokenizer_folder)).fingerprint
    (tmp_path / "tokenizer.json").write_text(content.replace("<|endoftext|>", "<|end_of_text|>"))
    assert load_tokenizer(str(tmp_path)).fingerprint != same


def test_what_is_no_tokenizer_is_one_sentence(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer: .*none does not exist; give \"bytes\""):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"tokenizer.json does not exist"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer.json of Hugging Face"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not a tokenizer.json of Hugging Face"):
        load_tokenizer(str(tmp_path))
    content = (tokenizer_folder / "tokenizer.json").read_text().replace("<|endoftext|>", "<|stop|>")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="has no end-of-text token .* name it as eos_token"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError, match="tokenizer_config.json is not a JSON object"):
        load_tokenizer(str(tmp_path))


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["def return def return naive leading trailing"] * 3, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
