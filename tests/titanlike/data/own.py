"""Sources as a user writes them; docs/data.md shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Squares:
    """A collection: sample i is about the number i."""

    def __init__(self, tokenizer: Any, seq_len: int, count: int = 100, fault: str = "") -> None:
        self.seq_len = seq_len
        self.count = count
        self.fault = fault

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.fault == "long" and index == 7:
            return [1] * (self.seq_len + 2)
        if self.fault == "id" and index == 7:
            return [1, 2, 999]
        if self.fault == "type" and index == 7:
            return {"text": "no"}
        return f"{index} squared is {index * index}"[: self.seq_len]


class Counting:
    """A stream: it counts, and remembers how far."""

    def __init__(self, tokenizer: Any, seq_len: int, until: int = 10**9) -> None:
        self.until = until
        self.next = 0

    def __iter__(self) -> Iterator[str]:
        while self.next < self.until:
            self.next += 1
            yield f"and {self.next - 1} and " + "so on " * (self.next % 7)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Neither:
    def __init__(self, tokenizer: Any, seq_len: int) -> None:
        pass
