"""The `[data]` and `[validation]` sections."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from titanlike.config_keys import nearest
from titanlike.generate.config import GenerateConfig
from titanlike.section import Section

RECORDS = ("format", "text_field", "prompt_field", "completion_field", "messages_field")
KEYS_OF_SOURCE = {
    "python-stdlib": (),
    "text": ("paths", *RECORDS),
    "huggingface": ("dataset", "subset", "split", "streaming", *RECORDS),
    "tokens": ("paths",),
    "synthetic": (),
}
"""What each source reads of the keys beside it."""
FIELDS_OF_FORMAT = {
    "text": ("text_field",),
    "completion": ("prompt_field", "completion_field"),
    "chat": ("messages_field",),
}


class SourceConfig(Section):
    """Where documents come from."""

    source: str = "python-stdlib"
    """python-stdlib: the source text of the running Python's standard library, which is on every machine.
    text: the files of paths. huggingface: a dataset that the datasets library can open.
    tokens: folders that scripts/prepare_data.py made. synthetic: random ids without end, for benchmarks.
    Or the import path of a class of your own, package.module:Class (docs/data.md)."""

    paths: list[str] = Field([])
    """text: files or globs; .jsonl has a document per line, .parquet one per row, any other file is one document; .gz
    and .zst are unpacked. tokens: folders."""

    dataset: str | None = Field(None, min_length=1)
    """huggingface: the name of a dataset, or its folder."""

    subset: str | None = Field(None, min_length=1)
    """huggingface: which configuration of a dataset that has several."""

    split: str = Field("train", min_length=1)
    """huggingface: which split of the dataset."""

    streaming: bool = False
    """huggingface: read it as a stream, without a download and in about its own order, rather than at random."""

    format: Literal["text", "completion", "chat"] = "text"
    """text: all of a document is learnt. completion: a prompt, and a completion that alone is learnt. chat: a list of
    messages with role and content, laid out by the tokenizer's chat template, of which what the assistant says is
    learnt.
    """

    text_field: str = Field("text", min_length=1)
    """format text: the field of a JSONL line, a Parquet row or a dataset's example that holds the text."""

    prompt_field: str = Field("prompt", min_length=1)
    """format completion: the field with the prompt."""

    completion_field: str = Field("completion", min_length=1)
    """format completion: the field with the completion."""

    messages_field: str = Field("messages", min_length=1)
    """format chat: the field with the messages."""

    arguments: dict[str, Any] = Field({})
    """A class of your own: what it is given, beside the tokenizer and the length."""

    @property
    def fields(self) -> list[str]:
        """The fields of a record that are read."""
        return [getattr(self, key) for key in FIELDS_OF_FORMAT[self.format]]

    @property
    def own_class(self) -> bool:
        """Whether the source is the import path of a class."""
        return ":" in self.source

    @model_validator(mode="after")
    def _source_fits(self) -> "SourceConfig":
        if not self.own_class and self.source not in KEYS_OF_SOURCE:
            found = nearest(self.source, KEYS_OF_SOURCE)
            hint = "" if found is None else f" (the nearest is {found!r})"
            raise ValueError(
                f"source must be one of {', '.join(KEYS_OF_SOURCE)}, or package.module:Class, got {self.source!r}{hint}"
            )
        keys = ("arguments",) if self.own_class else KEYS_OF_SOURCE[self.source]
        for name, field in SourceConfig.model_fields.items():
            if name == "source" or getattr(self, name) == field.default:
                continue
            if name not in keys:
                raise ValueError(f'{name} has no effect with source = "{self.source}": take it out')
            if name.endswith("_field") and name not in FIELDS_OF_FORMAT[self.format]:
                raise ValueError(f'{name} has no effect with format = "{self.format}": take it out')
        if "paths" in keys and not self.paths:
            what = "files or globs" if self.source == "text" else "folders that scripts/prepare_data.py made"
            raise ValueError(f'source = "{self.source}" needs paths, a list of {what}')
        if "dataset" in keys and self.dataset is None:
            raise ValueError('source = "huggingface" needs dataset, the name of a dataset or its folder')
        return self


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class MixtureSource(SourceConfig):
    """One of several sources."""

    name: Name
    """What it is called in sample ids, logs and checkpoints. Letters, digits and _ . - only."""

    weight: float = Field(1.0, ge=0)
    """Its share of the samples is this over the sum of all weights."""


class StageConfig(Section):
    """From a step on, another mixture or another length."""

    start_step: int = Field(ge=1)
    """The first optimizer step of the stage; steps count from 1."""

    mixture: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weight of each source by name; a source that is not named is not read. Not given: the sources' own weights."""

    seq_len: int | None = Field(None, ge=1)
    """Tokens per sequence. Not given: train.seq_len. The number of sequences stays, so a batch has more or fewer
    tokens."""


class DataConfig(SourceConfig):
    """Where the text comes from, and how it becomes samples."""

    sources: list[MixtureSource] = Field([])
    """Several sources that are mixed, a list of tables. They stand in place of source and its keys."""

    stages: list[StageConfig] = Field([])
    """Changes of the mixture or the length during the run, a list of tables in the order of their start_step."""

    allow_changes: bool = False
    """Go on from a checkpoint although the data differs from what it was trained on. Unchanged sources keep their
    positions."""

    packing: Literal["concat", "best_fit"] = "concat"
    """concat: documents one after the other, cut every seq_len tokens. best_fit: whole documents, as many as a row
    takes (arXiv:2404.10830); only one that is longer than seq_len is cut, and rows are padded."""

    document_mask: bool = False
    """Attention stays within a document, positions count from its start, and its first token is no label."""

    tokenizer: str = Field("bytes", min_length=1)
    """bytes: one id per byte, no files. Or the path of a Hugging Face tokenizer.json, or of a folder that has one."""

    validation_fraction: float = Field(0.01, ge=0, lt=1)
    """Share of the documents that is held out for validation, chosen by run.seed. 0: none."""

    workers: int = Field(0, ge=0)
    """Processes per rank that read batches ahead. 0: the rank reads its batches itself, when it needs them."""

    prefetch: int = Field(2, ge=1)
    """Batches that each worker reads ahead."""

    @property
    def all_sources(self) -> list[MixtureSource]:
        """The sources; a single one has the name of its kind, or of its class."""
        if self.sources:
            return self.sources
        values = {name: getattr(self, name) for name in SourceConfig.model_fields}
        return [MixtureSource(**values, name=self.source.rpartition(":")[2])]

    @model_validator(mode="after")
    def _mixture_fits(self) -> "DataConfig":
        for name in SourceConfig.model_fields if self.sources else ():
            if getattr(self, name) != SourceConfig.model_fields[name].default:
                raise ValueError(f"{name} has no effect beside a list of sources: put it into one of them")
        names = [source.name for source in self.all_sources]
        if len(set(names)) < len(names):
            raise ValueError(f"two sources have the same name; the names are {', '.join(names)}")
        if sum(source.weight for source in self.all_sources) == 0 and not (
            self.stages and self.stages[0].start_step == 1
        ):
            raise ValueError("the weights of the sources sum to 0: give at least one of them a weight")
        before = 0
        for i, stage in enumerate(self.stages):
            if stage.start_step <= before:
                raise ValueError(
                    f"stages[{i}].start_step ({stage.start_step}) must be more than that of the one before"
                )
            before = stage.start_step
            if stage.mixture is None and stage.seq_len is None:
                raise ValueError(f"stages[{i}] changes nothing: give it a mixture or a seq_len")
            unknown = [name for name in stage.mixture or () if name not in names]
            if unknown:
                raise ValueError(f"stages[{i}].mixture names {unknown[0]}, and the sources are {', '.join(names)}")
            if stage.mixture is not None and sum(stage.mixture.values()) == 0:
                raise ValueError(f"stages[{i}].mixture sums to 0: give at least one source a weight")
            if stage.mixture is None and sum(source.weight for source in self.all_sources) == 0:
                raise ValueError(f"stages[{i}] has no mixture, and the weights of the sources sum to 0")
        return self

    @model_validator(mode="after")
    def _fits(self) -> "DataConfig":
        if self.workers == 0 and self.prefetch != type(self).model_fields["prefetch"].default:
            raise ValueError("prefetch has no effect with workers = 0: take it out, or use workers")
        return self


class ValidationSource(SourceConfig):
    """A validation set."""

    name: Name
    """What it is called in logs. Letters, digits and _ . - only."""


class ValidationConfig(Section):
    """Measuring the loss on held-out text."""

    interval: int = Field(0, ge=0)
    """Optimizer steps between two validations. There is always one after the last step; 0: only that one."""

    samples: int = Field(128, ge=0)
    """At most this many sequences of train.seq_len tokens per validation set, chosen by run.seed. 0: all."""

    sets: list[ValidationSource] = Field([])
    """Validation sets of their own, a list of tables, beside what data.validation_fraction holds out."""

    generate: GenerateConfig = GenerateConfig()
    """Text from the model, to be looked at."""

    @model_validator(mode="after")
    def _names_differ(self) -> "ValidationConfig":
        names = [source.name for source in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"two sets have the same name; the names are {', '.join(names)}")
        return self
