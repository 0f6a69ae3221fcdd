"""Two processes that train together: NCCL with a GPU for each where there are two, gloo on the CPU otherwise."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def backend():
    """The backend of the process group, and the kind of device of every rank."""
    several = dist.is_nccl_available() and torch.cuda.device_count() >= WORLD
    return ("nccl", "cuda") if several else ("gloo", "cpu")


def run(function, folder):
    """Call ``function(rank, device, folder)`` in every rank at once; it has to be importable."""
    mp.start_processes(_rank, (function, str(folder)), nprocs=WORLD, start_method="spawn")


def _rank(number, function, folder):
    torch.set_num_threads(1)
    name, kind = backend()
    device = torch.device(kind, number) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(name, init_method=f"file://{folder}/meet", rank=number, world_size=WORLD)
    function(number, device, folder)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
