"""A model to be used, not trained: weights alone, on any mesh, cut by the plans that training uses.

Without gradients there is no sequence to split between blocks (a decoded token is one position), so the plan is that of
`sequence_parallel = false`. Each rank holds one pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelize.local import is_known, make_local
from parallelize.pipeline import Stage, cut_stage, run_forward
from parallelize.zero import NamedParameter, local_part
from titanlike import architectures
from titanlike.build import cut, master_dtype, materialise, materialise_buffers
from titanlike.checkpoint import Shard
from titanlike.errors import UserError
from titanlike.generate.cache import AttentionCache
from titanlike.generate.packed import PackedLinears
from titanlike.loss import IGNORE
from titanlike.mesh import Mesh
from titanlike.tables import stream_width, tables_of

if TYPE_CHECKING:
    from titanlike.trainer import Trainer


class InferenceModel:
    """This rank's part of a model. All ranks of the mesh make one and call its methods together."""

    def __init__(
        self,
        architecture: str,
        config: Any,
        mesh: Mesh,
        dtype: torch.dtype,
        seq_len: int,
        weights_of: Trainer | None = None,
    ) -> None:
        """`config` is the architecture's config dataclass; stages are balanced for sequences of `seq_len` tokens. The
        weights are uninitialised, and `shards` is for filling them; or they are those of a trainer, see `sharing`."""
        check_mesh(config, mesh.pp, mesh.tp)
        with torch.device("meta"):
            self.plain = architectures.resolve(architecture).model_class(config).to(dtype)
        tables = tables_of(architecture)
        parts = cut(
            self.plain,
            tables,
            mesh,
            seq_len=seq_len,
            sequence_parallel=False,
            split=None if weights_of is None else weights_of.built.layers_per_stage,
        )
        self.config = config
        self.mesh = mesh
        self.dtype = dtype
        self.stage: Stage = parts.stages[0]
        self.layers_per_stage = parts.layers_per_stage
        self.tables = tables
        self.width = stream_width(self.plain)
        self.stage_ranks = parts.stage_ranks
        self.named: list[NamedParameter] = []
        self.packed: PackedLinears | None = None
        if weights_of is None:
            self.named = materialise(parts.stages, parts.indices, self.plain.tied_parameters, mesh.device)
            self.buffers = materialise_buffers(parts.stages, mesh.device, master_dtype(dtype))
            self.stage.requires_grad_(False)
            self.packed = PackedLinears(self.stage.model)
        else:
            theirs = weights_of.built.stages[0].model
            for path, _ in list(self.stage.model.named_parameters(remove_duplicate=False)):
                owner, _, attribute = path.rpartition(".")
                weight = getattr(theirs.get_submodule(owner), attribute)
                setattr(self.stage.model.get_submodule(owner), attribute, weight)
            self.buffers = {name: buffer for name, buffer in theirs.named_buffers()}
            for path, buffer in self.buffers.items():
                owner, _, attribute = path.rpartition(".")
                setattr(self.stage.model.get_submodule(owner), attribute, buffer)

    @classmethod
    def sharing(cls, trainer: Trainer) -> InferenceModel:
        """A model whose weights are the trainer's own tensors, as they are at each call. All ranks call it, if
        `can_share`."""
        config, built = trainer.config, trainer.built
        return cls(
            config.model.architecture,
            built.plain.config,
            trainer.mesh,
            built.dtype,
            config.train.seq_len,
            weights_of=trainer,
        )

    @staticmethod
    def can_share(trainer: Trainer) -> bool:
        """Whether a trainer's weights can be used in place: one stage on each rank, in the order of the ranks, and an
        attention that keeps a cache."""
        built = trainer.built
        in_order = built.stage_ranks == list(range(trainer.mesh.pp))
        # Under ep all dp ranks must run the same forwards, and a generator shares prompts out over dp.
        return in_order and trainer.mesh.ep == 1 and keeps_cache(built.plain)

    def shards(self) -> dict[str, Shard]:
        """The weights of this rank as boxes of the plain model's tensors, by their plain names, to be filled before
        the model is first used."""
        weights = {
            named.name: Shard(local_part(named.parameter), tuple(named.parameter.shape), named.box_offset)
            for named in self.named
        }
        return weights | {name: Shard.whole(buffer) for name, buffer in self.buffers.items()}

    def go_local(self) -> None:
        """Under tp, go on with local tensors and written-out collectives, if the plan is one that parallelize.local
        knows: less work for each operation. To be called when the weights are there; they stay where they are."""
        if self.stage.tp_mesh is None:
            return
        plan = self.tables.tensor_plan(self.plain, self.mesh.tp, False)
        if not is_known(plan):
            return
        first_parts, last_parts = self.tables.parts(self.plain)
        model = cut_stage(self.plain, self.layers_per_stage, self.mesh.coordinate("pp"), first_parts, last_parts)
        make_local(model, self.stage.model, plan, self.mesh.group("tp"), last_parts)
        first, last = self.stage.first, self.stage.last
        self.stage = Stage(model, self.stage.loss, first=first, last=last, tp_mesh=None, stream=None)
        if self.packed is not None:
            self.packed = PackedLinears(model)
            self.named = []  # nobody else holds the weights, so they can be laid out anew

    # -- parts of a forward pass -------------------------------------------------------------------------------------

    def hidden(
        self, x: Tensor, positions: Tensor, mask: Tensor | None, caches: list[AttentionCache] | None = None
    ) -> Tensor:
        """What this stage makes of x: tokens [rows, seq] on the first stage, else the hidden states [rows, seq, dim]
        that the stage before returned. positions [rows or 1, seq]; for mask and caches (one per layer here), see
        AttentionCache. Returns [rows, seq, dim], under tp a DTensor."""
        stage = self.stage
        if stage.first:
            out = stage.model.embed(x)
        elif stage.tp_mesh is not None:
            out = DTensor.from_local(x, stage.tp_mesh, [stage.stream], run_check=False)  # type: ignore[list-item]
        else:
            out = x
        like = torch.empty(0, dtype=self.dtype, device=x.device).expand(*x.shape[:2], 0)
        context = stage.model.context(like, positions)
        if mask is not None:
            context = context._replace(mask=mask)
        for i, layer in enumerate(stage.model.layers.values()):
            out = layer(out, context if caches is None else context._replace(cache=caches[i]))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Last stage: [rows, seq, dim] -> logits [rows, seq, vocab], whole and the same on all tp ranks."""
        logits = self.stage.model.head(hidden)
        return logits.full_tensor() if isinstance(logits, DTensor) else logits

    def lay_out(self, rows: int) -> None:
        """Lay weights out in memory for products with so many rows, most of the time; a trainer's stay as they are."""
        if self.packed is not None:
            self.packed.for_rows(rows)

    def new_caches(self, length: int) -> list[AttentionCache]:
        """Empty caches for the layers of this stage."""
        return [AttentionCache(length) for _ in self.stage.model.layers]

    # -- numbers about given text ------------------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self, batches: Iterator[Any], rows: int) -> tuple[float, int]:
        """(sum of the token losses in nats, valid labels) over batches (titanlike.data.Batch) that every dp coordinate
        has the same number of; under pp each is run in microbatches of `rows` rows."""
        device = self.mesh.device
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in batches:
            self._add_loss(batch, rows, totals)
            if self.mesh.coordinate("tp") == 0 and self.stage.last:
                totals[1] += (batch.labels != IGNORE).sum().to(device)
        if self.mesh.coordinate("tp") != 0:
            totals.zero_()
        dist.all_reduce(totals)  # all ranks: each loss is counted on one tp rank of the last stage
        return float(totals[0]), int(totals[1])

    def _add_loss(self, batch: Any, rows: int, totals: Tensor) -> None:
        names = {"x": "tokens", "labels": "labels", "positions": "positions", "document_ids": "document_ids"}
        inputs = {key: getattr(batch, name) for key, name in names.items() if getattr(batch, name) is not None}
        inputs = {key: value.to(self.mesh.device) for key, value in inputs.items()}
        total_rows, seq = inputs["labels"].shape

        def run(_stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
            arguments = {key: value[microbatch * rows : (microbatch + 1) * rows] for key, value in inputs.items()}
            if hidden is not None:
                arguments["x"] = hidden
            with self._loss_context():
                out = self.stage(**arguments)
            if not self.stage.last:
                return out
            totals[0] += out.sum()
            return None

        def border(microbatch: int) -> Tensor:
            count = min(rows, total_rows - microbatch * rows)
            return self.border(count, seq)

        run_forward(run, self.stage_ranks, math.ceil(total_rows / rows), self.mesh.group("pp"), border)

    def border(self, rows: int, seq: int) -> Tensor:
        """An empty tensor for hidden states between stages."""
        return torch.empty(rows, seq, self.width, dtype=self.dtype, device=self.mesh.device)

    def _loss_context(self) -> Any:
        import contextlib

        if self.stage.tp_mesh is None:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()


def keeps_cache(plain: Any) -> bool:
    """Whether a model's attention can be given a cache; see models.llama.Context."""
    like = torch.empty(1, 1, 0, device="meta")
    return "cache" in getattr(plain.context(like), "_fields", ())


def check_mesh(config: Any, pp: int, tp: int) -> None:
    """Raise `UserError` if a model of this config cannot be cut over so many ranks."""
    layers, vocab = getattr(config, "n_layers", pp), getattr(config, "vocab_size", tp)
    heads, kv_heads = getattr(config, "n_heads", tp), getattr(config, "n_kv_heads", tp)
    if layers < pp:
        raise UserError(f"mesh.pp ({pp}) is more than the model's {layers} layers: each stage needs a layer")
    if heads % tp:
        raise UserError(f"mesh.tp ({tp}) must divide the model's {heads} attention heads")
    if kv_heads % tp and tp % kv_heads:
        raise UserError(f"mesh.tp ({tp}) must divide the model's {kv_heads} kv heads, or be a multiple of it")
    if -(-vocab // tp) * (tp - 1) >= vocab:
        raise UserError(f"a vocabulary of {vocab} ids leaves one of mesh.tp = {tp} ranks without any: use a smaller tp")
