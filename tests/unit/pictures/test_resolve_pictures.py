import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from drawn_pictures import as_trained, drawn, encoded, put
from vlmflow.config.data_settings import PictureLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.manifest import REASONS, PictureEntry, picture_counts, read_picture_manifest
from vlmflow.pictures.resolve import named_paths, resolve_pictures, say_what_was_found, write_picture_manifest
from vlmflow.pictures.roots import PictureRoots
from vlmflow.pictures.store import PictureStore

JPEG = encoded(drawn(), "JPEG")
OPENED: list[str] = []
sys.addaudithook(lambda event, values: OPENED.append(str(values[0])) if event == "open" else None)


def resolve(folder: Path, paths: list[str], processes: int = 1, **limits: Any) -> list[PictureEntry]:
    """Resolve paths against folder/root into folder/store."""
    return resolve_pictures(
        dict.fromkeys(paths, 1),
        PictureRoots([str(folder / "root")], "datasets.fire.image_roots"),
        PictureStore(folder / "store", "fire"),
        PictureLimits(**limits),
        processes,
        "resolve_images fire/train",
    )


def test_paths_are_counted_in_order_of_appearance(tmp_path: Path):
    """A row without a picture, or something that is not a row, names none; all others are there."""
    rows = ['{"image": "b"}', '{"image": "a"}', '{"image": "b", "x": [1]}', "7", "{}", '{"image": null}']
    rows += ['{"image": ["a"]}', '{"image": ""}', '{"images": [""]}', '"a"', '{"question": {"image": "c"}}']
    raw = put(tmp_path / "raw.json", f"[{','.join(rows)}]".encode())
    assert list(named_paths([raw], "train").items()) == [("b", 2), ("a", 2)]


def test_broken_rows_name_nothing(tmp_path: Path):
    """Bad bytes, half a surrogate pair, nesting without end."""
    rows = [
        b'{"image": "\xff"}',
        b'{"image": "\\ud800"}',
        b'{"image": "a", "x": ' + b"[" * 9999 + b"]" * 9999 + b"}",
    ]
    raw = put(tmp_path / "raw.json", b"[" + b",".join([*rows, b'{"image": "b"}']) + b"]")
    assert named_paths([raw], "train") == {"b": 1}


def test_every_path_gets_an_entry(tmp_path: Path):
    """A usable picture has a name and a digest, any other a reason."""
    put(tmp_path / "root/coco/train2017/000000000009.jpg", JPEG)
    put(tmp_path / "root/cut.jpg", JPEG[: len(JPEG) // 2])
    put(tmp_path / "root/png.jpg", encoded(drawn(), "PNG"))
    paths = ["coco/train2014/000000000009.jpg", "cut.jpg", "png.jpg", "gone.jpg", "../x.jpg", ""]
    entries = resolve(tmp_path, paths)
    assert [entry.path for entry in entries] == paths
    reasons = [entry.reason for entry in entries]
    assert reasons == [None, "undecodable", None, "missing", "path_outside", "path_invalid"]
    first = entries[0]
    assert first.name == "coco/train2014/000000000009.jpg"
    assert first.file == str(tmp_path / "root/coco/train2017/000000000009.jpg")
    assert (first.format, first.width, first.height, first.mode, first.bytes) == (
        "JPEG",
        64,
        48,
        "RGB",
        len(JPEG),
    )
    assert (entries[1].file, entries[1].name, entries[1].sha256) == (
        str(tmp_path / "root/cut.jpg"),
        None,
        None,
    )
    assert entries[2].format == "PNG"
    assert {reason for reason in reasons if reason} <= REASONS.keys()


def test_one_picture_has_one_digest_under_all_its_names(tmp_path: Path):
    """The leak check compares digests."""
    put(tmp_path / "root/coco/train2017/000000000009.jpg", JPEG)
    put(tmp_path / "root/copy.jpg", JPEG)
    entries = resolve(tmp_path, ["coco/val2014/000000000009.jpg", "copy.jpg"])
    assert entries[0].sha256 == entries[1].sha256
    assert entries[0].name != entries[1].name


def test_a_file_is_read_once_under_all_its_names(tmp_path: Path):
    put(tmp_path / "root/coco/train2017/000000000009.jpg", JPEG)
    put(tmp_path / "root/a.png", encoded(drawn().convert("RGBA"), "PNG"))
    (tmp_path / "root/link.png").symlink_to("a.png")
    paths = [f"coco/{split}/000000000009.jpg" for split in ("train2014", "val2014", "train2017")]
    paths += ["A.png", "a.png", ".\\a.png", "link.png"]
    OPENED.clear()
    entries = resolve(tmp_path, paths)
    assert sum(path.endswith("000000000009.jpg") for path in OPENED) == 1
    assert sum(path.endswith("root/a.png") for path in OPENED) == 1
    assert [entry.name for entry in entries] == [
        *paths[:3],
        *("A.png.rgb.png", "a.png.rgb.png", "a.png.rgb.png", "link.png.rgb.png"),
    ]
    for entry in entries:
        assert as_trained(tmp_path / "store/fire" / entry.name).size == (64, 48)


def test_the_trainer_sees_what_the_manifest_says(tmp_path: Path):
    """Every usable picture opens as RGB, upright, and with the size of its entry."""
    exif = Image.Exif()
    exif[0x0112] = 6
    grey = np.arange(64 * 48, dtype=np.uint16).reshape(48, 64) * 21
    pictures = {
        "plain.jpg": JPEG,
        "turned.jpg": encoded(drawn(), "JPEG", exif=exif),
        "alpha.png": encoded(drawn().convert("RGBA"), "PNG"),
        "palette.gif": encoded(drawn().quantize(8), "GIF"),
        "cmyk.jpg": encoded(drawn().convert("CMYK"), "JPEG"),
        "deep.png": encoded(Image.fromarray(grey), "PNG"),
        "grey.png": encoded(drawn().convert("L"), "PNG"),
        "new.avif": encoded(drawn(), "AVIF"),
        "old.tga": encoded(drawn(), "TGA"),
        "turned.tiff": encoded(drawn(), "TIFF", exif=exif),
    }
    for name, content in pictures.items():
        put(tmp_path / "root" / name, content)
    entries = resolve(tmp_path, list(pictures))
    rewritten = [entry.rewritten for entry in entries]
    assert rewritten == [None, "exif orientation", "alpha", "palette", "cmyk", "16 bit", None, "AVIF", "TGA", None]
    for entry in entries:
        seen = as_trained(tmp_path / "store/fire" / entry.name)
        assert (seen.mode, seen.size) == ("RGB", (entry.width, entry.height)), entry.name
    assert as_trained(tmp_path / "store/fire" / entries[1].name).size == (48, 64)
    assert np.asarray(as_trained(tmp_path / "store/fire" / entries[5].name)).max() == grey.max() // 256


def test_the_number_of_processes_changes_nothing(tmp_path: Path):
    paths = []
    for number in range(40):
        image = drawn(30 + number).convert("RGBA") if number % 5 == 0 else drawn(30 + number)
        put(tmp_path / f"root/{number}.png", encoded(image, "PNG"))
        paths += [f"{number}.png", f"{number}.PNG", f"gone/{number}.png"]
    assert resolve(tmp_path, paths) == resolve(tmp_path, paths, processes=3)


def test_limits_apply(tmp_path: Path):
    """The limits come from the configuration."""
    put(tmp_path / "root/a.jpg", JPEG)
    assert resolve(tmp_path, ["a.jpg"])[0].reason is None
    assert resolve(tmp_path, ["a.jpg"], max_bytes=len(JPEG) - 1)[0].reason == "too_many_bytes"
    assert resolve(tmp_path, ["a.jpg"], max_pixels=100)[0].reason == "too_many_pixels"
    assert resolve(tmp_path, ["a.jpg"], min_side=49)[0].reason == "too_small"
    assert resolve(tmp_path, ["a.jpg"], max_aspect=1.2)[0].reason == "too_elongated"


def test_pictures_added_later_are_found(tmp_path: Path):
    put(tmp_path / "root/a.jpg", JPEG)
    assert resolve(tmp_path, ["a.jpg", "b.jpg"])[1].reason == "missing"
    put(tmp_path / "root/b.jpg", JPEG)
    assert resolve(tmp_path, ["a.jpg", "b.jpg"])[1].name == "b.jpg"


def test_every_line_of_the_manifest_has_the_same_keys(tmp_path: Path):
    """Some readers take the columns from the first line."""
    put(tmp_path / "root/a.jpg", JPEG)
    write_picture_manifest(tmp_path / "train.jsonl", resolve(tmp_path, ["a.jpg", "é\u2028.jpg"]))
    lines = (tmp_path / "train.jsonl").read_bytes().splitlines()
    assert [list(json.loads(line)) for line in lines] == [list(PictureEntry.__struct_fields__)] * 2
    assert [entry.path for entry in read_picture_manifest(tmp_path / "train.jsonl")] == [
        "a.jpg",
        "é\u2028.jpg",
    ]


def test_missing_pictures_are_reported_by_source(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path / "root/a.jpg", JPEG)
    entries = resolve(tmp_path, ["a.jpg", "vg/1.jpg", "vg/2.jpg", "gqa/1.jpg"])
    with caplog.at_level(logging.INFO):
        say_what_was_found(entries, "datasets.fire.image_roots")
    assert "4 pictures named, 1 usable, of which 0 rewritten" in caplog.messages
    assert "missing, of source vg: 2 pictures, 2 rows" in caplog.messages


def test_pictures_under_other_names_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    put(tmp_path / "root/cafe\u0301.jpg", JPEG)
    put(tmp_path / "root/b.jpg", JPEG)
    entries = resolve(tmp_path, ["caf\xe9.jpg", "cafe\u0301.jpg", "B.jpg", "B.JPG", "gone.jpg"])
    assert [entry.differs for entry in entries] == ["unicode form", None, "letter case", "letter case", None]
    assert picture_counts(entries).other_names == {"letter case": 2, "unicode form": 1}
    with caplog.at_level(logging.INFO):
        say_what_was_found(entries, "datasets.fire.image_roots")
    assert "2 pictures whose files have names that differ in letter case" in caplog.messages


def test_first_frames_are_counted_by_format(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    frames = [drawn().convert("L"), drawn().convert("L").rotate(180)]
    for name, format in (("a.gif", "GIF"), ("b.gif", "GIF"), ("c.tif", "TIFF")):
        put(tmp_path / "root" / name, encoded(frames[0], format, save_all=True, append_images=frames[1:]))
    put(tmp_path / "root/d.gif", encoded(frames[0], "GIF"))
    entries = resolve(tmp_path, ["a.gif", "b.gif", "c.tif", "d.gif"])
    assert [entry.first_frame for entry in entries] == [True, True, True, None]
    assert picture_counts(entries).first_frames == {"GIF": 2, "TIFF": 1}
    with caplog.at_level(logging.INFO):
        say_what_was_found(entries, "datasets.fire.image_roots")
    assert "2 pictures of GIF with several frames, pages or sizes: only the first is used" in caplog.messages


def test_roots_without_any_of_the_pictures_stop_the_stage(tmp_path: Path):
    (tmp_path / "root").mkdir()
    entries = resolve(tmp_path, ["coco/1.jpg", "coco/2.jpg"])
    with pytest.raises(VlmflowError, match=r"none of 2 .*'coco/1.jpg': missing.*\n.*datasets\.fire\.image_roots"):
        say_what_was_found(entries, "datasets.fire.image_roots")
    say_what_was_found([], "datasets.fire.image_roots")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC: convert it to JPEG or PNG"),
        (b"<!DOCTYPE html><html>", "a web page: fetch the picture again"),
        (b'<?xml version="1.0"?><svg/>', "SVG, which has no pixels"),
        (JPEG[:300], "fetch or write the pictures again"),
        (b"", "the file is empty"),
    ],
)
def test_what_a_file_is_that_is_no_picture_is_said(tmp_path: Path, content: bytes, said: str) -> None:
    put(tmp_path / "root/a.jpg", content)
    with pytest.raises(VlmflowError, match=said):
        say_what_was_found(resolve(tmp_path, ["a.jpg"]), "datasets.fire.image_roots")


@pytest.mark.parametrize(
    ("path", "limits", "said"),
    [
        ("https://example.org/a.jpg", {}, "an address.*\n.*download them"),
        ("../a.jpg", {}, "path_outside.*\n.*paths below a folder"),
        ("b.jpg", {}, "missing.*\n.*name the folders"),
        ("a.jpg", {"min_side": 49}, "too_small.*\n.*picture_limits"),
        ("a.jpg", {"max_pixels": 9}, "too_many_pixels.*\n.*picture_limits"),
    ],
)
def test_the_advice_is_for_the_reason(tmp_path: Path, path: str, limits: dict[str, int], said: str) -> None:
    put(tmp_path / "root/a.jpg", JPEG)
    with pytest.raises(VlmflowError, match=said):
        say_what_was_found(resolve(tmp_path, [path], **limits), "datasets.fire.image_roots")


@pytest.mark.parametrize("path", ["https://example.org/a.jpg", "b\0.jpg", "lfs.jpg"])
def test_folders_are_not_asked_for_where_none_can_help(tmp_path: Path, path: str) -> None:
    put(tmp_path / "root/lfs.jpg", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(VlmflowError) as raised:
        say_what_was_found(resolve(tmp_path, [path]), "datasets.fire.image_roots")
    assert "name the folders" not in raised.value.next_step
