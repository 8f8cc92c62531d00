"""Text out of tokens as they come."""

from __future__ import annotations

import pytest

from titanlike.generate.text import StopStrings, TextStream
from titanlike.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 ✓ 🙂🙂", "", "a\n\tb"])
def test_pieces_are_whole_characters_and_add_up(text: str) -> None:
    """A terminal shows half of a character, which stays broken."""
    stream = TextStream(TOKENIZER.decode)
    pieces = [stream.push([i]) for i in TOKENIZER.encode(text)]
    assert "�" not in "".join(pieces)
    assert "".join(pieces) + stream.push([], last=True) == text


def test_bytes_that_are_no_text_are_given_out_too() -> None:
    stream = TextStream(TOKENIZER.decode)
    ids = [200] * 30 + TOKENIZER.encode("ok") + [240]
    pieces = [stream.push([i]) for i in ids]
    whole = "".join(pieces) + stream.push([], last=True)
    assert whole.endswith("ok�") and len(whole) > 20
    assert max(map(len, pieces)) <= 9


def test_a_decoder_that_drops_leading_spaces_keeps_them_inside() -> None:
    words = ["▁one", "▁two", "s", "▁three"]
    stream = TextStream(lambda ids: "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" "))
    assert "".join(stream.push([i]) for i in range(4)) == "one twos three"


def test_a_stop_string_is_found_over_tokens_at_once() -> None:
    stop = StopStrings(["END", "né"], TOKENIZER.decode)
    ids: list[int] = []
    found = []
    for i in TOKENIZER.encode("the EN END of it"):
        ids.append(i)
        found.append(stop.reached(ids))
    assert found.index(True) == len("the EN END") - 1
    assert stop.cut("the EN END of it") == "the EN "
    assert stop.cut("née END") == ""
    assert stop.cut("nothing") == "nothing"
    assert stop.reached(TOKENIZER.encode("né"))
    assert not StopStrings([""], TOKENIZER.decode).reached(TOKENIZER.encode("né"))
