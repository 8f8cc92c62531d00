"""The `[data]` and `[validation]` sections."""

from typing import Literal

from pydantic import Field, model_validator

from titanlike.section import Section

KEYS_OF_SOURCE = {
    "python-stdlib": (),
    "text": ("paths", "text_field"),
    "huggingface": ("dataset", "subset", "split", "text_field"),
    "tokens": ("paths",),
}
"""What each source reads of the keys below `source`."""


class SourceConfig(Section):
    """Where documents come from."""

    source: Literal["python-stdlib", "text", "huggingface", "tokens"] = "python-stdlib"
    """python-stdlib: the source text of the running Python's standard library, which is on every machine.
    text: the files of paths. huggingface: a dataset that the datasets library can open.
    tokens: folders that scripts/prepare_data.py made."""

    paths: list[str] = Field([])
    """text: files or globs; .jsonl has a document per line, .parquet one per row, any other file is one document; .gz
    and .zst are unpacked. tokens: folders."""

    text_field: str = Field("text", min_length=1)
    """The field of a JSONL line, a Parquet row or a dataset's example that holds the text."""

    dataset: str | None = Field(None, min_length=1)
    """huggingface: the name of a dataset, or its folder."""

    subset: str | None = Field(None, min_length=1)
    """huggingface: which configuration of a dataset that has several."""

    split: str = Field("train", min_length=1)
    """huggingface: which split of the dataset."""

    @model_validator(mode="after")
    def _source_fits(self) -> "SourceConfig":
        keys = KEYS_OF_SOURCE[self.source]
        for name in SourceConfig.model_fields:
            if name != "source" and name not in keys and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} has no effect with source = "{self.source}": take it out')
        if "paths" in keys and not self.paths:
            what = "files or globs" if self.source == "text" else "folders that scripts/prepare_data.py made"
            raise ValueError(f'source = "{self.source}" needs paths, a list of {what}')
        if "dataset" in keys and self.dataset is None:
            raise ValueError('source = "huggingface" needs dataset, the name of a dataset or its folder')
        return self


class DataConfig(SourceConfig):
    """Where the text comes from, and how it becomes samples."""

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
        if self.workers == 0 and self.prefetch != type(self).model_fields["prefetch"].default:
            raise ValueError("prefetch has no effect with workers = 0: take it out, or use workers")
        return self


class ValidationConfig(Section):
    """Measuring the loss on held-out text."""

    interval: int = Field(0, ge=0)
    """Optimizer steps between two validations. There is always one after the last step; 0: only that one."""

    samples: int = Field(128, ge=0)
    """At most this many sequences of train.seq_len tokens per validation set, chosen by run.seed. 0: all."""
