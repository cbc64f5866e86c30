import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmflow.pictures.manifest import REASONS, Unusable, picture_name, spellings


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("coco/train2017/000000000009.jpg", "coco/train2017/000000000009.jpg"),
        ("coco\\train2017\\000000000009.jpg", "coco/train2017/000000000009.jpg"),
        ("./coco//train2017/./1.jpg", "coco/train2017/1.jpg"),
        ("geoqa+/images/0.png", "geoqa+/images/0.png"),
        ("wikiart/images/été à Paris.jpg", "wikiart/images/été à Paris.jpg"),
        ("a/..b/c...jpg", "a/..b/c...jpg"),
    ],
)
def test_a_path_becomes_its_name(path: str, name: str):
    r"""`\` is read as `/`."""
    assert picture_name(path) == name


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "\\\\server\\share\\x.jpg",
        "C:\\pictures\\x.jpg",
        "c:x.jpg",
        "../x.jpg",
        "coco/../../x.jpg",
        "coco\\..\\x.jpg",
        "http://example.org/x.jpg",
        "https:\\\\example.org\\x.jpg",
        "file:///etc/passwd",
        "s3://bucket/x.jpg",
    ],
)
def test_a_path_that_leads_out_is_refused(path: str):
    """Absolute paths, `..` and addresses."""
    assert picture_name(path).reason == "path_outside"


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "./",
        "a\x00.jpg",
        "a\n.jpg",
        "a\x9b.jpg",
        " a.jpg",
        "a.jpg ",
        "a\u00a0",
        "half\ud800.jpg",
        "x" * 248,
        "é" * 124,
        "/".join(["part"] * 101)[1:],
        "httpd/x.jpg",
        "a.png.rgb.png",
        "a.png.rgb.png/b.jpg",
        "./.archives/x.jpg",
    ],
)
def test_a_name_that_no_store_may_hold_is_refused(path: str):
    assert picture_name(path).reason == "path_invalid"


def test_the_longest_names_are_accepted():
    assert picture_name("x" * 247) == "x" * 247
    assert picture_name("é" * 123) == "é" * 123


def test_coco_is_looked_for_by_number():
    """2014 and 2017 hold the same pictures, with and without the 2014 prefix."""
    wanted = {
        "coco/train2014/000000231338.jpg",
        "coco/train2014/COCO_train2014_000000231338.jpg",
        "coco/val2014/000000231338.jpg",
        "coco/val2014/COCO_val2014_000000231338.jpg",
        "coco/train2017/000000231338.jpg",
        "coco/val2017/000000231338.jpg",
    }
    for name in wanted:
        assert spellings(name)[0] == name
        assert set(spellings(name)) == wanted
    assert set(spellings("coco/train2014/231338.jpg")) == wanted | {"coco/train2014/231338.jpg"}
    assert spellings("train2017/000000000009.jpg")[1] == "val2017/000000000009.jpg"


def test_other_pictures_are_looked_for_as_they_are():
    assert spellings("coco/test2015/000000000009.jpg") == ("coco/test2015/000000000009.jpg",)
    assert spellings("gqa/images/2325245.jpg") == ("gqa/images/2325245.jpg",)
    assert spellings("images/x.jpg") == ("images/x.jpg",)


def test_bare_mathvista_paths_get_their_folder():
    assert spellings("images/123.jpg") == ("images/123.jpg", "mathvista/images/123.jpg")


@given(st.text() | st.text("./\\:a \x00\ud800", max_size=12))
def test_any_text_is_a_safe_name_or_refused(path: str):
    name = picture_name(path)
    if isinstance(name, Unusable):
        assert name.reason in REASONS
        return
    assert not set(name.split("/")) & {"", ".", ".."}
    assert picture_name(name) == name
    for spelling in spellings(name):
        assert not set(spelling.split("/")) & {"", ".", ".."}
