"""A picture's perceptual hash: 64 bits that change little when the picture is scaled, recompressed or brightened.

The method is pHash's "DCT based" hash (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions,
2010, section 3.2.1; https://www.phash.org): scale to 32 x 32 grey pixels, take the discrete cosine transform, keep the
8 x 8 lowest frequencies without the constant ones, and set one bit for each that is above their median.

ImageHash, the usual library, is not in the lock files: it needs SciPy and PyWavelets for one product of matrices, and
keeps the constant frequencies.
"""

import math

import numpy as np
from PIL import Image

BITS = 64
SIDE = 32
LOWEST = 8

FLAT = 2.0
"""The standard deviation of the 32 x 32 grey levels (0 to 255) below which a picture has no hash: all empty pages and
plain colours would look alike."""

_FREQUENCY = np.arange(1, LOWEST + 1)[:, None]
_COSINES = math.sqrt(2 / SIDE) * np.cos(math.pi * _FREQUENCY * (2 * np.arange(SIDE) + 1) / (2 * SIDE))
"""Rows 1 to 8 of the DCT-II matrix, 8 x 32."""

_WEIGHTS = np.uint64(1) << np.arange(BITS, dtype=np.uint64)


def perceptual_hash(image: Image.Image) -> int | None:
    """Return the hash of a picture in any mode, 0 to 2^64 - 1; None for a nearly plain one.

    The distance of two pictures is the number of bits in which their hashes differ (Hamming distance, 0 to 64).
    """
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float64)
    if pixels.std() < FLAT:
        return None
    frequencies = np.round(_COSINES @ pixels @ _COSINES.T, 3)  # a symmetric picture's zeros must be exact
    bits = (frequencies > np.median(frequencies)).ravel()
    return int(_WEIGHTS[bits].sum(dtype=np.uint64))
