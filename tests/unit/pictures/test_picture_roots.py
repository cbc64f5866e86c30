"""Paths of pictures in rows, and the folders in which they are looked for."""

import os
import stat
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn_pictures import put
from vlmflow.core.errors import VlmflowError
from vlmflow.pictures.manifest import REASONS, Unusable, picture_name, spellings
from vlmflow.pictures.roots import LETTER_CASE, UNICODE_FORM, Located, PictureRoots, read_picture


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


KEY = "datasets.fire.image_roots"


def rooted(*roots: Path) -> PictureRoots:
    return PictureRoots([str(root) for root in roots], KEY)


def test_a_picture_is_found_under_its_path(tmp_path: Path):
    file = put(tmp_path / "gqa/images/1.jpg", b"")
    assert rooted(tmp_path).locate("gqa\\images\\1.jpg") == Located("gqa/images/1.jpg", str(file))
    assert rooted(tmp_path).locate("gqa/images/2.jpg").reason == "missing"
    assert rooted(tmp_path).locate("gqa/images/1.jpg/x").reason == "missing"


def test_an_absolute_path_is_that_of_its_root(tmp_path: Path):
    """As written, behind a link, and with more slashes; nothing leaves the roots."""
    root, link = tmp_path / "pictures", tmp_path / "link"
    file, found = put(root / "gqa/1.jpg", b""), Located("gqa/1.jpg", str(root / "gqa/1.jpg"))
    link.symlink_to(root)
    put(tmp_path / "pictures2/1.jpg", b"")
    for path in (str(file), f"{link}/gqa/1.jpg", f"{root}//gqa/./1.jpg"):
        assert rooted(link).locate(path) == found
    assert rooted(root).locate(f"{root}/GQA/1.jpg") == Located("GQA/1.jpg", str(file), LETTER_CASE)
    assert rooted(root).locate(f"{root}/gqa/2.jpg").reason == "missing"
    for path in (f"{root}/../pictures2/1.jpg", f"{root}2/1.jpg", str(root), "/", f"file:/{file}"):
        assert rooted(root).locate(path).reason in ("path_outside", "path_invalid"), path


def test_an_absolute_path_is_no_picture_of_another_root(tmp_path: Path):
    """Both pictures would have one name in the store."""
    one, other = put(tmp_path / "a/1.jpg", b""), put(tmp_path / "b/1.jpg", b"")
    roots = rooted(tmp_path / "a", tmp_path / "b")
    assert roots.locate(str(one)) == roots.locate("1.jpg") == Located("1.jpg", str(one))
    assert roots.locate(str(other)) == Unusable("name_conflict", "an earlier root has another file '1.jpg'")
    only = put(tmp_path / "b/2.jpg", b"")
    assert roots.locate(str(only)) == Located("2.jpg", str(only))
    assert roots.locate(str(tmp_path / "a/2.jpg")).reason == "missing"


def test_letter_case_is_matched_when_one_file_fits(tmp_path: Path):
    """Letter case, in folders and files."""
    file = put(tmp_path / "Coco/Train2017/A.JPG", b"")
    assert rooted(tmp_path).locate("coco/train2017/a.jpg") == Located("coco/train2017/a.jpg", str(file), LETTER_CASE)
    put(tmp_path / "Coco/Train2017/A.jpg", b"")
    found = rooted(tmp_path).locate("coco/train2017/a.jpg")
    both = "'Coco/Train2017/A.JPG', 'Coco/Train2017/A.jpg'"
    assert found == Unusable("ambiguous", f"files that differ from it only in letter case: {both}")
    assert rooted(tmp_path).locate("Coco/Train2017/A.JPG").file == str(file)
    assert rooted(tmp_path).locate("coco/train2017/A.JPG").reason == "ambiguous"


NFC, NFD = (unicodedata.normalize(form, "Übung/café 한글.jpg") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("stored", "named", "differs"),
    [
        (NFD, NFC, UNICODE_FORM),
        (NFC, NFD, UNICODE_FORM),
        (NFC, NFC, None),
        (NFD.upper(), NFC, LETTER_CASE),
        (NFD.replace("Ü", "ü").replace("U\u0308", "u\u0308"), NFC, LETTER_CASE),
        ("Screenshot 3.00\u202fPM.png", "Screenshot 3.00 PM.png", UNICODE_FORM),
        ("\ufb01re.jpg", "FIRE.jpg", LETTER_CASE),
        ("COCO/Train2017/000000000009.jpg", "coco/train2017/000000000009.jpg", LETTER_CASE),
    ],
)
def test_names_are_compared_as_people_see_them(tmp_path: Path, stored: str, named: str, differs: str | None) -> None:
    """As macOS stores names, and as people type them; the picture is called what the row calls it."""
    file = put(tmp_path / stored, b"")
    assert rooted(tmp_path).locate(named) == Located(named, str(file), differs)


def test_the_closest_name_wins_and_two_that_are_equally_close_are_ambiguous(tmp_path: Path) -> None:
    exact, form = put(tmp_path / "a\u1e69.jpg", b""), put(tmp_path / "as\u0323\u0307.jpg", b"")
    case = put(tmp_path / "A\u1e69.jpg", b"")
    assert rooted(tmp_path).locate("a\u1e69.jpg") == Located("a\u1e69.jpg", str(exact))
    exact.unlink()
    assert rooted(tmp_path).locate("a\u1e69.jpg") == Located("a\u1e69.jpg", str(form), UNICODE_FORM)
    put(tmp_path / "a\u1e63\u0307.jpg", b"")
    found = rooted(tmp_path).locate("a\u1e69.jpg")
    both = "'as\\u0323\\u0307.jpg', 'a\\u1e63\\u0307.jpg'"
    assert found == Unusable("ambiguous", f"files that differ from it only in unicode form: {both}")
    assert rooted(tmp_path).locate("A\u1e69.jpg").file == str(case)
    assert rooted(tmp_path).locate("A\u1e68.jpg").reason == "ambiguous"


def test_names_that_do_not_look_alike_are_not_one(tmp_path: Path) -> None:
    put(tmp_path / "m2.jpg", b"")
    assert rooted(tmp_path).locate("m\xb2.jpg").reason == "missing"


def test_a_name_that_becomes_a_path_in_another_form_leads_nowhere_else(tmp_path: Path) -> None:
    """Full-width dots and slashes are none."""
    put(tmp_path / "root/a/b.jpg", b"")
    put(tmp_path / "secret.jpg", b"")
    for path in ("\uff0e\uff0e/secret.jpg", "a\uff0fb.jpg", "a/\uff0e\uff0e/\uff0e\uff0e/secret.jpg"):
        assert rooted(tmp_path / "root").locate(path).reason == "missing"


def test_one_file_under_two_folder_names_is_not_ambiguous(tmp_path: Path):
    file = put(tmp_path / "coco/a.jpg", b"")
    (tmp_path / "COCO").symlink_to("coco")
    assert rooted(tmp_path).locate("Coco/a.jpg").file == str(file)


def test_both_of_two_folders_that_differ_in_case_are_searched(tmp_path: Path):
    put(tmp_path / "COCO/other.jpg", b"")
    file = put(tmp_path / "coco/A.jpg", b"")
    assert rooted(tmp_path).locate("Coco/a.jpg").file == str(file)


def test_the_first_root_wins_and_an_exact_name_wins_in_any(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    put(first / "A.jpg", b"")
    exact = put(second / "a.jpg", b"")
    put(first / "b.jpg", b"")
    put(second / "b.jpg", b"")
    assert rooted(first, second).locate("a.jpg").file == str(exact)
    assert rooted(first, second).locate("b.jpg").file == str(first / "b.jpg")
    assert rooted(second, first).locate("b.jpg").file == str(second / "b.jpg")


@pytest.mark.parametrize(
    ("lies", "differs"),
    [("coco/train2017/000000231338.jpg", None), ("COCO/val2014/COCO_val2014_000000231338.JPG", LETTER_CASE)],
)
def test_coco_pictures_are_found_by_number(tmp_path: Path, lies: str, differs: str | None):
    """The name remains the row's, wherever the file is."""
    file = put(tmp_path / lies, b"")
    for name in ("coco/train2014/000000231338.jpg", "coco/val2017/000000231338.jpg"):
        assert rooted(tmp_path).locate(name) == Located(name, str(file), differs)
    assert rooted(tmp_path).locate("coco/train2014/000000231339.jpg").reason == "missing"


def test_bare_mathvista_paths_are_found(tmp_path: Path):
    file = put(tmp_path / "mathvista/images/12.jpg", b"")
    assert rooted(tmp_path).locate("images/12.jpg") == Located("images/12.jpg", str(file))


def test_links_out_of_the_roots_are_refused(tmp_path: Path):
    """Links of files and of folders, also under another letter case."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside / "secret.jpg", b"")
    put(tmp_path / "root-twin/secret.jpg", b"")
    root.mkdir()
    (root / "file.jpg").symlink_to(outside / "secret.jpg")
    (root / "folder").symlink_to("../outside")
    (root / "twin").symlink_to(tmp_path / "root-twin")
    for path in ("file.jpg", "FILE.jpg", "folder/secret.jpg", "FOLDER/SECRET.jpg", "twin/secret.jpg"):
        found = rooted(root).locate(path)
        assert isinstance(found, Unusable), path
        assert found.reason in ("path_outside", "missing")
    assert rooted(root).locate("file.jpg").reason == "path_outside"
    assert rooted(root).locate("folder/secret.jpg").reason == "path_outside"
    assert rooted(root, outside).locate("file.jpg").file == str(outside / "secret.jpg")


def test_links_that_lead_nowhere(tmp_path: Path):
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "odd.jpg").symlink_to(put(tmp_path / os.fsdecode(b"odd\xff.jpg"), b""))
    assert rooted(tmp_path).locate("gone.jpg").reason == "missing"
    assert rooted(tmp_path).locate("loop.jpg").reason == "missing"
    assert rooted(tmp_path).locate("odd.jpg").reason == "path_invalid"


def test_a_path_that_is_not_a_file_is_refused_and_another_root_is_tried(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "a.jpg").mkdir(parents=True)
    os.mkfifo(first / "pipe.jpg")
    file = put(second / "a.jpg", b"")
    assert rooted(first).locate("a.jpg").reason == "not_a_file"
    assert rooted(first).locate("pipe.jpg").reason == "not_a_file"
    assert rooted(first, second).locate("a.jpg").file == str(file)


def test_names_that_collide_in_the_store(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    put(first / "a", b"")
    put(second / "a/b.jpg", b"")
    put(second / "a/c/d.jpg", b"")
    roots = rooted(first, second)
    assert roots.locate("a/c/d.jpg").reason == "name_conflict"
    assert roots.locate("a/b.jpg").reason == "name_conflict"
    assert roots.locate("a") == Located("a", str(first / "a"))


def test_a_root_that_cannot_be_read_stops_the_stage(tmp_path: Path):
    file = put(tmp_path / "file", b"")
    for root in (tmp_path / "nowhere", file):
        with pytest.raises(VlmflowError, match=rf"{KEY}: {root}: "):
            rooted(tmp_path, root)


def test_a_picture_takes_few_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(50):
        put(tmp_path / f"coco/train2017/{number:012}.jpg", b"")
    calls = watch_disk(monkeypatch)
    roots = rooted(tmp_path)
    for number in range(50):
        assert isinstance(roots.locate(f"coco/train2017/{number:012}.jpg"), Located)
    assert sum(name == "lstat" for name, _ in calls) < 50 + 20
    assert not any(name == "listdir" for name, _ in calls)
    for number in range(50, 100):
        assert roots.locate(f"coco/train2017/{number:012}.jpg").reason == "missing"
    assert sum(name == "listdir" for name, _ in calls) <= 3


def watch_disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record every path that is checked, and check it."""
    calls: list[tuple[str, str]] = []

    def watched(name: str):
        real = getattr(os, name)

        def call(path, *args, **options):
            if not isinstance(path, int):  # an open file, of whatever else this process does
                calls.append((name, os.fspath(path)))
            return real(path, *args, **options)

        return call

    for name in ("lstat", "stat", "listdir", "scandir", "open", "readlink"):
        monkeypatch.setattr(os, name, watched(name))
    return calls


PARTS = st.sampled_from(
    [
        *("..", ".", "", "~", "C:", "http:", "etc", "passwd", "\x00", "\ud800", "x" * 300),
        *("a", "A", "é", "images", "7.jpg", "coco", "Coco", "train2014"),
        *("COCO_train2014_000000000009.jpg", "000000000009.jpg"),
    ]
)
PATHS = st.text() | st.lists(PARTS | st.text(max_size=3), max_size=8).map("/".join)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    for name in (
        "coco/train2017/000000000009.jpg",
        "a/A/a",
        "A/images/7.jpg",
        "é/7.jpg",
        "mathvista/images/7.jpg",
    ):
        put(root / name, b"")
    return root


@given(path=PATHS, slash=st.sampled_from("/\\"))
def test_any_text_is_a_file_below_the_root_or_refused(root: Path, path: str, slash: str):
    with pytest.MonkeyPatch.context() as monkeypatch:
        roots = rooted(root)
        calls = watch_disk(monkeypatch)
        found = roots.locate(path.replace("/", slash))
    assert all(Path(touched) == root or root in Path(touched).parents for _, touched in calls)
    assert all(".." not in Path(touched).parts for _, touched in calls)
    if isinstance(found, Unusable):
        assert found.reason in REASONS
    else:
        assert stat.S_ISREG(os.lstat(found.file).st_mode)
        assert root in Path(found.file).parents


def test_bytes_are_read_up_to_the_limit(tmp_path: Path):
    file = put(tmp_path / "a.jpg", b"12345")
    assert read_picture(str(file), 5) == b"12345"
    assert read_picture(str(file), 4).reason == "too_many_bytes"


def test_a_file_that_changed_since_it_was_found_is_refused(tmp_path: Path):
    assert read_picture(str(tmp_path / "gone.jpg"), 5).reason == "missing"
    os.mkfifo(tmp_path / "pipe.jpg")
    assert read_picture(str(tmp_path / "pipe.jpg"), 5).reason == "not_a_file"
    (tmp_path / "link.jpg").symlink_to(put(tmp_path / "target.jpg", b"1"))
    with pytest.raises(VlmflowError, match=r"link\.jpg"):
        read_picture(str(tmp_path / "link.jpg"), 5)


def test_an_unreadable_file_is_a_reason(tmp_path: Path):
    file = put(tmp_path / "a.jpg", b"1")
    file.chmod(0)
    # root reads everything: a child gives up its rights and checks
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            tmp_path.chmod(0o755)
            os.setuid(65534)
        found = read_picture(str(file), 5)
        os._exit(0 if getattr(found, "reason", "") == "unreadable" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_root_whose_real_path_is_not_text_is_refused_first(tmp_path: Path) -> None:
    """Manifests name files by their real paths, in UTF-8."""
    real = tmp_path / os.fsdecode(b"r\xffot")
    real.mkdir()
    (tmp_path / "root").symlink_to(real)
    with pytest.raises(VlmflowError, match=r"root: its real path .*r\\udcffot' is not Unicode text"):
        PictureRoots([str(tmp_path / "root")], "datasets.x.image_roots")


def test_without_folders_the_first_picture_is_refused() -> None:
    roots = PictureRoots([], "datasets.x.image_roots")  # enough for rows without pictures
    said = r"rows name pictures \('a/b\.jpg'\), and datasets\.x\.image_roots no folder\n.*datasets\.x\.modality: text"
    with pytest.raises(VlmflowError, match=said):
        roots.locate("a/b.jpg")
