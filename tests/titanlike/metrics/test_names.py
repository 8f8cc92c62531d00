"""One list of names: the document is made from it, and it covers what is logged."""

from __future__ import annotations

from pathlib import Path

from titanlike.metrics import names
from titanlike.metrics.flops import FlopsPerToken
from titanlike.metrics.throughput import Throughput

ROOT = Path(__file__).resolve().parents[3]


def test_docs_are_made_from_the_list() -> None:
    """A hand-written list drifts from the code. To update: python -m titanlike.metrics.names > docs/metrics.md"""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == names.document()


def test_names_are_listed_once() -> None:
    listed = [entry.name for entries in names.SECTIONS.values() for entry in entries]
    assert len(listed) == len(set(listed))


def test_families_and_unknown_names() -> None:
    assert names.find("val_loss/python").name == "val_loss/<set>"
    assert names.find("val_loss").name == "val_loss"
    assert names.find("loss").unit == "nats/token"
    assert names.unknown(["loss", "los", "val_loss/a/b", "lr/embeddings", "time/lunch_s"]) == [
        "los",
        "time/lunch_s",
        "val_loss/a/b",
    ]


def test_rates_are_listed() -> None:
    rates = Throughput(1, 1, FlopsPerToken(1, 1, 1), peak_flops=1, measured_peak_flops=1).values(1.0)
    assert names.unknown(rates) == []
