"""The devices that tests run on: those there are."""

import contextlib

import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@contextlib.contextmanager
def waiting_is_an_error():
    """Within, a call that waits for the GPU raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
