"""Micrographs in which a region was copied, rotated or mirrored, and pasted at another place of the same image."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates
from torch import Tensor

COPIES = {"near": (-45, 45), "rotated": (45, 315), "mirrored": (-180, 180), "any": (-180, 180)}
"""The kinds of copies, with the range of their angles in degrees. "any" mirrors half of them."""
RADII = 6, 12
"""Radius of the copied regions in pixels."""


def load(path: Path) -> np.ndarray:
    """Grey images of an .npz file whose array ``images`` is (N, H, W), each stretched to [0, 1].

    Raises:
        ValueError: if the file has no such array.
    """
    with np.load(path) as file:
        images = file["images"] if "images" in file else np.empty(0)
    if images.ndim != 3:
        raise ValueError(f"{path} must hold an array images of shape (N, H, W), got {images.shape}")
    low, high = (np.percentile(images, q, (1, 2), keepdims=True) for q in (1, 99.8))
    return np.clip((images - low) / np.maximum(high - low, 1), 0, 1).astype(np.float32)


def synthetic(count: int, side: int, seed: int) -> np.ndarray:
    """Images of bright ellipses with a texture, (count, side, side), in [0, 1]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side]
    images = np.zeros((count, side, side), np.float32)
    for image in images:
        for _ in range(side // 4):
            (v, u), (a, b), angle = rng.uniform(0, side, 2), rng.uniform(3, 9, 2), rng.uniform(0, np.pi)
            along = np.cos(angle) * (x - u) + np.sin(angle) * (y - v)
            across = np.cos(angle) * (y - v) - np.sin(angle) * (x - u)
            image[(along / a) ** 2 + (across / b) ** 2 < 1] = rng.uniform(0.3, 0.8)
        image += 0.2 * (image > 0) * gaussian_filter(rng.normal(size=image.shape), 1) / 0.28
    return images.clip(0, 1)


def crop(images: np.ndarray, side: int, rng: np.random.Generator) -> np.ndarray:
    """A square of a random image, rotated by a multiple of 90 degrees, mirrored or not."""
    image = images[rng.integers(len(images))]
    row, column = (rng.integers(length - side + 1) for length in image.shape)
    square = np.rot90(image[row : row + side, column : column + side], rng.integers(4))
    return square[:, ::-1] if rng.integers(2) else square


def region(side: int, centre: np.ndarray, matrix: np.ndarray, radii: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets from the centre, in the frame of the source, (2, side, side), and how much of each pixel is inside.

    ``radii`` are the Fourier coefficients of the radius as a function of the angle, for frequencies 0, 1, and so on.
    """
    offsets = np.einsum("ba,bij->aij", matrix, np.mgrid[:side, :side] - centre[:, None, None])
    angle = np.arctan2(*offsets)
    radius = sum((part * np.exp(1j * n * angle)).real for n, part in enumerate(radii))
    return offsets, 1 / (1 + np.exp((np.hypot(*offsets) - radius) / 0.5))


def forge(images: np.ndarray, kind: str, side: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """An image and the mask of both places of a copied region.

    Half of the images have a copy, a quarter a region of another image, which is no copy, and a quarter no region.
    """
    pasted = rng.choice(["copy", "copy", "other", "none"])
    while True:
        image = crop(images, side, rng)
        source = image if pasted == "copy" else crop(images, side, rng)
        radii = np.array([rng.uniform(*RADII), 0, 0, 0, 0], complex)
        if rng.integers(2):
            radii[2:] = radii[0] * rng.uniform(0, 0.15, 3) * np.exp(1j * rng.uniform(0, 2 * np.pi, 3))
        size = np.abs(radii).sum()
        places = rng.uniform(size, side - size, (2, 2))
        apart = np.linalg.norm(places[1] - places[0]) > max(12, 2 * size)
        around = tuple(slice(int(place - radii[0].real), int(place + radii[0].real) + 1) for place in places[0])
        if apart and min(image[around].std(), source[around].std()) > 0.1:  # not of the background alone
            break
    _, here = region(side, places[0], np.eye(2), radii)
    angle = np.radians(rng.uniform(*COPIES[kind]))
    matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    if kind == "mirrored" or (kind == "any" and rng.integers(2)):
        matrix = matrix @ np.diag([1.0, -1.0])
    offsets, there = region(side, places[1], matrix, radii)
    mask = np.zeros((side, side), bool)
    if pasted != "none":
        values = map_coordinates(source, offsets + places[0][:, None, None], order=1, mode="nearest")
        image = image + there * (values - image)
    if pasted == "copy":
        mask = (here > 0.5) | (there > 0.5)
    noisy = image + rng.uniform(0, 0.02) * rng.normal(size=image.shape)
    file = io.BytesIO()
    Image.fromarray((255 * noisy.clip(0, 1)).astype(np.uint8)).save(file, "JPEG", quality=int(rng.integers(80, 99)))
    return np.asarray(Image.open(file), np.float32) / 255, mask


def forgeries(images: np.ndarray, count: int, kind: str, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """New images of mean 0 and variance 1, and masks, both (count, 1, side, side)."""
    rng = np.random.default_rng(seed)
    drawn, masks = zip(*(forge(images, kind, side, rng) for _ in range(count)), strict=True)
    x = torch.from_numpy(np.stack(drawn))[:, None]
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
    return x, torch.from_numpy(np.stack(masks))[:, None].float()
