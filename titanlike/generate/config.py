"""The `[validation.generate]` section: text from a model while it is trained."""

from pydantic import Field, model_validator

from titanlike.section import Section


class GenerateConfig(Section):
    """Text that is shown every so many steps: into the log, events.jsonl and TensorBoard."""

    prompts: list[str] = Field([])
    """What the model continues. An empty prompt is the beginning of a document."""

    interval: int = Field(0, ge=0)
    """Optimizer steps between two times; 0: never."""

    max_new_tokens: int = Field(64, ge=1)
    """Tokens of each continuation. With the prompt they must fit into train.seq_len."""

    temperature: float = Field(0.8, ge=0)
    """0: the likeliest token each time. The draws are those of run.seed, on every mesh."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> "GenerateConfig":
        if bool(self.prompts) != bool(self.interval):
            given, lacking = ("prompts", "an interval") if self.prompts else ("interval", "prompts")
            raise ValueError(f"{given} has no effect without {lacking}: give both, or none")
        for name in ("max_new_tokens", "temperature"):
            if not self.prompts and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect without prompts: give prompts and an interval, or take it out")
        return self
