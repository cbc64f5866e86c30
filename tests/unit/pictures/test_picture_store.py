"""Pictures in the store, and the manifest that names them."""

import multiprocessing
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from drawn_pictures import as_trained, drawn, encoded, put
from vlmflow.config.data_settings import PictureLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.decode import check_picture
from vlmflow.pictures.manifest import KnownPicture, PictureEntry, read_picture_manifest
from vlmflow.pictures.roots import Located
from vlmflow.pictures.store import PictureStore, refuse_changed_pictures, store_name

ALPHA = encoded(drawn(300, 200).convert("RGBA"), "PNG")
JPEG = encoded(drawn(), "JPEG")


def add(store: PictureStore, name: str, file: Path) -> str:
    """Check a file and add it, as the stage does; returns the name that rows carry."""
    picture, rgb = check_picture(file.read_bytes(), PictureLimits())
    located = Located(name, str(file))
    store.add(located, picture, rgb)
    return store_name(located, picture)


def test_a_plain_picture_is_a_link_to_its_file(tmp_path: Path):
    file = put(tmp_path / "root/A.JPG", JPEG)
    name = add(PictureStore(tmp_path / "store", "fire"), "coco/a.jpg", file)
    assert name == "coco/a.jpg"
    assert os.readlink(tmp_path / "store/fire/coco/a.jpg") == str(file)


def test_another_picture_is_a_link_to_its_copy(tmp_path: Path):
    """The trainer then sees the copy."""
    file = put(tmp_path / "root/a.png", ALPHA)
    name = add(PictureStore(tmp_path / "store", "fire"), "chartqa/a.png", file)
    assert name == "chartqa/a.png.rgb.png"
    (tmp_path / "store").rename(tmp_path / "moved")
    assert np.array_equal(np.asarray(as_trained(tmp_path / "moved/fire" / name)), np.asarray(drawn(300, 200)))


def test_a_copy_contains_only_pixels(tmp_path: Path):
    profile = encoded(drawn().convert("CMYK"), "JPEG", icc_profile=b"a profile of CMYK", comment=b"words")
    name = add(PictureStore(tmp_path / "store", "fire"), "a.jpg", put(tmp_path / "a.jpg", profile))
    with Image.open(tmp_path / "store/fire" / name) as copy:
        assert (copy.format, copy.mode, copy.info) == ("PNG", "RGB", {})


def test_a_copy_is_written_once_for_all_names_and_data_sets(tmp_path: Path):
    file = put(tmp_path / "a.png", ALPHA)
    names = [add(PictureStore(tmp_path / "store", dataset), f"{dataset}.png", file) for dataset in ("one", "two")]
    copies = {(tmp_path / "store" / name.split(".")[0] / name).resolve() for name in names}
    assert len(copies) == 1
    before = copies.copy().pop().stat()
    add(PictureStore(tmp_path / "store", "one"), "one.png", file)
    after = copies.pop().stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_link_follows_its_file_to_another_root(tmp_path: Path):
    store = PictureStore(tmp_path / "store", "fire")
    for root in ("old", "new"):
        file = put(tmp_path / root / "a.jpg", JPEG)
        add(store, "a.jpg", file)
        assert (tmp_path / "store/fire/a.jpg").resolve() == file


def test_the_store_of_a_mixture_has_the_pictures_of_its_data_sets(tmp_path: Path):
    pictures = tmp_path / "store"
    name = add(PictureStore(pictures, "fire"), "coco/a.png", put(tmp_path / "root/a.png", ALPHA))
    mixture = PictureStore(pictures, "blend")
    for _ in range(2):
        mixture.mix("fire")
    assert (pictures / "blend/fire").readlink() == Path("../fire")
    assert (pictures / "blend/fire" / name).samefile(pictures / "fire" / name)
    put(pictures / "blend/own/a.jpg", b"own")
    with pytest.raises(VlmflowError, match=r"blend/own: cannot make a link"):
        mixture.mix("own")


def test_only_links_are_ever_replaced(tmp_path: Path):
    """A person's own files or folders in place of the store remain."""
    own = put(tmp_path / "store/fire/a.jpg", b"own")
    (tmp_path / "store/fire/b.jpg").mkdir()
    file = put(tmp_path / "root/a.jpg", JPEG)
    for name in ("a.jpg", "b.jpg", "a.jpg/c.jpg"):
        with pytest.raises(VlmflowError, match=r"[abc]\.jpg: cannot make a link.*\n.*move it away"):
            add(PictureStore(tmp_path / "store", "fire"), name, file)
    assert own.read_bytes() == b"own"


def test_an_unwritable_store_is_reported(tmp_path: Path):
    put(tmp_path / "store/.rewritten", b"a file")
    with pytest.raises(VlmflowError, match=r"\.rewritten.*\n.*stores\.pictures"):
        add(PictureStore(tmp_path / "store", "fire"), "a.png", put(tmp_path / "a.png", ALPHA))


def test_the_rest_of_a_killed_run_is_overwritten(tmp_path: Path):
    file = put(tmp_path / "a.png", ALPHA)
    store = PictureStore(tmp_path / "store", "fire")
    name = add(store, "a.png", file)
    copy = (tmp_path / "store/fire" / name).resolve()
    whole = copy.read_bytes()
    copy.rename(copy.with_name(copy.name + ".part"))
    with copy.with_name(copy.name + ".part").open("r+b") as part:
        part.truncate(len(whole) // 2)
    add(store, "a.png", file)
    assert copy.read_bytes() == whole
    assert os.listdir(copy.parent) == [copy.name]


def test_runs_may_meet_in_one_store(tmp_path: Path):
    """Train and test are resolved at the same time and name the same pictures."""
    files = [
        put(tmp_path / f"root/{number}.png", encoded(drawn(40 + number).convert("RGBA"), "PNG")) for number in range(20)
    ]
    plain = put(tmp_path / "root/plain.jpg", JPEG)
    fork = multiprocessing.get_context("fork")
    runs = [fork.Process(target=add_all, args=(tmp_path / "store", files, plain)) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0] * 4
    for number, file in enumerate(files):
        seen = as_trained(tmp_path / "store/fire/deep" / f"{file.name}.rgb.png")
        assert np.array_equal(np.asarray(seen), np.asarray(drawn(40 + number)))
    assert not list((tmp_path / "store").rglob("*.part"))


def add_all(pictures: Path, files: list[Path], plain: Path) -> None:
    store = PictureStore(pictures, "fire")
    for file in files:
        add(store, f"deep/{file.name}", file)
        add(store, f"deep/{file.stem}/plain.jpg", plain)


@pytest.mark.parametrize("content", [ALPHA, JPEG], ids=["copy", "plain"])
def test_a_picture_that_changed_in_the_store_is_refused(tmp_path: Path, content: bytes):
    """A copy has its own digest in its name: that of the original says nothing about the copy."""
    file = put(tmp_path / "root/a", content)
    name = add(PictureStore(tmp_path / "store", "fire"), "a", file)
    picture, _ = check_picture(content, PictureLimits())
    entry = KnownPicture(name=name, sha256=picture.sha256, rewritten=picture.rewritten)
    refuse_changed_pictures(tmp_path / "store/fire", [entry])
    (tmp_path / "store/fire" / name).resolve().write_bytes(encoded(drawn(), "PNG"))
    with pytest.raises(VlmflowError, match=f"1 of 1 pictures have changed since they were checked: {name}"):
        refuse_changed_pictures(tmp_path / "store/fire", [entry])


LINE = msgspec.json.encode(PictureEntry(path="a.jpg", rows=2, reason="missing", detail="nowhere"))


def test_entries_are_read_in_order(tmp_path: Path):
    manifest = tmp_path / "train.jsonl"
    manifest.write_bytes(LINE + b"\n" + LINE.replace(b"a.jpg", b"b.jpg") + b"\n")
    entries = list(read_picture_manifest(manifest))
    assert [entry.path for entry in entries] == ["a.jpg", "b.jpg"]
    assert (entries[0].rows, entries[0].reason, entries[0].name) == (2, "missing", None)


@pytest.mark.parametrize("line", [b"{", b"", b"[]", b'{"path": "a.jpg"}', b'{"path": 1, "rows": 1}', b'"\xff"'])
def test_a_damaged_manifest_names_file_and_line(tmp_path: Path, line: bytes):
    manifest = tmp_path / "train.jsonl"
    manifest.write_bytes(LINE + b"\n" + line + b"\n")
    with pytest.raises(VlmflowError, match=rf"{manifest}, line 2: .*\n.*remove it"):
        list(read_picture_manifest(manifest))


def test_a_missing_manifest_is_named(tmp_path: Path):
    with pytest.raises(VlmflowError, match=r"nowhere\.jsonl"):
        list(read_picture_manifest(tmp_path / "nowhere.jsonl"))
