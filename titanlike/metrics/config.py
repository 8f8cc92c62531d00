"""The `[metrics]` section."""

from pydantic import Field

from titanlike.section import Section


class MetricsConfig(Section):
    """What the run writes about itself. `metrics.jsonl` and `events.jsonl` in the run folder are always written."""

    tensorboard: bool = True
    """Also write TensorBoard event files to the run folder's tensorboard/."""
    wandb: bool = False
    """Also log to Weights & Biases, from rank 0, with the same names; needs the package wandb (titanlike[wandb])."""
    wandb_project: str = Field(default="titanlike", min_length=1)
    """The project there. The run has the name of the run folder; who you are is what the package is told (wandb
    login)."""
    wandb_offline: bool = False
    """Write to the run folder's wandb/ without a network, for wandb sync later."""
    log_interval: int = Field(default=1, ge=1)
    """Print a progress line every so many steps when the output is not a terminal."""
    matmul_peak: bool = False
    """Measure at the start, in a second or so, how fast the device multiplies large matrices; log MFU against that."""
    health_interval: int = Field(default=0, ge=0)
    """Every so many steps, look at activations, attention, gradients, weights and updates of each layer; such a step
    costs about a forward more. 0: never."""
