from pathlib import Path

import pytest

from harness.storage import manifest, pod_folder
from harness.storage.manifest import Entry
from vlmflow.errors import VlmflowError

PLACE = "s3://bucket/merged/x/.manifest.json"


def test_a_manifest_says_what_was_written_into_it() -> None:
    entries = {"b/é.txt": Entry(0, '"0-3"'), "a": Entry(1 << 40, '"1"')}
    assert manifest.load(manifest.dump(entries), PLACE) == entries
    assert manifest.dump(entries) == manifest.dump(dict(reversed(entries.items())))


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"files": [1]}', b'{"files": {"a": {"size": "x", "etag": ""}}}', b'{"files": {"a": {}}}']
)
def test_what_is_no_manifest_is_refused_by_its_address(content: bytes) -> None:
    with pytest.raises(VlmflowError, match=f"{PLACE} is no manifest"):
        manifest.load(content, PLACE)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", ".", "a//b", "./a", manifest.NAME])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(VlmflowError, match="outside its folder"):
        manifest.load(manifest.dump({name: Entry(1, "")}), PLACE)


def test_every_file_that_differs_is_named() -> None:
    wanted = {"a": Entry(1, "x"), "b": Entry(2, "y"), "c": Entry(3, "z")}
    present = {"a": Entry(1, "x"), "b": Entry(2, "other"), "more": Entry(4, "")}
    assert [text.split(":")[0] for text in manifest.differences(wanted, present)] == ["b", "c"]
    assert manifest.differences({"a": Entry(1, "x")}, present) == []


def test_the_folder_of_a_lost_pod_is_removed_and_no_other(tmp_path: Path) -> None:
    for name in ("lost-pod-x1", "other"):
        (tmp_path / ".pods" / name / "fs").mkdir(parents=True)
    prefix = tmp_path / ".pods" / "$HOSTNAME"
    pod_folder.remove_of(prefix, "lost-pod-x1")
    pod_folder.remove_of(prefix, "never-began")
    pod_folder.remove_of(tmp_path / ".pods", "other")  # a folder that pods share is no pod's own
    assert [place.name for place in (tmp_path / ".pods").iterdir()] == ["other"]


def test_a_link_in_the_place_of_the_pods_folders_removes_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "state" / "lost-pod-x1").mkdir(parents=True)
    (tmp_path / ".pods").symlink_to("state")
    pod_folder.remove_of(tmp_path / ".pods" / "$HOSTNAME", "lost-pod-x1")
    (tmp_path / ".pods").unlink()
    (tmp_path / ".pods").mkdir()
    (tmp_path / ".pods" / "lost-pod-x1").symlink_to(tmp_path / "state")
    pod_folder.remove_of(tmp_path / ".pods" / "$HOSTNAME", "lost-pod-x1")
    assert (tmp_path / "state" / "lost-pod-x1").is_dir()


@pytest.mark.parametrize("name", ["", ".", "..", "../run", "a/b", "a..b", "-a", "$HOSTNAME", "a\n"])
def test_a_name_that_is_no_host_name_removes_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / ".pods" / "other").mkdir(parents=True)
    with pytest.raises(VlmflowError, match="no pod's host name"):
        pod_folder.remove_of(tmp_path / ".pods" / "$HOSTNAME", name)
    assert (tmp_path / ".pods" / "other").is_dir()
