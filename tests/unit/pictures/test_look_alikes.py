"""Similar pictures: the hash, the table of hashes, and the search."""

import io
import json
import time
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from drawn_pictures import drawn, encoded, put
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.look_alikes import (
    FARTHEST,
    LookAlike,
    find_look_alikes,
    hash_pictures,
    nearest_hashes,
    perceptual_hash,
    read_hashes,
)


def scene(seed: int, width: int = 480, height: int = 360) -> Image.Image:
    """Return a picture of soft shapes, which the seed decides."""
    random = np.random.default_rng(seed)
    return Image.fromarray(random.integers(0, 255, (7, 9, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )


def bits(one: Image.Image, other: Image.Image) -> int:
    return (perceptual_hash(one) ^ perceptual_hash(other)).bit_count()


@pytest.mark.parametrize("seed", range(5))
def test_a_changed_copy_of_a_picture_is_near_and_another_picture_is_far(seed: int) -> None:
    own = scene(seed)
    guises = [
        own.resize((150, 110)),
        Image.open(io.BytesIO(encoded(own, "JPEG", quality=25))),
        ImageEnhance.Brightness(own).enhance(0.8),
        ImageEnhance.Contrast(own).enhance(1.2),
        own.convert("L"),
        own.convert("P"),
    ]
    assert max(bits(own, guise) for guise in guises) <= 4
    assert min(bits(own, scene(other)) for other in range(100, 140)) > FARTHEST
    assert bits(own, own.transpose(Image.Transpose.FLIP_LEFT_RIGHT)) > FARTHEST


def test_the_transform_is_the_one_that_the_paper_names() -> None:
    """Compared with the sum in the definition, for one picture."""
    pixels = np.asarray(scene(3).convert("L").resize((32, 32), Image.Resampling.BOX), float)
    place = 2 * np.arange(32) + 1
    waves = [
        [
            (pixels * np.cos(np.pi * v * place / 64)[:, None] * np.cos(np.pi * u * place / 64)[None, :]).sum()
            for u in range(1, 9)
        ]
        for v in range(1, 9)
    ]
    expected = (np.array(waves) > np.median(waves)).ravel()
    assert perceptual_hash(scene(3)) == sum(1 << number for number, bit in enumerate(expected) if bit)


@pytest.mark.parametrize("mode", ["L", "RGB", "1"])
def test_a_plain_colour_has_no_hash(mode: str) -> None:
    """Otherwise all empty pages would be similar."""
    assert perceptual_hash(Image.new(mode, (200, 100), 1)) is None


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, FARTHEST))
def test_the_search_finds_the_same_pairs_as_comparing_all(data: st.DataObject, distance: int) -> None:
    hashes = st.lists(st.integers(0, 2**64 - 1), max_size=12)
    given_hashes = data.draw(hashes)
    own = st.tuples(st.sampled_from(given_hashes or [0]), st.sets(st.integers(0, 63), max_size=12))
    flips = data.draw(st.lists(own, max_size=12 if given_hashes else 0))
    wanted = [*data.draw(hashes), *(value ^ sum(1 << bit for bit in flip) for value, flip in flips)]
    place, found = nearest_hashes(np.array(wanted, np.uint64), np.array(given_hashes, np.uint64), distance)
    for number, value in enumerate(wanted):
        all_bits = [(value ^ other).bit_count() for other in given_hashes]
        if all_bits and min(all_bits) <= distance:
            assert (place[number], found[number]) == (all_bits.index(min(all_bits)), min(all_bits))
        else:
            assert found[number] == -1


@pytest.mark.parametrize("distance", range(FARTHEST + 1))
def test_hashes_that_differ_everywhere_a_little_are_found(distance: int) -> None:
    """The worst case for the segments: the differing bits are spread evenly over them."""
    spread = sum(1 << 16 * (number % 4) + 5 * (number // 4) for number in range(distance))
    one = 0x0123456789ABCDEF
    place, found = nearest_hashes(np.array([one ^ spread], np.uint64), np.array([one], np.uint64), distance)
    assert (place[0], found[0]) == (0, distance)


@pytest.mark.parametrize("distance", [4, FARTHEST])
def test_eighty_thousand_pictures_against_ten_thousand_take_seconds(distance: int) -> None:
    random = np.random.default_rng(0)
    given_hashes = random.integers(0, 2**64, 10_000, np.uint64)
    wanted = random.integers(0, 2**64, 80_000, np.uint64)
    wanted[:500] = given_hashes[:500] ^ np.uint64(0b1011 << 40)
    begun = time.perf_counter()
    place, found = nearest_hashes(wanted, given_hashes, distance)
    assert time.perf_counter() - begun < 20
    assert (found[:500] == 3).all()
    assert (place[:500] == np.arange(500)).all()
    assert (found[500:] >= 0).sum() < 20  # by chance there are 5 within 10 bits, and none within 4


def test_the_pictures_of_the_test_split_itself_are_not_near_it() -> None:
    hashes = {b"a": 0b0, b"b": 0b11, b"c": 0b1111, b"d": 2**63}
    assert find_look_alikes(hashes, [b"a", b"x"], 2) == {b"b": LookAlike(b"a", 2), b"d": LookAlike(b"a", 1)}
    assert find_look_alikes(hashes, [], 2) == {}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make a store of 40 pictures, one of which has two names, and its manifest."""
    entries = []
    for number in range(40):
        image = drawn(90, 60) if number == 7 else scene(number, 300, 200)
        content = encoded(image, "PNG" if number % 2 else "JPEG")
        put(tmp_path / "store" / f"{number}.img", content)
        size = dict(zip(("width", "height"), image.size, strict=True))
        entries.append(
            {"path": f"{number}", "name": f"{number}.img", "rows": 1, "sha256": sha256(content).hexdigest(), **size}
        )
    entries += [{**entries[3], "path": "again"}, {"path": "gone", "rows": 1, "reason": "missing"}]
    put(tmp_path / "train.jsonl", b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
    return tmp_path


def test_a_table_holds_every_usable_picture_once_on_any_number_of_cores(store: Path) -> None:
    for processes in (1, 3):
        hash_pictures(store / "train.jsonl", store / f"{processes}.jsonl", store / "store", processes)
    assert (store / "1.jsonl").read_bytes() == (store / "3.jsonl").read_bytes()
    hashes = read_hashes([store / "1.jsonl"])
    digests = [sha256((store / "store" / f"{number}.img").read_bytes()).digest() for number in range(40)]
    assert list(hashes) == digests
    assert (hashes[digests[2]] ^ perceptual_hash(scene(2))).bit_count() <= 4  # decoded at a smaller scale


@pytest.mark.parametrize(
    ("content", "said"), [(None, "are missing"), (encoded(drawn(), "PNG"), "have changed since they were checked")]
)
def test_a_picture_that_changed_since_is_an_error(store: Path, content: bytes | None, said: str) -> None:
    picture = store / "store" / "5.img"
    picture.unlink()
    if content is not None:
        picture.write_bytes(content)
    with pytest.raises(VlmflowError, match=rf"1 of 40 pictures {said}: 5\.img\n.*vlmflow refresh-pictures FILE store"):
        hash_pictures(store / "train.jsonl", store / "out.jsonl", store / "store", 1)
    assert not (store / "out.jsonl").exists()


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    table = put(tmp_path / "t.jsonl", b'{"sha256": "00", "hash": null}\n{"sha256": "0')
    with pytest.raises(VlmflowError, match=r"t\.jsonl, line 2: "):
        read_hashes([table])
