import os
import time
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
def total():
    x = torch.tensor([dist.get_rank() + 1.0]); dist.all_reduce(x); return x
def groups(n):
    from torch.distributed.device_mesh import init_device_mesh
    t=time.time()
    for _ in range(n): init_device_mesh("cpu",(2,2),mesh_dim_names=("dp","tp"))
    return (time.time()-t, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
def test_a():
    t=time.time()
    print(run_ranks(2, total), time.time()-t); t=time.time()
    print(run_ranks(2, total), time.time()-t); t=time.time()
    print(run_ranks(4, total), time.time()-t); t=time.time()
    print(run_ranks(4, groups,10), time.time()-t); t=time.time()
