"""scripts/prepare_data.py and the token files that it makes."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanlike.data.config import SourceConfig
from titanlike.data.prepare import prepare
from titanlike.data.records import list_pieces, read_pieces
from titanlike.data.store import TokenStore
from titanlike.data.token_files import open_shards
from titanlike.errors import UserError
from titanlike.tokenizer import ByteTokenizer, load_tokenizer

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "prepare_data.py"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def texts(folder: Path, tokenizer: Any, name: str) -> list[str]:
    store = TokenStore(open_shards(str(folder), tokenizer, name))
    parts = store.parts(*store.spans(np.arange(store.n_documents)), find_starts=False)
    documents = [part.tokens.tolist() for part in parts]
    assert all(document[-1] == tokenizer.end_id for document in documents)
    return [tokenizer.decode(document[:-1]) for document in documents]


def command(out: Path, bpe: Path, workers: int, whole_library: bool = False) -> list[str]:
    source = ["--source", "python-stdlib"]
    if not whole_library:
        source = ["--paths", str(Path(sysconfig.get_paths()["stdlib"]) / "[a-c]*.py")]
    arguments = ["--tokenizer", str(bpe), "--workers", str(workers), "--shard-mb", "0.4" if whole_library else "0.05"]
    return [sys.executable, str(SCRIPT), "--out", str(out), *source, *arguments]


@pytest.mark.parametrize(
    ("workers", "whole_library"),
    [
        (1, False),
        (2, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_a_kill_and_a_restart_give_the_bytes_of_an_uninterrupted_run(
    tmp_path: Path, bpe: Path, workers: int, whole_library: bool
) -> None:
    """Work lost at a kill, shards half written, or token files that depend on how they were made."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, bpe, 3 - workers, whole_library), check=True, capture_output=True)
    process = subprocess.Popen(
        command(killed, bpe, workers, whole_library), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(list(killed.glob("shard-*.json"))) < 5:
        assert process.poll() is None, "it was over before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    finished = {path.name: path.stat().st_mtime_ns for path in killed.glob("shard-*.json")}
    made = {name: (killed / name.replace(".json", ".tokens")).stat().st_mtime_ns for name in finished}
    with pytest.raises(UserError, match="not finished"):
        open_shards(str(killed), load_tokenizer(str(bpe)), str(bpe))
    subprocess.run(command(killed, bpe, workers, whole_library), check=True, capture_output=True)
    assert contents(killed) == contents(whole)
    assert {n: (killed / n.replace(".json", ".tokens")).stat().st_mtime_ns for n in made} == made  # not made again


def test_no_process_outlives_a_killed_parent(tmp_path: Path, bpe: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "out", bpe, 2), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not list(tmp_path.glob("out/*.json")):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while True:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_form_of_input_gives_its_documents_in_order(tmp_path: Path, bpe: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard
    from datasets import Dataset

    documents = [f"document {i}: naïve\n" * (1 + i % 7) for i in range(500)]
    lines = "".join(json.dumps({"id": i, "content": text}) + "\n" for i, text in enumerate(documents)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(lines))
    table = pyarrow.table({"content": documents, "id": list(range(500))})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=70)
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(documents):
        (tmp_path / "texts" / f"{i:03}.txt").write_text(text)
    Dataset.from_dict({"content": documents}).save_to_disk(str(tmp_path / "saved"))
    sources = {
        name: SourceConfig(source="text", paths=[str(tmp_path / name)], text_field="content")
        for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "texts/*.txt")
    }
    sources["saved"] = SourceConfig(source="huggingface", dataset=str(tmp_path / "saved"), text_field="content")
    tokenizer = load_tokenizer(str(bpe))
    for name, source in sources.items():
        # Pieces much smaller than a file, so that lines and row groups are cut.
        records = [record for _, _, record in read_pieces(list_pieces(source, 997), ["content"])]
        assert [r if isinstance(r, str) else r["content"] for r in records] == documents, name
    for name in ("a.jsonl", "saved"):
        out = tmp_path / ("tokens-" + name)
        metadata = prepare(sources[name], str(bpe), out, workers=1, shard_bytes=5000)
        assert len(metadata["shards"]) > 3
        assert texts(out, tokenizer, str(bpe)) == documents
        # It is done: a second time nothing is made.
        before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}
        assert prepare(sources[name], str(bpe), out, workers=1, shard_bytes=5000) == metadata
        assert {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"} == before


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"</s>": 0, "a": 1, "b": 70_000, "[UNK]": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("a b b a")
    name = str(tmp_path / "tokenizer.json")
    source = SourceConfig(source="text", paths=[str(tmp_path / "t.txt")])
    metadata = prepare(source, name, tmp_path / "out", workers=1, shard_bytes=1000)
    assert (metadata["dtype"], metadata["vocab_size"]) == ("uint32", 70_001)
    store = TokenStore(open_shards(str(tmp_path / "out"), load_tokenizer(name), name))
    [part] = store.parts(np.array([0]), np.array([store.n_tokens]), find_starts=False)
    assert part.tokens.tolist() == [1, 70_000, 70_000, 1, 0]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": f"some text {i}"}) + "\n" for i in range(50)))
    source = SourceConfig(source="text", paths=[str(tmp_path / "t.jsonl")])
    prepare(source, "bytes", tmp_path / "tokens", workers=1, shard_bytes=400)
    return tmp_path / "tokens"


def opening_fails(folder: Path, words: str, tokenizer: Any = None) -> None:
    with pytest.raises(UserError, match=words):
        open_shards(str(folder), tokenizer or ByteTokenizer(), "bytes")


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_broken_token_files_are_named(tokens: Path, bpe: Path) -> None:
    opening_fails(tokens, "another tokenizer than data.tokenizer = 'bytes'", load_tokenizer(str(bpe)))
    victim = tokens / "shard-00001.tokens"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-2])
    opening_fails(tokens, r"shard-00001.tokens is truncated: \d+ bytes, where \d+ tokens of uint16 are \d+")
    victim.write_bytes(np.frombuffer(whole, dtype="<u2").astype("<u4").tobytes())
    opening_fails(tokens, "shard-00001.tokens is too long, or of another dtype")
    victim.unlink()
    opening_fails(tokens, "shard-00001.tokens cannot be read: No such file")
    victim.write_bytes(whole)
    starts = tokens / "shard-00000.starts"
    whole = starts.read_bytes()
    starts.write_bytes(whole[:-8] + (10**6).to_bytes(8, "little"))
    opening_fails(tokens, "does not belong to")
    starts.write_bytes(whole)
    edit(tokens, dtype="int64")
    opening_fails(tokens, "dtype must be uint16 or uint32, got 'int64'")
    edit(tokens, dtype="uint16", shards=[{"name": "shard-00000", "tokens": 1, "documents": 1, "largest_id": 300}])
    (tokens / "shard-00000.tokens").write_bytes((300).to_bytes(2, "little"))
    (tokens / "shard-00000.starts").write_bytes(np.array([0, 1], dtype="<i8").tobytes())
    opening_fails(tokens, "has the id 300, and the vocabulary has 257 ids")
    (tokens / "metadata.json").write_text("{")
    opening_fails(tokens, "metadata.json cannot be read")
    opening_fails(tokens.parent, "has no metadata.json")
    opening_fails(tokens / "none", "does not exist")


def test_a_folder_with_something_else_is_left_alone(tokens: Path, tmp_path: Path) -> None:
    source = SourceConfig(source="text", paths=[str(tmp_path / "t.jsonl")])
    before = contents(tokens)
    with pytest.raises(UserError, match="already holds the tokens of another source or tokenizer"):
        prepare(source, "bytes", tokens, workers=1, shard_bytes=500)
    assert contents(tokens) == before
    with pytest.raises(UserError, match="is not empty"):
        prepare(source, "bytes", tmp_path, workers=1, shard_bytes=500)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n\n{"text": "b"\n', "bad.jsonl, line 3 is not JSON"),
        ('{"text": "a"}\n{"tekst": "b", "id": 1}\n', "bad.jsonl, line 2 has no field 'text'; its fields: tekst, id"),
        ('{"text": "a"}\n[1]\n', "bad.jsonl, line 2 is not a JSON object"),
        ('{"text": "a"}\n{"text": ' + "[" * 100_000 + "\n", "bad.jsonl, line 2 is not JSON"),
        ('{"text": "a"}\n{"text": 3}\n', "bad.jsonl, line 2: the field 'text' is not a string but int"),
        ('{"text": ""}\n', "there is no text to tokenise"),
        ("", "there is no text to tokenise"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.jsonl").write_text(content)
    source = SourceConfig(source="text", paths=[str(tmp_path / "bad.jsonl")])
    with pytest.raises(UserError, match=words):
        prepare(source, "bytes", tmp_path / "out", workers=1, shard_bytes=14)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 100)[:-20])
    (tmp_path / "no.jsonl.zst").write_bytes(b"text")
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    for name, words in (
        ("latin.txt", "latin.txt is not UTF-8"),
        ("cut.jsonl.gz", "cut.jsonl.gz cannot be read"),
        ("no.jsonl.zst", "no.jsonl.zst cannot be read"),
        ("no.parquet", "no.parquet is not a Parquet file"),
        ("*.csv", r"\*.csv names no file"),
        ("", "is a folder: give a glob"),
    ):
        source = SourceConfig(source="text", paths=[str(tmp_path / name)])
        with pytest.raises(UserError, match=words):
            list(read_pieces(list_pieces(source, 2**20), ["text"]))


def test_the_script_says_a_mistake_in_one_line(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / "out"), "--paths", str(tmp_path / "*.txt")]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"error: --paths: {tmp_path / '*.txt'} names no file\n"
