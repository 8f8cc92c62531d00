"""Mixture of experts: a Llama-like decoder whose feed-forwards are many experts, of which each token goes through a few
(arXiv:1701.06538; Mixtral, arXiv:2401.04088; Qwen3-MoE, arXiv:2505.09388).

Properties:
- Plain single-device code, as models/llama.py, whose parts it uses. The experts' weights are stacked, [experts, ...].
- Routing is computed in float32 (float64 when the model is), and depends on a token alone, or with a capacity on the
  earlier tokens of its sequence. So it is the same however a batch is cut.
- What blocks note of a forward (`Context.routing`) makes the auxiliary losses. These are means over the *global* batch;
  `auxiliary_sums` adds up over its parts to all that their gradients need, and `auxiliary_loss` is a part's share.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.llama import Attention, Llama, LlamaConfig, RMSNorm, make_context
from models.qwen3 import Qwen3Attention
from models.routing import Routing, route, run_experts


@dataclasses.dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """The shape of a mixture of experts; `ffn_dim` is the hidden width of one expert. Raises ValueError for shapes that
    cannot be built."""

    mlp_bias: ClassVar[bool] = False  # type: ignore[misc]  # a key of Llama that there is none of here
    qk_norm: bool = False
    """Whether each head's queries and keys pass an RMSNorm before the rotation, as in Qwen3."""
    n_experts: int = 8
    """Routed experts of each layer."""
    top_k: int = 2
    """Experts that each token goes through."""
    n_shared_experts: int = 0
    """Experts that every token goes through besides, as one feed-forward of their common width (arXiv:2401.06066)."""
    router_scores: Literal["softmax", "softmax_after", "sigmoid"] = "softmax"
    """What a chosen expert's output is weighted with: softmax over all experts, softmax over the chosen ones (after
    top-k), or the sigmoid of its own logit (arXiv:2412.19437)."""
    renormalize: bool = False
    """Divide a token's weights by their sum."""
    balance_loss: float = 0.0
    """Weight of the load-balancing loss in the training loss; see balance_over. 0: none."""
    balance_over: Literal["batch", "model", "sequence"] = "batch"
    """What is to be balanced: each layer over the global batch (arXiv:2501.11873), the sum of all layers over it (what
    transformers computes), or each layer over each sequence (arXiv:2412.19437). The first two need the loads of the
    whole batch before the first backward: a forward more, where a rank runs several microbatches."""
    z_loss: float = 0.0
    """Weight of the router z-loss, the mean square of the logits' log-sum-exp (arXiv:2202.08906). 0: none."""
    bias_rate: float = 0.0
    """Balancing without a loss (arXiv:2408.15664): after each step, how much is added to or taken from the bias of an
    expert with less or more than the mean load. The bias counts for the choice of experts alone. 0: no such bias."""
    capacity_factor: float | None = None
    """In training, an expert takes of each sequence at most so many times its even share of the tokens, the first ones;
    the others go without it. Not given: no token is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("n_experts", 1), ("top_k", 1), ("n_shared_experts", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k ({self.top_k}) is more than n_experts ({self.n_experts})")
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"capacity_factor must be more than 0, not {self.capacity_factor}")
        if self.router_scores == "softmax_after" and self.renormalize:
            raise ValueError('renormalize has no effect with router_scores = "softmax_after": its weights add up to 1')

    def capacity(self, seq_len: int) -> int | None:
        """Tokens that an expert takes of a sequence of `seq_len`, at most; None: all."""
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * seq_len * self.top_k / self.n_experts)


class Context(NamedTuple):
    """What every block of one forward pass shares: that of models.llama, and what the blocks note."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | None
    cache: Any = None
    routing: dict[int, Routing] | None = None
    """layer -> where its tokens went, filled by the blocks"""


# -- the router --------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    """x [batch, seq, dim] -> Routing."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.n_experts) if config.bias_rate else None)

    def forward(self, x: Tensor) -> Routing:
        return route(x, self.weight, self.bias, self.config, self.training)


# -- the experts -------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """The routed experts of a layer, SwiGLU each."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(config.n_experts, config.ffn_dim, config.dim))
        self.w2 = nn.Parameter(torch.empty(config.n_experts, config.dim, config.ffn_dim))
        self.w3 = nn.Parameter(torch.empty(config.n_experts, config.ffn_dim, config.dim))

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return run_experts(x, routing, self.w1, self.w2, self.w3)


class SharedExperts(nn.Module):
    """What every token goes through: SwiGLU of the shared experts' common width."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        hidden = config.n_shared_experts * config.ffn_dim
        self.w1 = nn.Linear(config.dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoEFeedForward(nn.Module):
    """Router, experts, shared experts."""

    def __init__(self, config: MoEConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = SharedExperts(config) if config.n_shared_experts else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        routing = self.router(x)
        if context.routing is not None:
            context.routing[self.layer] = routing
        out = self.experts(x.flatten(0, 1), routing).unflatten(0, x.shape[:2])
        return out if self.shared is None else out + self.shared(x)


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: MoEConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Qwen3Attention(config) if config.qk_norm else Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = MoEFeedForward(config, layer)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.feed_forward(self.ffn_norm(x), context)


class MoE(Llama):
    """tokens [batch, seq] int64 -> logits [batch, seq, vocab_size]."""

    config_class = MoEConfig
    state_buffers = ("bias",)
    """buffers that are state of a run, those of the routers: 0 at first"""
    config: MoEConfig  # type: ignore[assignment]

    def __init__(self, config: MoEConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def context(  # type: ignore[override]
        self, tokens_like: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Context:
        """What the blocks share in one forward pass, and what they note of it; see models.llama.make_context."""
        shared = make_context(self.config, tokens_like, positions, document_ids)
        return Context(shared.cos, shared.sin, shared.mask, routing={})

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """`context`: that of this batch, if the caller wants what the blocks note in it."""
        x = self.embed(tokens)
        context = context or self.context(x, positions, document_ids)
        for layer in self.layers.values():
            x = layer(x, context)
        return self.head(x)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """As Llama's; w2 of the experts writes to the residual stream too, and is scaled down like it."""
        if name.endswith((".experts.w2", ".shared.w2.weight")):
            value.normal_(0.0, self.config.init_std / math.sqrt(2 * self.config.n_layers), generator=generator)
        elif name.endswith((".experts.w1", ".experts.w3", ".router.weight")):
            value.normal_(0.0, self.config.init_std, generator=generator)
        else:
            super().init_parameter(name, value, generator)

    @staticmethod
    def is_stacked(name: str) -> bool:
        """Whether the first dim of a parameter counts experts: each of them is drawn on its own."""
        return ".experts.w" in name

    # -- auxiliary losses ----------------------------------------------------------------------------------------------
    #
    # A trainer adds up `auxiliary_sums` over all parts of a global batch, and adds `auxiliary_loss` of each part to its
    # loss. Where `needs_totals`, the latter wants the sums of the whole batch first.

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether the training loss has terms besides the cross-entropy."""
        return self.config.balance_loss > 0 or self.config.z_loss > 0

    @property
    def needs_totals(self) -> bool:
        """Whether a part's share of the loss depends on the loads of the whole batch."""
        return self.config.balance_loss > 0 and self.config.balance_over != "sequence"

    @property
    def needs_all_layers(self) -> bool:
        """Whether it depends on those of all layers, which pipeline stages hold apart."""
        return self.needs_totals and self.config.balance_over == "model"

    @property
    def auxiliary_shape(self) -> tuple[int, int]:
        """That of `auxiliary_sums`."""
        return self.config.n_layers, 2 * self.config.n_experts + 4

    @torch.no_grad()
    def auxiliary_sums(self, context: Context) -> Tensor:
        """Sums over the tokens of one forward, float64 [n_layers, 2 * experts + 4]: by expert how often it was chosen
        and its scores; then entropy, squared log-sum-exp, dropped choices, and over sequences the balance loss of each,
        times its tokens. Zero for layers that are not here. What is global comes of sums over forwards."""
        assert context.routing is not None
        like = next(iter(context.routing.values())).logits
        absent = torch.zeros(self.auxiliary_shape[1], dtype=torch.float64, device=like.device)
        rows = [
            _sums(context.routing[layer], self.config) if layer in context.routing else absent
            for layer in range(self.config.n_layers)
        ]
        return torch.stack(rows)

    def auxiliary_loss(self, context: Context, tokens: int, totals: Tensor | None) -> Tensor:
        """The share of one forward in the weighted auxiliary losses of a global batch of `tokens` tokens, a scalar.

        `totals` are `auxiliary_sums` of the whole batch, if `needs_totals`. Losses are means over layers.
        """
        assert context.routing is not None
        config, total = self.config, None
        for layer, routing in context.routing.items():
            loss = routing.logits.new_zeros(())
            if config.balance_loss:
                if config.balance_over == "sequence":
                    balance = _sequence_balance(routing, config)
                else:
                    assert totals is not None
                    counts = totals[:, : config.n_experts]  # [layers, experts]
                    counts = counts.mean(0) if config.balance_over == "model" else counts[layer]
                    fraction = (counts / tokens).to(loss.dtype)
                    balance = config.n_experts * (fraction * routing.scores.sum((0, 1))).sum()
                loss = loss + config.balance_loss * balance
            if config.z_loss:
                loss = loss + config.z_loss * routing.logits.logsumexp(-1).square().sum()
            total = loss if total is None else total + loss
        assert total is not None
        return total / (tokens * config.n_layers)

    def auxiliary_values(self, totals: Tensor, tokens: int) -> dict[str, Tensor]:
        """What is worth logging of a step, from the `auxiliary_sums` of its global batch: scalars by name."""
        config, experts = self.config, self.config.n_experts
        counts, scores, rest = totals[:, :experts], totals[:, experts : 2 * experts], totals[:, 2 * experts :]
        if config.balance_over == "sequence":
            balance = rest[:, 3].mean() / tokens
        elif config.balance_over == "model":
            balance = experts * (counts.mean(0) * scores.mean(0)).sum() / tokens**2
        else:
            balance = experts * (counts * scores).sum(1).mean() / tokens**2
        z = rest[:, 1].mean() / tokens
        mean = counts.mean(1)
        load_max, variation = counts.amax(1) / mean, counts.std(1, correction=0) / mean
        values = {"moe/balance_loss": balance, "moe/z_loss": z}
        values["moe/auxiliary_loss"] = config.balance_loss * balance + config.z_loss * z
        for name, each in (
            ("load_max", load_max),
            ("load_cv", variation),
            ("entropy", rest[:, 0] / tokens),
            ("dropped", rest[:, 2] / (tokens * config.top_k)),
        ):
            if name == "dropped" and config.capacity_factor is None:
                continue
            values[f"moe/{name}"] = each.max() if name == "load_max" else each.mean()
            values |= {f"moe/{name}/{layer}": value for layer, value in enumerate(each)}
        return values

    @torch.no_grad()
    def after_update(self, totals: Tensor) -> None:
        """Move the router's biases of the layers that are here towards a balanced load (arXiv:2408.15664, algorithm 1);
        `totals` as for `auxiliary_values`."""
        if not self.config.bias_rate:
            return
        for layer in self.layers.values():
            feed_forward: Any = layer.feed_forward
            counts = totals[feed_forward.layer, : self.config.n_experts]
            bias = feed_forward.router.bias
            bias.add_((self.config.bias_rate * (counts.mean() - counts).sign()).to(bias.dtype))


def _sequence_balance(routing: Routing, config: MoEConfig) -> Tensor:
    """The sum over sequences of each one's balance loss times its tokens."""
    counts = F.one_hot(routing.chosen, config.n_experts).sum((1, 2))  # [batch, experts]
    seq = routing.chosen.shape[1]
    return config.n_experts * (counts.to(routing.scores.dtype) / seq * routing.scores.sum(1)).sum()


def _sums(routing: Routing, config: MoEConfig) -> Tensor:
    """One layer's row of `auxiliary_sums`."""
    experts = config.n_experts
    flat = routing.chosen.flatten()
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
    scores = routing.scores.double()
    others = torch.stack(
        [
            torch.special.entr(scores).sum(),
            routing.logits.double().logsumexp(-1).square().sum(),
            (routing.experts == experts).sum().double(),
            _sequence_balance(routing, config).double(),
        ]
    )
    return torch.cat([counts.double(), scores.sum((0, 1)), others])


ARCHITECTURE = MoE

PRESETS: dict[str, MoEConfig] = {
    # About 2.6M parameters with the byte vocabulary, 0.9M of them active: for trying things on a laptop.
    "debug": MoEConfig(
        vocab_size=512, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=192, max_seq_len=2048, n_experts=8,
        top_k=2, renormalize=True, balance_loss=0.01,
    ),
    "debug-shared": MoEConfig(
        vocab_size=512, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=96, max_seq_len=2048, n_experts=16,
        top_k=3, n_shared_experts=1, router_scores="sigmoid", renormalize=True, qk_norm=True, bias_rate=0.001,
    ),
    # The published shapes, with what transformers computes as the balance loss.
    "mixtral-8x7b": MoEConfig(
        vocab_size=32000, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, max_seq_len=32768,
        norm_eps=1e-5, rope_theta=1e6, n_experts=8, top_k=2, renormalize=True, balance_loss=0.02, balance_over="model",
    ),
    "qwen3-30b-a3b": MoEConfig(
        vocab_size=151936, dim=2048, n_layers=48, n_heads=32, n_kv_heads=4, head_dim=128, ffn_dim=768,
        max_seq_len=40960, norm_eps=1e-6, rope_theta=1e6, qk_norm=True, n_experts=128, top_k=8, renormalize=True,
        balance_loss=0.001, balance_over="model",
    ),
}  # fmt: skip
