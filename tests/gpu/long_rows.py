"""Rows in FIRE's raw form with FIRE's lengths: words and pictures without meaning."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

from PIL import Image

MEAN, LONGEST = 616, 8192
"""Tokens of a row of FIRE with its picture, on average; and of the longest here."""

SPREAD = 0.8
"""Standard deviation of a length's logarithm: few rows are long."""

PICTURE_SHARE, LARGEST_PICTURE = 0.25, 1024
"""The picture's share of a row's tokens; the most tokens of a picture."""

PATCH = 32
"""A picture has a token for so many pixels squared (Qwen3-VL)."""

ATTEMPT = 300
"""Tokens of text for each attempt of a row, about: an answer, and the feedback on it."""

FEWEST, MOST = 2, 30
"""Attempts of a row: an evaluation needs feedback before the last one; longer dialogues are rejected (max_turns)."""

AROUND = 14
"""Tokens around the words of a turn: the chat's marks, `Score: 3.` and the like."""

WORDS = """
the red cat sits on a small chair near two green trees and one old house while three blue birds fly over it there is no
dog in this picture but we can see some people who walk along a road with their bags you may count them from left to
right and then look at what they hold up
"""
"""A tokenizer that is learned from them has a token for each."""


def lengths_of_rows(rows: int, shrink: int = 1) -> list[int]:
    """Return the tokens of so many rows: on average MEAN, the longest LONGEST; both divided by `shrink`.

    The longest of few rows is shorter: it has a quarter of all tokens.
    """
    places = [NormalDist(sigma=SPREAD).inv_cdf((row + 0.5) / rows) for row in range(rows - 1)]
    shape = [math.exp(place) for place in places]
    longest = min(LONGEST, MEAN * rows // 4)
    each = (MEAN * rows - longest) / sum(shape)
    return [round(each * one / shrink) for one in shape] + [longest // shrink]


def write_rows(file: Path, pictures: Path, lengths: Sequence[int], seed: int) -> None:
    """Write a raw file with a row of each length, shuffled, and its pictures into the folder `pictures`."""
    rng = Random(seed)
    pictures.mkdir(parents=True, exist_ok=True)
    rows = [_row(f"{file.stem}-{number}.png", pictures, length, rng) for number, length in enumerate(lengths)]
    rng.shuffle(rows)
    file.write_text(json.dumps(rows))


def _row(name: str, pictures: Path, tokens: int, rng: Random) -> dict[str, Any]:
    side = max(2, round(min(tokens * PICTURE_SHARE, LARGEST_PICTURE) ** 0.5))
    picture = Image.new("RGB", (side, side))
    picture.putdata([(rng.randrange(256), rng.randrange(256), rng.randrange(256)) for _ in range(side * side)])
    picture.resize((side * PATCH, side * PATCH), Image.Resampling.NEAREST).save(pictures / name)
    text = tokens - side * side
    attempts = min(max(round(text / ATTEMPT), FEWEST), MOST)
    words = max(3, round(text / (2 * attempts)) - AROUND)  # what follows the last answer is not in the row
    turns = []
    for attempt in range(attempts):
        score = 10 if attempt == attempts - 1 else 3
        turns += [
            {"role": "student", "type": "response", "value": f"Answer: {_words(words, rng)}"},
            {"role": "teacher", "type": "feedback", "value": f"Score: {score}.\nFeedback: {_words(words, rng)}"},
        ]
    return {
        "image": name,
        "question": {"role": "user", "value": _words(words, rng)},
        "conversations": turns,
        "groundtruth": {"role": "user", "value": _words(3, rng)},
        "source": "generated",
        "round": attempts,
        "score": [3] * (attempts - 1) + [10],
    }


def _words(count: int, rng: Random) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))
