"""The whole config of a run: TOML and command line in, one frozen, typed `Config` out.

    config = load_config("configs/debug.toml", {"train.steps": 20, "mesh.tp": "2"})  # text as on the command line
    config.validate_for(world_size)              # impossible and inert combinations, before any process group exists
    config.resolved_dp(world_size)               # the dp degree
    config.accumulation(dp)                      # microbatches per rank in an optimizer step
    config.stages_per_rank, config.n_stages      # of the pipeline; 1 and pp unless the schedule interleaves
    config.architecture                          # .model_class, .config_class, .presets
    config.model_config_for(vocab_size)          # the architecture's dataclass, with the tokenizer's vocabulary
    config.run_dir                               # run.dir / run.name
    write_resolved(config, path)                 # all of it as TOML; loading that gives an equal Config

Properties:
- A mistake is one sentence (`UserError`) that names the key's path, where it was written, and the nearest valid key.
- Values are strict: "3" is not a number, 1.0 is not an integer. An integer will do where a number is wanted.
- A key that has no effect with the rest is a mistake. `write_resolved` leaves such keys out.
- `[model]` takes the fields of the architecture's config dataclass. `config.model` then has all of them as attributes,
  with the preset's values where no key was given, and derived sizes settled (`config.model.n_kv_heads` is never None).
- `vocab_size` is the explicit key, else the tokenizer's: a preset's own is not taken.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w
from pydantic import Field, ValidationInfo, field_validator, model_validator

from titanlike import architectures
from titanlike import config_combinations as combinations
from titanlike.checkpoint.config import CheckpointConfig
from titanlike.config_errors import check_keys, check_plain_typos, nowhere, plain, unknown_key, validate
from titanlike.config_input import from_text, read_toml, set_path
from titanlike.config_keys import Key, entry, keys_of
from titanlike.data.config import DataConfig, ValidationConfig
from titanlike.errors import UserError
from titanlike.guard import GuardConfig
from titanlike.metrics.config import MetricsConfig
from titanlike.profiler import ProfileConfig
from titanlike.section import Section


class RunConfig(Section):
    """Where a run lives, what it starts from, and on what it computes."""

    dir: str = Field("runs", min_length=1)
    """Folder that holds the runs. The run's own folder is dir/name."""

    name: str = Field("unnamed", min_length=1)
    """Name of the run; not given, that of the config file without its .toml. Starting it again resumes from its newest
    checkpoint."""

    seed: int = Field(0, ge=0, lt=2**63)
    """The initial weights and the order of the data are functions of this number alone, whatever the mesh."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on; auto takes the accelerator if there is one."""

    hooks: list[str] = Field([])
    """Classes with code of your own that is called at fixed points of the run (docs/hooks.md), as import paths:
    package.module:Class."""

    hang_timeout: float = Field(300.0, ge=0)
    """Seconds without progress on any rank, or without an answer of one, after which the job ends and the rank that it
    waits for is named (docs/faults.md). 0: never."""

    debug_collectives: bool = False
    """Let the ranks compare every collective before they run it, and end with an error where they differ: slow, for
    finding a fault."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_of_its_own(cls, name: str) -> str:
        if name != name.strip() or any(part in ("", ".", "..") for part in name.split("/")):
            raise ValueError(f"must be the name of a folder in run.dir, got {name!r}")
        return name


class ModelConfig(Section, extra="allow"):
    """The model: an architecture, and its sizes or a preset."""

    architecture: str = "llama"
    """A module of `models`, or the import path of a class, package.module:Class."""

    preset: str | None = None
    """A named set of values for the architecture's keys below. A key given beside it overrides it."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The architecture's own keys."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any, info: ValidationInfo) -> Any:
        """Check the architecture's own keys, and fill in those that were not given."""
        if not isinstance(raw, dict):
            return raw
        own = {name: raw[name] for name in cls.model_fields if name in raw}
        if any(not isinstance(value, str | None) for value in own.values()):
            return own  # pydantic has the sentence for a wrong type
        architecture = architectures.resolve(own.get("architecture", "llama"))
        values = {}
        if own.get("preset") is not None:
            values = plain(architectures.preset(architecture, own["preset"]))
            values.pop("vocab_size", None)  # the tokenizer decides
        values = _merged(values, {name: value for name, value in raw.items() if name not in own})
        for name, field in architecture.section.model_fields.items():
            if field.is_required() and name not in values:
                known = ", ".join(architecture.presets) or "none"
                raise UserError(f"model.{name} is missing: give it, or choose a model.preset ({known})")
        where = (info.context or {}).get("where", nowhere)
        section = validate(architecture.section, values, prefix="model.", where=where)
        built = architectures.build(architecture, dict(section), vocab_size=None)
        settled = {name: value if value is not None else getattr(built, name) for name, value in section}
        if "vocab_size" in settled:
            settled["vocab_size"] = values.get("vocab_size")
        return own | settled


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above` over it; where both have a table, key by key."""
    merged = below | above
    for name, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(name), dict):
            merged[name] = _merged(below[name], value)
    return merged


class MeshConfig(Section):
    """How the ranks are laid out. The product of the three degrees is the number of ranks; tp ranks are adjacent."""

    pp: int = Field(1, ge=1)
    """Pipeline-parallel degree: the layers are cut into stages."""

    dp: int | None = Field(None, ge=1)
    """Data-parallel (ZeRO-1) degree. Not given: the ranks that pp and tp leave."""

    tp: int = Field(1, ge=1)
    """Tensor-parallel degree: each layer is cut over this many adjacent ranks."""

    ep: int = Field(1, ge=1)
    """Expert-parallel degree, a factor of dp: so many neighbouring dp ranks share out the experts of a mixture of
    experts, and send each other the tokens for them."""

    sequence_parallel: bool = True
    """With tp, cut the activations between attention and feed-forward along the sequence (arXiv:2205.05198)."""


Schedule = Literal["afab", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]


class PipelineConfig(Section):
    """The pipeline over pp ranks. These keys are for mesh.pp > 1 only."""

    schedule: Schedule = "1f1b"
    """Order of forwards and backwards: all forward then all backward, 1F1B and its interleaved form (arXiv:2104.04473),
    zero bubble (arXiv:2401.10241) interleaved or in V shape, DualPipeV (arXiv:2412.19437)."""

    split: list[int] | None = Field(None, min_length=1)
    """Number of layers of each stage, in order. Not given: as even as it goes."""

    stages_per_rank: int | None = Field(None, ge=1)
    """Stages on each rank. Not given: 1, or 2 for the schedules that interleave."""


class TrainConfig(Section):
    """The run's length, batch and precision."""

    steps: int = Field(100, ge=1)
    """Optimizer steps of the whole run, those before a resume included."""

    global_batch_size: int = Field(8, ge=1)
    """Sequences per optimizer step, over all ranks. It never depends on the mesh."""

    microbatch_size: int = Field(1, ge=1)
    """Sequences per rank and forward. Accumulation is global_batch_size / (dp * microbatch_size)."""

    seq_len: int = Field(256, ge=1)
    """Tokens per sequence."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the model computes in. bfloat16 keeps float32 master weights, gradient sums and moments."""

    tf32: bool = False
    """On CUDA, let matrix products in float32 round their inputs to TF32, 11 significant bits instead of 24: several
    times as fast, and no longer the same run as on another device. For train.dtype = "float32"."""

    loss_chunk: int | None = Field(None, ge=0)
    """Positions of each sequence that have logits at a time; a chunk's logits are computed again in the backward. 0:
    all at once. Not given: all, unless the logits of a microbatch would take more than 512 MiB in float32 on a rank,
    then as many as take that."""

    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 turns clipping off."""


class GroupConfig(Section):
    """Settings for the parameters whose name matches. The first group that matches a parameter takes it."""

    match: str = Field(min_length=1)
    """Regular expression, searched in the parameter's full name (layers.3.attention.wq.weight)."""

    lr_scale: float = Field(1.0, ge=0)
    """The group's learning rate is this times optimizer.lr."""

    weight_decay: float | None = Field(None, ge=0)
    """The group's weight decay. Not given: as without the group."""

    @field_validator("match")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _changes_something(self) -> "GroupConfig":
        if self.lr_scale == 1.0 and self.weight_decay is None:
            raise ValueError("the group changes nothing: give it a lr_scale or a weight_decay")
        return self


class OptimizerConfig(Section):
    """The optimizer, whose state is sharded over dp (ZeRO-1)."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW (arXiv:1711.05101) or SGD."""

    lr: float = Field(3e-4, ge=0)
    """Peak learning rate."""

    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay rate of the first moment."""

    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW: decay rate of the second moment."""

    eps: float = Field(1e-8, ge=0)
    """AdamW: added to the root of the second moment."""

    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices. Norms and biases are not decayed."""

    momentum: float = Field(0.0, ge=0, lt=1)
    """SGD: momentum."""

    decay_embeddings: bool = True
    """Whether the token embedding is decayed too."""

    bucket_mb: float = Field(25.0, gt=0)
    """Megabytes of gradients that are reduced in one collective."""

    grad_comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """What gradients are sent in over dp: bfloat16 halves the bytes and rounds each rank's sum over its microbatches to
    8 bits. They are added up in float32 in any case. With train.dtype = "float64" they are sent in that."""

    groups: list[GroupConfig] = Field([])
    """Exceptions for parameters by name: a list of tables."""


class ScheduleConfig(Section):
    """The learning rate over the run: linear warm-up, a constant phase, a decay to a floor."""

    warmup: int | float = 0
    """Warm-up: steps when an integer, a fraction of train.steps when it has a decimal point."""

    decay: Literal["none", "linear", "cosine", "1-sqrt"] = "none"
    """Shape of the decay at the end of the run (1-sqrt: arXiv:2405.18392)."""

    decay_steps: int | float | None = None
    """Length of the decay, as for warmup. Not given: all steps after the warm-up."""

    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """The decay ends at this times the peak learning rate."""

    @field_validator("warmup", "decay_steps")
    @classmethod
    def _steps_or_fraction(cls, value: int | float | None) -> int | float | None:
        if isinstance(value, float) and not 0 <= value <= 1:
            raise ValueError(f"{value} has a decimal point, so it is a fraction of train.steps and must be from 0 to 1")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"a number of steps must be 0 or more, not {value}")
        return value


class CompileConfig(Section):
    """torch.compile."""

    enable: bool = True
    """Compile the model. A graph break is an error. Without a C++ compiler the model runs as it is, with a warning; and
    where torch cannot compile (the schedules whose backward is split), unless it was asked for here: then an error."""

    scope: Literal["stage", "block"] = "block"
    """stage: one graph for all that a pipeline stage computes. block: one graph that all blocks share, so that the time
    to compile does not grow with the depth."""

    memory_budget: float = Field(1.0, ge=0, le=1)
    """The share of the activation memory that compiled graphs would keep which they may keep; the compiler chooses what
    is computed again in the backward, from what is cheapest on."""

    async_tp: bool = False
    """With mesh.tp on CUDA devices that reach each other's memory (NVLink): cut the all-gathers and reduce-scatters of
    sequence parallelism into pieces that are sent while the products beside them run."""


class ActivationCheckpointConfig(Section):
    """Recomputing activations in the backward to save memory."""

    mode: Literal["none", "full", "selective"] = "none"
    """none, every block in full, or selective: keep what is dear to compute."""


class Config(Section):
    """Everything that a run is told."""

    run: RunConfig = RunConfig()
    model: ModelConfig = Field(default_factory=ModelConfig)
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    guard: GuardConfig = GuardConfig()
    profile: ProfileConfig = ProfileConfig()
    compile: CompileConfig = CompileConfig()
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()

    @property
    def run_dir(self) -> Path:
        """The run's own folder."""
        return Path(self.run.dir).expanduser() / self.run.name

    @property
    def architecture(self) -> architectures.Architecture:
        """The model's class, its config dataclass and its presets."""
        return architectures.resolve(self.model.architecture)

    def model_config_for(self, vocab_size: int) -> Any:
        """The architecture's config dataclass, for a tokenizer of `vocab_size` ids.

        Raises:
            UserError: model.vocab_size is too small for the tokenizer, or tp leaves a rank without vocabulary.
        """
        given = getattr(self.model, "vocab_size", None)
        if given is not None and given < vocab_size:
            raise UserError(
                f"model.vocab_size ({given}) is smaller than the tokenizer's {vocab_size} ids: leave it out, or give "
                f"{vocab_size} or more"
            )
        values = dict(self.model.model_extra or {})
        size, tp = given or vocab_size, self.mesh.tp
        if -(-size // tp) * (tp - 1) >= size:  # as torch cuts: ceil(size / tp) to each rank until none is left
            raise UserError(
                f"a vocabulary of {size} ids leaves one of mesh.tp = {tp} ranks without any: use a smaller tp"
            )
        return architectures.build(self.architecture, values, vocab_size)

    def resolved_dp(self, world_size: int) -> int:
        """The dp degree on `world_size` ranks.

        Raises:
            UserError: pp * dp * tp is not the number of ranks.
        """
        pp, dp, tp = self.mesh.pp, self.mesh.dp, self.mesh.tp
        if dp is None and world_size % (pp * tp):
            raise UserError(
                f"mesh.pp ({pp}) * mesh.dp (what is left) * mesh.tp ({tp}) is a multiple of {pp * tp}, but the number "
                f"of ranks is {world_size}: start a multiple of {pp * tp} ranks, or change the mesh"
            )
        if dp is not None and pp * dp * tp != world_size:
            raise UserError(
                f"mesh.pp ({pp}) * mesh.dp ({dp}) * mesh.tp ({tp}) is {pp * dp * tp}, but the number of ranks is "
                f"{world_size}: start {pp * dp * tp} ranks, or change the mesh"
            )
        return dp or world_size // (pp * tp)

    def accumulation(self, dp: int) -> int:
        """Microbatches that each rank runs for one optimizer step.

        Raises:
            UserError: dp * microbatch_size does not divide global_batch_size.
        """
        train = self.train
        if train.global_batch_size % (dp * train.microbatch_size):
            raise UserError(
                f"train.global_batch_size ({train.global_batch_size}) must be a multiple of dp ({dp}) * "
                f"train.microbatch_size ({train.microbatch_size}) = {dp * train.microbatch_size}"
            )
        return train.global_batch_size // (dp * train.microbatch_size)

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages on each rank; 1 without a pipeline."""
        if self.mesh.pp == 1:
            return 1
        return self.pipeline.stages_per_rank or combinations.STAGES_PER_RANK[self.pipeline.schedule][0]

    @property
    def n_stages(self) -> int:
        """Pipeline stages in all; 1 without a pipeline."""
        return self.mesh.pp * self.stages_per_rank

    @property
    def compiles(self) -> bool:
        """Whether the model is to be compiled: if asked for, and by default wherever torch can."""
        return self.compile.enable and combinations.cannot_compile(self) is None

    def validate_for(self, world_size: int) -> None:
        """Raise `UserError` for the first thing in the config that cannot work, or has no effect, on so many ranks."""
        combinations.check(self, world_size)


def config_keys(architecture: str = "llama") -> dict[str, Key]:
    """Every key of a config by dotted path, those of the architecture included."""
    keys: dict[str, Key] = {}
    for path, key in keys_of(Config).items():
        keys[path] = key
        if path == "model.preset":
            keys |= keys_of(architectures.resolve(architecture).section, "model.")
    return keys


def load_config(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config of a TOML file (None: all defaults), changed by `overrides`, validated.

    `overrides` maps dotted paths to values. A string is read as if typed on the command line (`"20"`, `"[1, 2]"`,
    `"cosine"`); None takes the key, or the whole section, out of the file.

    Raises:
        UserError: the file is missing or not TOML, or a key is unknown, of a wrong type or value.
    """
    overrides = overrides or {}
    raw = {} if path is None else read_toml(Path(path))

    def where(key: str) -> str:
        for given in overrides:
            if key == given or key.startswith((f"{given}.", f"{given}[")) or given.startswith(f"{key}."):
                return " on the command line"
        return f" in {path}" if path is not None else ""

    in_tables = [f"{name}.{key}" for name, table in raw.items() if isinstance(table, dict) for key in table]
    check_plain_typos([*in_tables, *(key for key in overrides if "." in key)], keys_of(Config), where)
    model = raw.get("model")
    architecture = overrides.get("model.architecture") or (
        model.get("architecture") if isinstance(model, dict) else None
    )
    # A name that is no string is a mistake that validation reports; until then any architecture's keys will do.
    keys = config_keys(architecture if isinstance(architecture, str) else "llama")
    for key, value in overrides.items():
        if value is None and entry(key, keys) is None:
            raise unknown_key(key, keys, where)
        set_path(raw, key, from_text(value, keys.get(key)) if isinstance(value, str) else value)
    check_keys(raw, keys, where)
    run = raw.setdefault("run", {}) if path is not None else None
    if isinstance(run, dict):  # a run of another config must not be resumed for want of a name
        run.setdefault("name", Path(path or "").stem)
    return validate(Config, raw, keys=keys, where=where)


def resolved(config: Config) -> dict[str, Any]:
    """The config as plain tables that TOML can hold: all keys that have a value and an effect."""
    tables = config.model_dump(mode="json", exclude_none=True)
    for key in combinations.without_effect(config):
        section, _, name = key.partition(".")
        if getattr(getattr(config, section), name) == type(getattr(config, section)).model_fields[name].default:
            tables[section].pop(name, None)
    if combinations.cannot_compile(config) is not None and config.compile.enable:
        tables["compile"].pop("enable")  # the default, which gives way; said aloud it would be an error
    return {name: table for name, table in tables.items() if table}


def write_resolved(config: Config, path: str | Path) -> None:
    """Write the config as TOML; `load_config` of the file gives an equal Config."""
    Path(path).write_text(tomli_w.dumps(resolved(config)), encoding="utf-8")
