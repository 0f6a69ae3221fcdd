"""The devices that tests run on: those there are."""

import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
