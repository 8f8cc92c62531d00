"""The `[data]` and `[validation]` sections."""

from typing import Literal

from pydantic import Field, model_validator

from titanlike.section import Section


class DataConfig(Section):
    """Where the text comes from, and how it becomes samples."""

    source: Literal["python-stdlib", "text"] = "python-stdlib"
    """python-stdlib: the source text of the running Python's standard library, which is on every machine.
    text: the files of data.paths."""

    paths: list[str] = Field([])
    """Files or globs. A .jsonl file has a document per line, any other file is one document. May end in .gz."""

    text_field: str = Field("text", min_length=1)
    """The field of a JSONL line that holds the text."""

    tokenizer: str = Field("bytes", min_length=1)
    """bytes: one id per byte, no files. Or the path of a Hugging Face tokenizer.json, or of a folder that has one."""

    validation_fraction: float = Field(0.01, ge=0, lt=1)
    """Share of the documents that is held out for validation, chosen by run.seed. 0: none."""

    workers: int = Field(0, ge=0)
    """Processes per rank that read batches ahead. 0: the rank reads its batches itself, when it needs them."""

    prefetch: int = Field(2, ge=1)
    """Batches that each worker reads ahead."""

    @model_validator(mode="after")
    def _fits(self) -> "DataConfig":
        if self.source == "text" and not self.paths:
            raise ValueError('data.source = "text" needs data.paths, a list of files or globs')
        for name in ("paths", "text_field"):
            if self.source == "python-stdlib" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'data.{name} has no effect with data.source = "python-stdlib": take it out')
        if self.workers == 0 and self.prefetch != type(self).model_fields["prefetch"].default:
            raise ValueError("data.prefetch has no effect with data.workers = 0: take it out, or use workers")
        return self


class ValidationConfig(Section):
    """Measuring the loss on held-out text."""

    interval: int = Field(0, ge=0)
    """Optimizer steps between two validations. There is always one after the last step; 0: only that one."""

    samples: int = Field(128, ge=0)
    """At most this many sequences of train.seq_len tokens per validation set, chosen by run.seed. 0: all."""
