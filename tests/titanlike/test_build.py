"""What the oracle shares with the trainer, and so cannot check: draws of weights, and the optimizer's groups."""

from __future__ import annotations

import pytest
import torch

from models.llama import Llama, LlamaConfig
from titanlike.build import draw_parameter, embeddings_of, generator_for, group_of, make_optimizer
from titanlike.config import GroupConfig, OptimizerConfig

CPU = torch.device("cpu")


def test_draws_depend_on_seed_and_name_alone() -> None:
    """Symptom: the initial weights depend on the order in which they are drawn."""

    def draw(seed: int, name: str) -> list[float]:
        return torch.randn(4, generator=generator_for(seed, name, CPU)).tolist()

    first = draw(0, "layers.0.attention.wq.weight")
    torch.manual_seed(123)
    assert draw(0, "layers.0.attention.wq.weight") == first
    others = [draw(1, "layers.0.attention.wq.weight"), draw(0, "layers.1.attention.wq.weight"), draw(0, "a")]
    assert first not in others and len({tuple(o) for o in others}) == 3
    # A name that ends in what another seed begins with must not be the same text: "1" + "2/x" and "12" + "/x".
    assert draw(1, "2/x") != draw(12, "x")


def test_the_draws_stay_what_they_are() -> None:
    """Symptom: an update changes the initial weights of a seed, and old runs cannot be repeated."""
    model = Llama(LlamaConfig(vocab_size=8, dim=4, n_layers=1, n_heads=2, ffn_dim=4, init_std=1.0))
    drawn = draw_parameter(model, 7, "layers.0.attention.wq.weight", (4, 4), CPU)
    assert drawn.dtype == torch.float32
    assert drawn[0].tolist() == pytest.approx([1.842697, 0.373192, -0.720966, 0.699723], abs=1e-5)


def test_vectors_are_not_decayed() -> None:
    """Symptom: norms and biases are decayed towards 0."""
    config = OptimizerConfig(weight_decay=0.1)
    assert group_of(config, "layers.0.attention_norm.weight", (16,)) == (1.0, 0.0)
    assert group_of(config, "layers.0.attention.wq.bias", (16,)) == (1.0, 0.0)
    assert group_of(config, "layers.0.attention.wq.weight", (16, 16)) == (1.0, 0.1)


def test_embeddings_are_decayed_if_asked() -> None:
    for decays in (True, False):
        config = OptimizerConfig(weight_decay=0.1, decay_embeddings=decays)
        assert group_of(config, "tok_embeddings.weight", (67, 16), True) == (1.0, 0.1 if decays else 0.0)
        assert group_of(config, "output.weight", (67, 16)) == (1.0, 0.1)


def test_embeddings_are_known_by_their_module() -> None:
    """Symptom: optimizer.decay_embeddings = false has no effect where the embedding has another name."""

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = torch.nn.Embedding(5, 2)
            self.embedding_norm = torch.nn.Linear(2, 2)

    assert embeddings_of(Named()) == {"wte.weight"}


def test_the_first_group_that_matches_takes_a_parameter() -> None:
    """Symptom: a parameter is in two groups, or a group's empty weight_decay undoes the rule for vectors."""
    groups = [
        GroupConfig(match=r"w[qk]\.weight", lr_scale=2.0),
        GroupConfig(match="attention", lr_scale=3.0, weight_decay=0.5),
    ]
    config = OptimizerConfig(weight_decay=0.1, groups=groups)
    assert group_of(config, "layers.0.attention.wq.weight", (16, 16)) == (2.0, 0.1)
    assert group_of(config, "layers.0.attention.wv.weight", (16, 16)) == (3.0, 0.5)
    assert group_of(config, "layers.0.attention_norm.weight", (16,)) == (3.0, 0.5)  # asked for by name
    assert group_of(config, "layers.0.feed_forward.w1.weight", (16, 16)) == (1.0, 0.1)
    vectors = OptimizerConfig(groups=[GroupConfig(match="norm", lr_scale=0.5)])
    assert group_of(vectors, "norm.weight", (16,)) == (0.5, 0.0)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_has_its_state_from_the_start(name: str) -> None:
    """Symptom: a checkpoint of step 0 lacks the moments, and cannot be loaded (TT #848)."""
    weight = torch.nn.Parameter(torch.ones(3, 2))
    momentum = 0.9 if name == "sgd" else 0.0
    config = OptimizerConfig(name=name, momentum=momentum)
    optimizer = make_optimizer(config, [{"params": [weight], "lr_scale": 1.0, "weight_decay": 0.1}])
    fresh = {k: v.shape for k, v in optimizer.state[weight].items()}
    weight.grad = torch.ones(3, 2)
    optimizer.step()
    assert {k: v.shape for k, v in optimizer.state[weight].items()} == fresh


def test_the_made_state_steps_like_torchs_own() -> None:
    """Symptom: a state made by hand lacks what torch would have put there, and the first step differs."""
    for settings in ({"name": "adamw"}, {"name": "sgd", "momentum": 0.9}):
        config = OptimizerConfig(lr=0.1, **settings)
        ours, theirs = (torch.nn.Parameter(torch.arange(6.0).view(3, 2)) for _ in range(2))
        mine = make_optimizer(config, [{"params": [ours], "lr_scale": 1.0, "weight_decay": 0.1}])
        if config.name == "adamw":
            plain = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        else:
            plain = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.1)
        for step in range(3):
            ours.grad = theirs.grad = torch.full((3, 2), 1.0 + step)
            mine.step()
            plain.step()
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)
