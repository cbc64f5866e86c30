"""Small pictures for tests, with a different colour in every corner."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def drawn(width: int = 64, height: int = 48) -> Image.Image:
    """Return an RGB picture whose corners are black, red, green, and red with green and blue."""
    red = np.linspace(0, 255, width)[None, :].repeat(height, 0)
    green = np.linspace(0, 255, height)[:, None].repeat(width, 1)
    blue = red * green / 255
    return Image.fromarray(np.dstack([red, green, blue]).astype(np.uint8))


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return the bytes of a picture file."""
    content = io.BytesIO()
    image.save(content, format, **options)
    return content.getvalue()


def put(path: Path, content: bytes) -> Path:
    """Write a file, and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def as_trained(path: Path) -> Image.Image:
    """Load a picture as ms-swift 4.6.0 does (swift/template/vision_utils.py, load_image)."""
    image = Image.open(io.BytesIO(path.read_bytes()))
    return image if image.mode == "RGB" else image.convert("RGB")
