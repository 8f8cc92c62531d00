"""The mesh of ranks: axes pp, dp, tp, outermost first, so that tensor-parallel ranks are neighbours on one machine.

Properties: every question about ranks, groups and devices is answered here. Nothing else in the code reads RANK or asks
for `torch.cuda`.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.errors import UserError
from titanlike.rendezvous import store_of_this_start

AXES = ("pp", "dp", "tp")


def world_size() -> int:
    """The number of ranks that the launcher started; 1 without a launcher. Needs no process group."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def pick_device(name: str = "auto") -> torch.device:
    """The device of this rank: `cpu`, `cuda`, or the machine's accelerator where there is one (`auto`).

    Raises:
        UserError: there is no such device.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = accelerator.type if accelerator is not None and accelerator.type == "cuda" else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.accelerator.is_available():
        raise UserError(f'run.device = "{name}", but torch {torch.__version__} sees no such device here: use "cpu"')
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", "0")))
    torch.accelerator.set_device_index(device.index)
    return device


def set_tf32(device: torch.device, allowed: bool) -> None:
    """Whether matrix products of float32 tensors on a CUDA device may round their inputs to TF32, for the whole
    process. Elsewhere nothing changes."""
    if device.type == "cuda":
        # Said either way: an environment variable (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, set in some containers) changes
        # torch's own default. Not by torch.backends.cuda.matmul.fp32_precision: after that torch refuses to tell the
        # precision in the older way, in which its compiler asks.
        torch.set_float32_matmul_precision("high" if allowed else "highest")


def init_distributed(device: torch.device, timeout_s: float = 600.0, debug: bool = False) -> None:
    """Join the default process group: gloo for CPU tensors, NCCL for CUDA tensors. Without a launcher, a group of one.

    With `debug`, ranks compare each collective before they run it, and raise where they differ.
    Raises the store's error if the other ranks do not come within `timeout_s` seconds.
    """
    if dist.is_initialized():
        return
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    device_id = device if device.type == "cuda" else None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, world = store_of_this_start(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device_id)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
        )


class Mesh:
    """Degrees, coordinates and process groups of this rank. Made by all ranks together, after `init_distributed`."""

    def __init__(self, pp: int, dp: int, tp: int, device: torch.device, ep: int = 1) -> None:
        world = dist.get_world_size()
        assert pp * dp * tp == world, f"pp {pp} x dp {dp} x tp {tp} is not the world size {world}"
        assert dp % ep == 0, f"ep {ep} does not divide dp {dp}"
        self.pp, self.dp, self.tp, self.ep = pp, dp, tp, ep
        self.device = device
        self.rank = dist.get_rank()
        self.device_mesh: DeviceMesh = init_device_mesh(device.type, (pp, dp, tp), mesh_dim_names=AXES)
        self._coordinates = dict(zip(AXES, self.device_mesh.get_coordinate() or (), strict=True))
        # For experts dp is cut in two: ranks with the same experts, and ep neighbours that hold a set of them together.
        self._split_dp: DeviceMesh | None = None
        if ep > 1:
            names = ("pp", "same_experts", "ep", "tp")
            self._split_dp = init_device_mesh(device.type, (pp, dp // ep, ep, tp), mesh_dim_names=names)

    def degree(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}[axis]

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`, from 0."""
        return self._coordinates[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `axis` alone."""
        return self.device_mesh.get_group(axis)

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """(ep, tp), or (ep) without tp: over what the weights of experts are cut. None without ep."""
        if self._split_dp is None:
            return None
        return self._split_dp["ep", "tp"] if self.tp > 1 else self._split_dp["ep"]

    @property
    def same_experts(self) -> dist.ProcessGroup:
        """The ranks along dp that hold the same experts: dp / ep of them."""
        return self.group("dp") if self._split_dp is None else self._split_dp.get_group("same_experts")

    def rank_at(self, pp: int, dp: int, tp: int) -> int:
        """The global rank at these coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the job: global rank 0."""
        return self.rank == 0

    def pair_group(self, first_pp: int, last_pp: int) -> dist.ProcessGroup | None:
        """The group of the two ranks at pp coordinates first_pp and last_pp that share this rank's dp and tp
        coordinates.

        All ranks must call it (every rank takes part in making each group); ranks at other pp coordinates get None.
        """
        mine: dist.ProcessGroup | None = None
        for dp in range(self.dp):
            for tp in range(self.tp):
                ranks = [self.rank_at(first_pp, dp, tp), self.rank_at(last_pp, dp, tp)]
                group = dist.new_group(ranks)
                if self.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine = group
        return mine
