"""Draws pictures for questions: coloured shapes on a light background, and bar charts."""

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

Box = tuple[int, int, int, int]
Rgb = tuple[int, int, int]

COLOURS: dict[str, Rgb] = {
    "red": (205, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 200),
    "yellow": (235, 205, 40),
    "orange": (240, 130, 20),
    "purple": (130, 50, 160),
    "black": (25, 25, 25),
    "brown": (120, 75, 40),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross")
PLACES = ("top left", "top centre", "top right", "bottom left", "bottom centre", "bottom right")
"""The fields of a picture that contain shapes: two rows of three."""

SIZES = ((64, 64), (96, 64), (96, 96), (128, 96), (160, 120))
"""Widths and heights in pixels: 4 to 20 picture tokens of Qwen3-VL, few enough for a CPU."""

CLEAR = (0, 0, 0, 0)
"""The colour under full transparency is black, as in most programs: a loader that only drops the alpha channel shows a
black background."""


@dataclass(frozen=True)
class Thing:
    """One shape. spot: one of PLACES; box: left, top, right, bottom in pixels."""

    shape: str
    colour: str
    spot: str
    box: Box


@dataclass(frozen=True)
class ShapesScene:
    """Two to six shapes, no two of one colour or in one place. size: width and height in pixels."""

    size: tuple[int, int]
    ground: Rgb
    things: tuple[Thing, ...]

    def draw(self, transparent: bool = False) -> Image.Image:
        """Return the picture as RGB, or as RGBA with a transparent background."""
        picture = _empty(self.size, self.ground, transparent)
        pen = ImageDraw.Draw(picture)
        for thing in self.things:
            _draw_shape(pen, thing)
        return picture


@dataclass(frozen=True)
class BarsScene:
    """A bar chart of three to five bars, left to right: colour and height (2 to 9 tenths), all different."""

    size: tuple[int, int]
    ground: Rgb
    bars: tuple[tuple[str, int], ...]

    def draw(self, transparent: bool = False) -> Image.Image:
        """Return the picture as RGB, or as RGBA with a transparent background."""
        picture = _empty(self.size, self.ground, transparent)
        pen = ImageDraw.Draw(picture)
        width, height = self.size
        step = (width - 8) // len(self.bars)
        floor = height - 5
        for number, (colour, tenths) in enumerate(self.bars):
            left = 6 + number * step
            pen.rectangle((left, floor - tenths * (height - 10) // 10, left + step - 4, floor), COLOURS[colour])
        pen.line((3, floor, width - 3, floor), (0, 0, 0))
        pen.line((3, 3, 3, floor), (0, 0, 0))
        return picture


Scene = ShapesScene | BarsScene


def shapes_scene(rng: Random) -> ShapesScene:
    """Draw a random picture of shapes; two equal ones practically never occur (about 10^10 are possible)."""
    size = rng.choice(SIZES)
    count = rng.randint(2, 6)
    # Few kinds of shapes in one picture, so that a question can ask for their number.
    kinds = rng.sample(SHAPES, rng.randint(1, 3))
    places = sorted(rng.sample(range(len(PLACES)), count))
    things = [
        Thing(rng.choice(kinds), colour, PLACES[index], _box_within(index, size, rng))
        for index, colour in zip(places, rng.sample(list(COLOURS), count), strict=True)
    ]
    return ShapesScene(size, _light(rng), tuple(things))


def bars_scene(rng: Random) -> BarsScene:
    """Draw a random bar chart."""
    count = rng.randint(3, 5)
    colours = rng.sample(list(COLOURS), count)
    heights = rng.sample(range(2, 10), count)
    return BarsScene(rng.choice(SIZES), _light(rng), tuple(zip(colours, heights, strict=True)))


def _box_within(index: int, size: tuple[int, int], rng: Random) -> Box:
    cell = (size[0] // 3, size[1] // 2)
    side = min(cell) * rng.randint(55, 90) // 100
    left = index % 3 * cell[0] + rng.randint(1, cell[0] - side - 1)
    top = index // 3 * cell[1] + rng.randint(1, cell[1] - side - 1)
    return left, top, left + side, top + side


def _light(rng: Random) -> Rgb:
    return rng.randint(215, 255), rng.randint(215, 255), rng.randint(215, 255)


def _empty(size: tuple[int, int], ground: Rgb, transparent: bool) -> Image.Image:
    return Image.new("RGBA", size, CLEAR) if transparent else Image.new("RGB", size, ground)


def _draw_shape(pen: ImageDraw.ImageDraw, thing: Thing) -> None:
    left, top, right, bottom = thing.box
    middle, centre = (left + right) // 2, (top + bottom) // 2
    colour = COLOURS[thing.colour]
    match thing.shape:
        case "circle":
            pen.ellipse(thing.box, colour)
        case "square":
            pen.rectangle(thing.box, colour)
        case "triangle":
            pen.polygon([(middle, top), (right, bottom), (left, bottom)], colour)
        case "diamond":
            pen.polygon([(middle, top), (right, centre), (middle, bottom), (left, centre)], colour)
        case "cross":
            arm = (right - left) // 3
            pen.rectangle((left + arm, top, right - arm, bottom), colour)
            pen.rectangle((left, top + arm, right, bottom - arm), colour)
