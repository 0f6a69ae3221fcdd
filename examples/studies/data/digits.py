"""scikit-learn's handwritten digits, 1797 images of 8 x 8 pixels."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor


def sklearn_digits(test_images: int = 597) -> tuple[Tensor, Tensor, np.ndarray, np.ndarray]:
    """Images (1797, 1, 8, 8) in [0, 1], labels, and indices to train and to test."""
    images, labels = load_digits(return_X_y=True)
    train, test = train_test_split(np.arange(len(images)), test_size=test_images, random_state=0, stratify=labels)
    return torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels), train, test
