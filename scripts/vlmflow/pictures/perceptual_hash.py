"""A picture's perceptual hash: 64 bits that change little when the picture is scaled, recompressed or brightened.

The method is pHash's "DCT based" hash (C. Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions,
2010, section 3.2.1; https://www.phash.org): grey, 32 x 32 pixels, its discrete cosine transform, of that the 8 x 8
lowest frequencies without the constant ones, one bit for each: above their median or not.

ImageHash, the usual library, is not in the locks: it needs SciPy and PyWavelets for what is one product of matrices
here, and keeps the constant frequencies.
"""

import math

import numpy as np
from PIL import Image

BITS = 64
SIDE = 32
LOWEST = 8

FLAT = 2.0
"""Grey levels (standard deviation, of 255) below which the 32 x 32 pixels tell nothing: an empty page, a plain colour.
All such pictures would look alike."""

_FREQUENCY = np.arange(1, LOWEST + 1)[:, None]
_COSINES = math.sqrt(2 / SIDE) * np.cos(math.pi * _FREQUENCY * (2 * np.arange(SIDE) + 1) / (2 * SIDE))
"""Rows 1 to 8 of the DCT-II matrix, 8 x 32."""

_WEIGHTS = np.uint64(1) << np.arange(BITS, dtype=np.uint64)


def perceptual_hash(image: Image.Image) -> int | None:
    """Give the hash of a picture in any mode, 0 to 2^64 - 1; None for one that is nearly of one colour.

    How near two pictures are is the number of bits in which their hashes differ (Hamming distance, 0 to 64).
    """
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    pixels = np.asarray(small, dtype=np.float64)
    if pixels.std() < FLAT:
        return None
    frequencies = np.round(_COSINES @ pixels @ _COSINES.T, 3)  # a zero of a symmetric picture is none of rounding
    bits = (frequencies > np.median(frequencies)).ravel()
    return int(_WEIGHTS[bits].sum(dtype=np.uint64))
