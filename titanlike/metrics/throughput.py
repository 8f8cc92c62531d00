"""From the time of a step to tokens/s, TFLOP/s and MFU."""

from __future__ import annotations

from dataclasses import dataclass

from titanlike.metrics.flops import FlopsPerToken


@dataclass(frozen=True)
class Throughput:
    """What the rates of a run are made of."""

    tokens_per_step: int
    """Tokens of a global batch: global batch size × sequence length, on every mesh."""
    ranks: int
    """World size."""
    flops: FlopsPerToken | None = None
    """Training FLOPs per token; None leaves TFLOP/s and MFU out."""
    peak_flops: float | None = None
    """Datasheet peak of one device in FLOP/s; None (not known) leaves out the MFU against it."""
    measured_peak_flops: float | None = None
    """Matmul peak of one rank measured at start, in FLOP/s; None leaves out the MFU against it."""

    def values(self, step_time_s: float) -> dict[str, float]:
        """The rates of a step that took `step_time_s` seconds. Empty if it took no time, as a coarse clock may say."""
        if step_time_s <= 0:
            return {}
        tokens_per_s = self.tokens_per_step / step_time_s
        per_rank = tokens_per_s / self.ranks
        values = {"tokens_per_s": tokens_per_s, "tokens_per_s_per_rank": per_rank}
        if self.flops is None:
            return values
        values["tflops_per_rank"] = per_rank * self.flops.matmul / 1e12
        if self.peak_flops is not None:
            for convention in ("palm", "matmul", "causal"):
                values[f"mfu/{convention}"] = per_rank * getattr(self.flops, convention) / self.peak_flops
        if self.measured_peak_flops is not None:
            values["mfu/measured"] = per_rank * self.flops.matmul / self.measured_peak_flops
        return values
