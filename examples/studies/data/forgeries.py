"""Micrographs in which a region was copied, rotated or mirrored, and pasted at another place of the same image."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter, map_coordinates, uniform_filter
from torch import Tensor

COPIES = {"near": (-45, 45), "rotated": (45, 315), "mirrored": (-180, 180), "any": (-180, 180)}
"""The kinds of copies, with the range of their angles in degrees. "any" mirrors half of them."""
RADII = 8, 12
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
        for _ in range(side**2 // 256):
            (v, u), (a, b), angle = rng.uniform(0, side, 2), rng.uniform(3, 9, 2), rng.uniform(0, np.pi)
            along = np.cos(angle) * (x - u) + np.sin(angle) * (y - v)
            across = np.cos(angle) * (y - v) - np.sin(angle) * (x - u)
            image[(along / a) ** 2 + (across / b) ** 2 < 1] = rng.uniform(0.3, 0.8)
        image += 0.2 * (image > 0) * gaussian_filter(rng.normal(size=image.shape), 1) / 0.28
    return images.clip(0, 1)


def region(side: int, centre: np.ndarray, matrix: np.ndarray, radii: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets from the centre, in the frame of the source, (2, side, side), and how much of each pixel is inside.

    ``radii`` are the Fourier coefficients of the radius as a function of the angle, for frequencies 0, 1, and so on.
    """
    offsets = np.einsum("ba,bij->aij", matrix, np.mgrid[:side, :side] - centre[:, None, None])
    angle = np.arctan2(*offsets)
    radius = sum((part * np.exp(1j * n * angle)).real for n, part in enumerate(radii))
    return offsets, 1 / (1 + np.exp((np.hypot(*offsets) - radius) / 0.5))


def spots(image: np.ndarray, count: int, textured: int, radius: float, size: float, rng: np.random.Generator) -> list:
    """At most ``count`` places that are ``2 size`` apart; the first ones are not of the background alone."""
    pixels, found = np.argwhere(np.ones(image.shape, bool)), []
    mean, square = (uniform_filter(x, 2 * int(radius) + 1).ravel() for x in (image, image**2))
    free = (np.abs(pixels - (len(image) - 1) / 2) < len(image) / 2 - size).all(1)
    for n in range(count):
        fit = free & (square - mean**2 > 0.01) if n < textured else free
        if fit.any():
            found.append(rng.choice(pixels[fit]) + rng.uniform(-0.5, 0.5, 2))
            free &= np.hypot(*(pixels - found[-1]).T) > 2 * size + 1
    return found


def forge(
    images: np.ndarray, kind: str, side: int, decoys: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A square of a micrograph, and the mask of both places of a copied region, which half of the squares have.

    All have ``decoys + 1`` pasted regions. Those that are no copies come from another square of the micrograph.
    """
    forged, count, places, sources = rng.integers(2), decoys + 1, [], []
    while len(places) <= count or len(sources) < count:
        whole = np.rot90(images[rng.integers(len(images))], rng.integers(4))[:, :: rng.choice([-1, 1])]
        corners = rng.integers(np.array(whole.shape) - side + 1, size=(2, 2))
        if np.abs(corners[0] - corners[1]).max() < side:
            continue
        image, elsewhere = (whole[a : a + side, b : b + side] for a, b in corners)
        radii = np.array([rng.uniform(*RADII), 0, 0, 0, 0], complex)
        if rng.integers(2):
            radii[2:] = radii[0] * rng.uniform(0, 0.15, 3) * np.exp(1j * rng.uniform(0, 2 * np.pi, 3))
        sizes = radii[0].real, np.abs(radii).sum()
        places, sources = spots(image, count + 1, 1, *sizes, rng), spots(elsewhere, count, count, *sizes, rng)
    first, *places = places
    pasted = [(elsewhere, source) for source in sources]
    if forged:
        pasted[0] = image, first
    mask = forged * region(side, first, np.eye(2), radii)[1]
    drawn = image.copy()
    for place, (square, source) in zip(places, pasted, strict=True):
        angle = np.radians(rng.uniform(*COPIES[kind]))
        matrix = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        if kind == "mirrored" or (kind == "any" and rng.integers(2)):
            matrix = matrix @ np.diag([1.0, -1.0])
        offsets, there = region(side, place, matrix, radii)
        values = map_coordinates(square, offsets + source[:, None, None], order=1, mode="nearest")
        drawn += there * (values - drawn)
        mask = mask + (square is image) * there
    noisy = drawn + rng.uniform(0, 0.02) * rng.normal(size=drawn.shape)
    file = io.BytesIO()
    Image.fromarray((255 * noisy.clip(0, 1)).astype(np.uint8)).save(file, "JPEG", quality=int(rng.integers(80, 99)))
    return np.asarray(Image.open(file), np.float32) / 255, mask > 0.5


def forgeries(images: np.ndarray, count: int, kind: str, side: int, decoys: int, seed: int) -> tuple[Tensor, Tensor]:
    """New images of mean 0 and variance 1, and masks, both (count, 1, side, side)."""
    rng = np.random.default_rng(seed)
    drawn, masks = zip(*(forge(images, kind, side, decoys, rng) for _ in range(count)), strict=True)
    x = torch.from_numpy(np.stack(drawn))[:, None]
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
    return x, torch.from_numpy(np.stack(masks))[:, None].float()
