"""Hugging Face's names and config.json of a model, to and from ours, by the tables of the architectures
(parallelize/hf.py). What can't be said in the other one is refused by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from titanlike.checkpoint.manifest import STATE, CheckpointError
from titanlike.errors import UserError

if TYPE_CHECKING:
    from parallelize.hf import HuggingFace

FREE = ("max_seq_len", "init_std", "balance_loss", "balance_over", "z_loss", "bias_rate", "capacity_factor")
"""fields of a config that trained weights do not depend on"""


class HfModel(NamedTuple):
    """What a config.json describes."""

    architecture: str
    form: HuggingFace
    model: dict[str, Any]
    """the fields of the architecture's config dataclass"""


def forms_of(architecture: str) -> tuple[HuggingFace, ...]:
    """The forms that an architecture has in Hugging Face folders; none is a UserError."""
    from titanlike.tables import tables_of

    tables = tables_of(architecture)
    if not tables.hf:
        raise UserError(f"the architecture {architecture} has no Hugging Face form: {tables.name} has no table HF")
    return tables.hf


@functools.cache
def known_forms() -> dict[str, tuple[str, HuggingFace]]:
    """model_type -> (architecture, form) of the architectures that come with titanlike."""
    from titanlike.architectures import built_in
    from titanlike.tables import tables_of

    return {form.model_type: (name, form) for name in built_in() for form in tables_of(name).hf}


def architecture_of(state: dict[str, Any]) -> str:
    """The architecture that a checkpoint's state.json names: that of its run, or of weights alone. Old ones of those
    name none and are Llamas."""
    model = (state.get("config") or {}).get("model") or state
    return str(model.get("architecture", "llama"))


def trained_length(state: dict[str, Any]) -> int | None:
    """The longest sequences that the run of a checkpoint's state.json has trained on; None where no run is known.

    Raises CheckpointError if its config does not say.
    """
    config = state.get("config") or {}
    if "train" not in config:
        return None
    try:
        stages = (config.get("data") or {}).get("stages") or ()
        reached = (stage for stage in stages if stage["start_step"] <= state.get("step", 0))
        return max(int(config["train"]["seq_len"]), *(int(stage.get("seq_len") or 0) for stage in reached), 0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{STATE} does not say how its model was trained ({error!r})") from None


def hf_parts(form: HuggingFace, name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """See HuggingFace.parts. Raises UserError for a parameter that the form doesn't have."""
    try:
        return form.parts(name, shape)
    except KeyError:
        raise UserError(f"{name} has no name in a {form.class_name}, so it can't go to Hugging Face or back") from None


def is_buffer(name: str) -> bool:
    """Whether a tensor of a Hugging Face folder is no weight: old ones hold the rotary frequencies too."""
    return name.endswith(".rotary_emb.inv_freq")


def form_for(architecture: str, model: dict[str, Any]) -> HuggingFace:
    """The form that a model has in Hugging Face folders. Raises UserError if there is none."""
    refused = []
    for form in forms_of(architecture):
        try:
            form.to_config(model)
            return form
        except ValueError as error:
            refused.append(f"a {form.class_name} {error}")
    raise UserError(f"this model has no Hugging Face form: {'; '.join(refused)}")


def to_hf_config(form: HuggingFace, model: dict[str, Any], dtype: str, end_id: int | None) -> dict[str, Any]:
    """The config.json for our model config. `end_id`: the token that ends a text."""
    config = {"architectures": [form.class_name], "model_type": form.model_type, **form.to_config(model)}
    # We begin a text where the one before it ended, so the same token does both.
    return config | {"bos_token_id": end_id, "eos_token_id": end_id, "torch_dtype": dtype, "use_cache": True}


def from_hf_config(config: dict[str, Any], source: Path, architecture: str | None = None) -> HfModel:
    """The model that a Hugging Face config.json describes; `source` is for messages. `architecture` is the one that it
    is wanted for; else one that comes with titanlike.

    Raises UserError for a model that we can't build.
    """
    kind = config.get("model_type")
    known = known_forms()
    if architecture is not None:
        known = {form.model_type: (architecture, form) for form in forms_of(architecture)}
    if kind not in known:
        names = " or ".join(map(repr, known))
        wanted = f", for model.architecture = {architecture!r}" if architecture is not None else ""
        raise UserError(f"{source} describes a {kind!r} model; only {names} can be read{wanted}")
    name, form = known[kind]
    try:
        return HfModel(name, form, form.from_config(config))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{source} lacks what a {form.class_name} needs: {error!r}") from error
    except ValueError as error:
        raise UserError(f"{source} {error}") from error


def compare_models(have: dict[str, Any], wanted: dict[str, Any], source: Any) -> list[str]:
    """What differs between the model of `source` and the run's. Returns sentences about differences that weights
    survive: numbers that are no counts (rope_theta, norm_eps), and tables.

    Raises UserError, naming the key, for one that they don't: the shape of the model, and what is switched in it.
    """
    notes = []
    for key, value in wanted.items():
        if key not in have or have[key] == value or key in FREE:
            continue
        if key == "tie_embeddings":
            if value:
                raise UserError(
                    f"model.tie_embeddings is true in this run, but {source} has an output projection of its own"
                )
        elif isinstance(value, int | str) or isinstance(have[key], int | str):
            raise UserError(f"model.{key} is {value} in this run, but {source} has {have[key]}")
        else:
            notes.append(f"model.{key} is {value} in this run, and was {have[key]} in {source}")
    return notes
