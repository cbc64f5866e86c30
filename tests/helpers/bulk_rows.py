"""Files of any size in FIRE's and Volcano's form, for benchmarks: with the real row sizes and without faults."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec

from vlmflow.core.files import whole_file
from vlmflow.demo.sample import PATHS, PICTURES, Gallery
from vlmflow.demo.sample_dialogues import BLAME, DOUBTS, INSIGHTS, PRAISE, Row, questions_about
from vlmflow.demo.sample_scenes import bars_scene, shapes_scene

PICTURE_COUNT = 256
ROUNDS = (2,) * 45 + (3,) * 47 + (4,) * 8
"""FIRE's train split has 2.63 rounds per row on average."""


TEXT_ONLY = 0.043
"""Share of Volcano's rows that have no picture."""


def write_fire_rows(path: Path, rows: int, seed: int) -> None:
    """Write one JSON array of `rows` rows in FIRE's raw form, about 2.1 KB each (FIRE: 224 MB, 104,941 rows).

    The 256 pictures that the rows name are next to the file, in `pictures/`. The same arguments give the
    same bytes; memory does not grow with the rows.
    """
    _write(path, rows, seed, _row)


def write_volcano_rows(path: Path, rows: int, seed: int) -> None:
    """Write one JSON array of `rows` rows in Volcano's raw form, about 1.4 KB each (Volcano: 1.34 GB, 939,000 rows).

    Pictures, bytes and memory as in `write_fire_rows`.
    """
    _write(path, rows, seed, _volcano_row)


def _write(path: Path, rows: int, seed: int, make: Callable[[str, str, list[str], Random], Row]) -> None:
    rng = Random(seed)
    gallery = Gallery(path.parent / PICTURES, PICTURE_COUNT, rng)
    sources = rng.choices(list(PATHS), k=PICTURE_COUNT)
    images = [(gallery.add(source, "train")[0], source) for source in sources]
    sentences = _sentences(rng)
    encode = msgspec.json.Encoder().encode
    with whole_file(path) as file:
        for number in range(rows):
            file.write(b",\n" if number else b"[\n")
            file.write(encode(make(*rng.choice(images), sentences, rng)))
        file.write(b"\n]\n")


def _sentences(rng: Random) -> list[str]:
    """Collect a few thousand different sentences like those of students and teachers."""
    found = set()
    for number in range(600):
        for question in questions_about((bars_scene if number % 4 == 0 else shapes_scene)(rng)):
            found.update((*question.texts, *question.hints))
            found.update(f"{what[0].upper()}{what[1:]}." for what in question.seen)
            for wording in (*question.answers, *DOUBTS, *INSIGHTS, *BLAME, *PRAISE):
                found.add(wording.format(question.truth))
    return sorted(found)


def _row(image: str, source: str, sentences: list[str], rng: Random) -> Row:
    rounds = rng.choice(ROUNDS)
    turns = []
    scores = [*range(3, 2 + rounds), 10]
    for score in scores:
        thought, answer = rng.choices(sentences, k=rng.randint(4, 6)), rng.choices(sentences, k=2)
        turns.append(
            {
                "role": "student",
                "type": "response",
                "value": f"Thought: {' '.join(thought)}\nAnswer: {' '.join(answer)}\n\n",
            }
        )
        feedback = " ".join(rng.choices(sentences, k=rng.randint(6, 9)))
        turns.append({"role": "teacher", "type": "feedback", "value": f"Score: {score}.\nFeedback: {feedback}\n"})
    return {
        "image": image,
        "question": {"role": "user", "value": " ".join(rng.choices(sentences, k=rng.randint(1, 2)))},
        "conversations": turns,
        "groundtruth": {"role": "user", "value": rng.choice(sentences)},
        "source": source,
        "round": rounds,
        "score": scores,
    }


def _volcano_row(image: str, source: str, sentences: list[str], rng: Random) -> Row:
    picture = rng.random() >= TEXT_ONLY
    turns = []
    for number in range(rng.choice((1, 2, 2, 3))):
        question = " ".join(rng.choices(sentences, k=rng.randint(2, 5)))
        tag = "<image>\n" if picture and not number else ""
        turns.append({"from": "human", "value": tag + question})
        turns.append({"from": "gpt", "value": " ".join(rng.choices(sentences, k=rng.randint(8, 15)))})
    return {"id": f"{rng.getrandbits(48):012x}", **({"image": image} if picture else {}), "conversations": turns}
