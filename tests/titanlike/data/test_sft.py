"""Prompts with completions, and conversations: what of them is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.titanlike.data.corpora import batches, ids, run_config
from titanlike.data import open_data
from titanlike.data.batch import IGNORE
from titanlike.data.config import SourceConfig
from titanlike.data.prepare import prepare
from titanlike.errors import UserError
from titanlike.tokenizer import load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'other' %}{{ raise_exception('who?') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def chat(bpe: Path, tmp_path: Path) -> Path:
    """The tokenizer with a chat template."""
    folder = tmp_path / "chat"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    config = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def learnt(config: Any) -> list[tuple[str, str]]:
    """(all of a row's text, what of it is learnt) of the first pass."""
    data = open_data(config, 0, 1)
    found = []
    for step in batches(config, 30):
        for tokens, labels, name in zip(step[0].tokens, step[0].labels, step[0].sample_ids):
            if ":0:" in name:
                kept = labels[labels != IGNORE].tolist()
                text = "".join(data.tokenizer.decode([t]) if t != data.tokenizer.end_id else "#" for t in kept)
                found.append((data.tokenizer.decode(tokens.tolist()).rstrip("\0"), text))
    return found


PAIRS = [{"prompt": f"add {i}+1: ", "completion": f"{i + 1}!"} for i in range(40)]


@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_only_completions_are_learnt(tmp_path: Path, packing: str) -> None:
    """The model learns to ask questions, or the end token is not learnt and it never stops."""
    path = write(tmp_path / "pairs.jsonl", PAIRS)
    config = run_config(
        data__source="text",
        data__paths=[path],
        data__format="completion",
        data__packing=packing,
        data__document_mask=True,
        data__validation_fraction=0,
        train__seq_len=64,
    )
    text = "".join(some for _, some in learnt(config))
    expected = [f"{i + 1}!" for i in range(40)]
    if packing == "best_fit":
        assert sorted(text.split("#")) == sorted(["", *expected])
    else:  # rows cut them anywhere
        assert sorted(text) == sorted("".join(expected) + "#" * 40)


def test_prompts_are_tokenised_as_when_the_model_is_asked(tmp_path: Path, bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    record = {"prompt": "def se", "completion": "lf(self): return"}
    assert tokenizer.encode("def self(self): return") != tokenizer.encode("def se") + tokenizer.encode(
        "lf(self): return"
    )
    config = run_config(
        data__source="text",
        data__paths=[write(tmp_path / "p.jsonl", [record])],
        data__format="completion",
        data__tokenizer=str(bpe),
        data__validation_fraction=0,
    )
    batch = batches(config, 1)[0][0]
    expected = tokenizer.encode("def se") + tokenizer.encode("lf(self): return")
    assert batch.tokens[0, : len(expected)].tolist() == expected
    assert batch.labels[0, : len(expected)].tolist() == [IGNORE] * (len(tokenizer.encode("def se")) - 1) + [
        *tokenizer.encode("lf(self): return"),
        tokenizer.end_id,
    ]


CONVERSATIONS = [
    {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"what is {i}?"},
            {"role": "assistant", "content": f" a number{i}"},
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": f"yes{i}"},
        ]
    }
    for i in range(12)
]


@pytest.mark.parametrize("how", ["text", "tokens"])
def test_only_what_the_assistant_says_is_learnt(tmp_path: Path, chat: Path, how: str) -> None:
    path = write(tmp_path / "chats.jsonl", CONVERSATIONS)
    source: dict[str, Any] = {"source": "text", "paths": [path], "format": "chat"}
    if how == "tokens":
        prepare(SourceConfig(**source), str(chat), tmp_path / "tokens", workers=1, shard_bytes=900)
        assert len(list((tmp_path / "tokens").glob("*.learnt"))) > 1
        source = {"source": "tokens", "paths": [str(tmp_path / "tokens")]}
    config = run_config(
        **{f"data__{key}": value for key, value in source.items()},
        data__tokenizer=str(chat),
        data__packing="best_fit",
        data__document_mask=True,
        data__validation_fraction=0,
        train__seq_len=160,
        train__global_batch_size=4,
    )
    rows = learnt(config)
    said = "".join(text for _, text in rows).split("<|im_end|>\n")
    assert sorted(said) == sorted(["", *(f"a number{i}" for i in range(12)), *(f"yes{i}" for i in range(12))])
    assert all(
        text.startswith("<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat is ") for text, _ in rows
    )
    assert ids(batches(config, 6, dp=4)) == ids(batches(config, 6))


@pytest.mark.parametrize(
    ("source", "record", "words"),
    [
        (
            {"format": "completion"},
            {"prompt": "a", "answer": "b"},
            "x.jsonl, line 2 has no field 'completion'; its fields: prompt, answer",
        ),
        (
            {"format": "completion"},
            {"prompt": 1, "completion": "b"},
            "x.jsonl, line 2: the field 'prompt' is not a string",
        ),
        (
            {"format": "completion", "packing": "best_fit"},
            {"prompt": "a" * 30, "completion": "b" * 30},
            "x.jsonl, line 2 has 61 tokens, and a row takes 33",
        ),
        ({"format": "chat"}, {"messages": "hello"}, "x.jsonl, line 2, field 'messages' is not a list of messages"),
        (
            {"format": "chat"},
            {"messages": [{"role": "other"}, {"role": "assistant"}]},
            "line 2, field 'messages': the chat template refuses it: who",
        ),
        ({"format": "chat", "messages_field": "turns"}, {"messages": []}, "has no field 'turns'"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, chat: Path, source: dict[str, Any], record: Any, words: str) -> None:
    good = {"prompt": "a", "completion": "b", "messages": [], "turns": []}
    path = write(tmp_path / "x.jsonl", [good, record])
    overrides = {f"data__{key}": value for key, value in source.items()}
    tokenizer = str(chat) if source["format"] == "chat" else "bytes"
    with pytest.raises(UserError, match=words):
        open_data(run_config(data__source="text", data__paths=[path], data__tokenizer=tokenizer, **overrides), 0, 1)


def test_a_template_that_rewrites_the_past_is_refused(tmp_path: Path, chat: Path) -> None:
    """Some templates strip the reasoning of earlier answers: a mask by prefix would mark the wrong tokens."""
    config = json.loads((chat / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages | length }}" + TEMPLATE
    (chat / "tokenizer_config.json").write_text(json.dumps(config))
    path = write(tmp_path / "x.jsonl", CONVERSATIONS)
    with pytest.raises(UserError, match=r"x.jsonl, line 1, .*changes what came before when it adds message \d"):
        open_data(
            run_config(data__source="text", data__paths=[path], data__format="chat", data__tokenizer=str(chat)), 0, 1
        )


def test_mistakes_in_formats_are_one_sentence(tmp_path: Path, bpe: Path) -> None:
    (tmp_path / "t.txt").write_text("plain")
    base = {"data__source": "text", "data__paths": [str(tmp_path / "t.txt")]}
    for more, words in (
        ({"data__format": "chat", "data__tokenizer": str(bpe)}, "needs a tokenizer with a chat template"),
        ({"data__format": "completion"}, 't.txt is plain text, and format = "completion" needs records'),
        ({"data__prompt_field": "q"}, 'prompt_field has no effect with format = "text"'),
        ({"data__format": "chat", "data__text_field": "q"}, 'text_field has no effect with format = "chat"'),
    ):
        with pytest.raises(UserError, match=words):
            open_data(run_config(**base, **more), 0, 1)
