"""Processes that work together: NCCL with a GPU for each where there are as many, gloo on the CPU otherwise."""

import datetime
import multiprocessing
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def backend(world=WORLD):
    """The backend of the process group, and the kind of device of every rank."""
    several = dist.is_nccl_available() and torch.cuda.device_count() >= world
    return ("nccl", "cuda") if several else ("gloo", "cpu")


def run(function, folder, world=WORLD, seconds=600, imports=("torch",)):
    """Call ``function(rank, device, folder)``, which is importable, in every rank; each waits so many seconds."""
    multiprocessing.set_forkserver_preload(list(imports))
    arguments = function, str(folder), world, seconds
    mp.start_processes(_rank, arguments, nprocs=world, start_method="forkserver")


def _rank(number, function, folder, world, seconds):
    torch.set_num_threads(1)
    name, kind = backend(world)
    device = torch.device(kind, number) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        name, init_method=f"file://{folder}/meet", rank=number, world_size=world,
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip
    if function(number, device, folder) != "alone":
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
