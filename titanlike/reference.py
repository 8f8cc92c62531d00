"""The oracle: the same training step on one rank in plain PyTorch. Nothing here knows about meshes, buckets or stages.

What a mesh computes is compared with this, tensor by tensor. Only two things are shared with the trainer: the initial
values (a function of seed and name) and the plain model itself.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlike.build import DTYPES, draw_parameter, embeddings_of, group_of, master_dtype
from titanlike.config import Config
from titanlike.loss import IGNORE
from titanlike.schedule import lr_factor


@dataclasses.dataclass
class ReferenceStep:
    """What one step computed."""

    loss: float
    """mean over the valid labels of the global batch, nats"""
    grad_norm: float
    """global norm of the gradient before clipping"""
    gradients: dict[str, Tensor]
    """gradient of the mean loss by parameter name, before clipping; of the auxiliary losses too, if there are any"""
    auxiliary: dict[str, float] = dataclasses.field(default_factory=dict)
    """auxiliary losses and other numbers of the model's own (parallelize/auxiliary.py)"""


class Reference:
    """A plain model and a plain optimizer on one device, in float32 or float64 throughout."""

    def __init__(self, config: Config, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.config = config
        device = torch.device(device)
        dtype = master_dtype(DTYPES[config.train.dtype])
        with torch.device("meta"):
            self.model = config.architecture.model_class(config.model_config_for(vocab_size)).to(dtype)
        tied = self.model.tied_parameters
        self.model.to_empty(device=device)
        for buffer in self.model.buffers():
            buffer.zero_()
        for second, name in tied.items():
            owner, _, attribute = second.rpartition(".")
            setattr(self.model.get_submodule(owner), attribute, self.model.get_parameter(name))
        self.parameters = dict(self.model.named_parameters())
        groups, embeddings = [], embeddings_of(self.model)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                shape = tuple(parameter.shape)
                parameter.copy_(draw_parameter(self.model, config.run.seed, name, shape, device))
                scale, decay = group_of(config.optimizer, name, shape, name in embeddings)
                groups.append({"params": [parameter], "weight_decay": decay, "lr_scale": scale})
        o = config.optimizer
        if o.name == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=o.lr, momentum=o.momentum, foreach=False)
        else:
            self.optimizer = torch.optim.AdamW(
                groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, foreach=False, fused=False
            )
        self.steps_done = 0

    def loss_sum(self, tokens: Tensor, labels: Tensor, **masks: Tensor | None) -> Tensor:
        """Sum of the token losses of a batch: tokens and labels [rows, seq]."""
        return self._loss_sum(self.model(tokens, **masks), labels)

    @staticmethod
    def _loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")

    def step(self, tokens: Tensor, labels: Tensor, **masks: Tensor | None) -> ReferenceStep:
        """One optimizer step on the whole global batch [global_batch_size, seq]."""
        self.steps_done += 1
        count = max(int((labels != IGNORE).sum()), 1)
        self.optimizer.zero_grad()
        if hasattr(self.model, "auxiliary_sums"):
            like = torch.empty(0, dtype=next(self.model.parameters()).dtype, device=tokens.device)
            context = self.model.context(like.expand(*tokens.shape, 0), **masks)
            loss = self._loss_sum(self.model(tokens, context=context), labels) / count
            sums, total = self.model.auxiliary_sums(context), loss
            if self.model.has_auxiliary_loss:
                total = loss + self.model.auxiliary_loss(context, tokens.numel(), sums)
            total.backward()
            values = self.model.auxiliary_values(sums, tokens.numel())
            auxiliary = {name: value.item() for name, value in values.items()}
        else:
            loss = self.loss_sum(tokens, labels, **masks) / count
            loss.backward()
            sums, auxiliary = None, {}
        gradients = {n: p.grad.clone() for n, p in self.parameters.items()}
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
        limit = self.config.train.max_grad_norm
        if limit > 0:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit, foreach=False)
        lr = self.config.optimizer.lr * lr_factor(self.config.schedule, self.config.train.steps, self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.optimizer.step()
        if sums is not None:
            self.model.after_update(sums)
        return ReferenceStep(loss.item(), norm.item(), gradients, auxiliary)

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers and optimizer tensors under the names that checkpoints use."""
        state = {f"model.{name}": p.detach() for name, p in self.parameters.items()}
        state |= {f"model.{name}": buffer for name, buffer in self.model.named_buffers()}
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[f"optimizer.{key}.{name}"] = value
        return state
