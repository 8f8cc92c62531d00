"""The `[checkpoint]` section: when to save, how, what to keep, and where a run starts from."""

from typing import Literal

from pydantic import Field, model_validator

from titanlike.section import Section


class CheckpointConfig(Section):
    """Checkpoints of the run, in `<run folder>/checkpoints/step-XXXXXXXX/`."""

    interval: int = Field(500, ge=0)
    """Save every this many steps; 0 saves by minutes or at the end only."""
    interval_minutes: float = Field(0.0, ge=0)
    """Save when this many minutes have passed since the last save; 0 turns it off. May be combined with `interval`."""
    save_initial: bool = False
    """Also save before step 1, as step 0."""
    save_last: bool = True
    """Also save at the last step. Raising `train.steps` then just continues."""
    mode: Literal["async", "sync"] = "async"
    """`async` copies the state to host memory, then writes in the background; `sync` writes before the next step."""
    keep_last: int = Field(3, ge=0)
    """Keep this many of the newest checkpoints, delete older ones; 0 keeps all. The newest good one is never
    deleted."""
    keep_every: int = Field(0, ge=0)
    """Never delete a checkpoint whose step is a multiple of this; 0 turns it off."""
    load_step: int | None = Field(None, ge=0)
    """Resume from this step instead of the newest good checkpoint."""
    init_from: str | None = None
    """Start from the weights alone of this path, with a fresh optimizer: a titanlike checkpoint, a run folder, or a
    Hugging Face folder of safetensors. Not used, with a word, if the run folder has a checkpoint to resume from."""
    on_corrupt: Literal["fallback", "error"] = "fallback"
    """When the newest checkpoint is damaged: `fallback` names it and takes the one before, `error` stops."""
    digest_interval: int = Field(0, ge=0)
    """Log the digest of the whole training state every this many steps; 0 turns it off."""

    @model_validator(mode="after")
    def _check(self) -> "CheckpointConfig":
        if self.load_step is not None and self.init_from is not None:
            raise ValueError("load_step resumes a run and init_from starts one: give only one of them")
        return self
