"""Files to and from a cluster's volumes over connections that break: real processes, with a substitute for kubectl."""

import os
import stat
import sys
from pathlib import Path, PurePosixPath

import pytest

from vlmflow.core.errors import VlmflowError
from vlmflow.core.files import sha256_of
from vlmflow.remote.cluster import controller, file_stream
from vlmflow.remote.cluster import kubectl as copying
from vlmflow.remote.cluster.kubectl import Kubectl

KUBECTL = """#!{python}
import pathlib, subprocess, sys
count = pathlib.Path({count!r})
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
command = sys.argv[sys.argv.index("--") + 1:]
command[0] = {python!r}
limits = {limits}
if number >= len(limits):
    sys.exit(subprocess.call(command))
# A connection that breaks after so many bytes of what the pod says.
process = subprocess.Popen(command, stdout=subprocess.PIPE)
left = limits[number]
while left and (block := process.stdout.read1(left)):
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    left -= len(block)
process.kill()
sys.exit(1)
"""


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder instead of the cluster's volumes."""
    folder = tmp_path / "volume"
    folder.mkdir()
    monkeypatch.setattr(copying, "VOLUMES", (str(folder),))
    monkeypatch.setattr(copying, "TARGETS", PurePosixPath(folder, "targets"))
    monkeypatch.setattr(copying, "PAUSE", 0.0)
    return folder


def kubectl(folder: Path, limits: tuple[int, ...] = ()) -> Kubectl:
    """Return a kubectl whose pods are this machine; its n-th connection breaks after limits[n] bytes."""
    program = folder / "kubectl"
    program.write_text(KUBECTL.format(python=sys.executable, count=str(folder / "count"), limits=limits))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    os.environ["KUBECTL"] = str(program)
    return Kubectl("n")


@pytest.fixture(autouse=True)
def own_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECTL", "kubectl")  # restored at the end


def make_target(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(os.urandom(3_000_000))
    (folder / "inner" / "empty").touch()
    (folder / "inner" / "rows é.jsonl").write_bytes(b"{}\n" * 1000)
    (folder / "link").symlink_to("weights")
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("limits", [(), (10,), (100_000, 50, 2_000_000)])
def test_a_target_arrives_complete_over_connections_that_break(volume: Path, tmp_path: Path, limits: tuple) -> None:
    source, to = make_target(volume / "targets" / "merged" / "run"), tmp_path / "here" / "run"
    copying.get(kubectl(tmp_path, limits), "merged/run", to)
    assert digests(to) == digests(source)
    assert (to / "weights").stat().st_mtime_ns == (source / "weights").stat().st_mtime_ns
    assert {place.name for place in to.parent.iterdir()} == {"run"}


def test_an_incomplete_folder_does_not_have_its_name(volume: Path, tmp_path: Path) -> None:
    make_target(volume / "targets" / "x")
    with pytest.raises(VlmflowError, match=r"the stream broke off|bytes are missing") as failure:
        copying.get(kubectl(tmp_path, (1000, *[5] * 20)), "x", tmp_path / "x")
    assert "the same command resumes here" in failure.value.next_step
    assert not (tmp_path / "x").exists()
    assert (tmp_path / "x.part").is_dir()
    copying.get(kubectl(tmp_path), "x", tmp_path / "x")
    assert digests(tmp_path / "x") == digests(volume / "targets" / "x")
    assert not (tmp_path / "x.part").exists()


def test_present_bytes_are_not_sent_again_but_changed_ones_are(volume: Path, tmp_path: Path) -> None:
    source = make_target(volume / "targets" / "x")
    copying.get(kubectl(tmp_path), "x", tmp_path / "x")
    before = (tmp_path / "x" / "weights").stat().st_ino
    damaged = tmp_path / "x" / "inner" / "rows é.jsonl"
    damaged.write_bytes(b"[]\n" * 1000)
    (source / "weights").write_bytes((source / "weights").read_bytes() + b"more")
    copying.get(kubectl(tmp_path), "x", tmp_path / "x")
    assert digests(tmp_path / "x") == digests(source)
    unchanged = (tmp_path / "x" / "link").stat().st_ino
    copying.get(kubectl(tmp_path), "x", tmp_path / "x")
    assert (tmp_path / "x" / "link").stat().st_ino == unchanged != before


def test_a_single_file(volume: Path, tmp_path: Path) -> None:
    make_target(volume / "targets" / "x")
    copying.get(kubectl(tmp_path, (1_500_000,)), "x/weights", tmp_path / "w")
    assert sha256_of(tmp_path / "w") == sha256_of(volume / "targets" / "x" / "weights")
    assert not (tmp_path / "w.part").exists()


@pytest.mark.parametrize("limits", [(), (5, 5)])
def test_a_folder_is_uploaded_to_a_volume(volume: Path, tmp_path: Path, limits: tuple) -> None:
    source = make_target(tmp_path / "pictures")
    copying.put(kubectl(tmp_path, limits), source, f"{volume}/image-roots/mine")
    assert digests(volume / "image-roots" / "mine") == digests(source)


@pytest.mark.parametrize("target", ["../etc", "/etc/passwd", "merged/../../../etc"])
def test_paths_outside_of_the_volumes_are_refused(volume: Path, tmp_path: Path, target: str) -> None:
    with pytest.raises(VlmflowError, match="neither a target nor a path on a volume"):
        copying.get(kubectl(tmp_path), target, tmp_path / "x")


def test_a_link_that_leads_out_of_a_target_is_refused(volume: Path, tmp_path: Path) -> None:
    """A job's pod could plant a link to the controller's token."""
    (make_target(volume / "targets" / "x") / "planted").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("token")
    with pytest.raises(VlmflowError, match=r"planted is a link to .*secret, outside"):
        copying.get(kubectl(tmp_path), "x", tmp_path / "here")


def test_a_link_to_itself_in_a_target_is_refused_by_name(volume: Path, tmp_path: Path) -> None:
    (make_target(volume / "targets" / "x") / "round").symlink_to("round")
    with pytest.raises(VlmflowError, match="round is neither a file nor a folder"):
        copying.get(kubectl(tmp_path), "x", tmp_path / "here")


def test_nothing_is_written_or_read_over_a_link_on_a_volume(volume: Path, tmp_path: Path) -> None:
    """A job's pod could plant a link to the controller's checkout."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "code.py").write_text("ours")
    (volume / "image-roots").symlink_to(tmp_path / "checkout")
    make_target(tmp_path / "pictures")
    with pytest.raises(VlmflowError, match="image-roots is a link to"):
        copying.put(kubectl(tmp_path), tmp_path / "pictures", f"{volume}/image-roots/mine")
    with pytest.raises(VlmflowError, match="image-roots is a link to"):
        copying.get(kubectl(tmp_path), f"{volume}/image-roots/code.py", tmp_path / "here")
    assert [place.name for place in (tmp_path / "checkout").iterdir()] == ["code.py"]


@pytest.mark.parametrize("planted", ["mine.part", "mine/weights.part", "mine/inner"])
def test_a_link_in_the_place_of_what_is_unfinished_leads_nowhere(volume: Path, tmp_path: Path, planted: str) -> None:
    """A job's pod sees the upload. It may put a link there, and bytes of its own that would be written through it."""
    (tmp_path / "checkout").mkdir()
    (volume / planted).parent.mkdir(exist_ok=True)
    if planted == "mine/weights.part":
        (volume / "mine" / "weights").write_bytes(b"import evil")
        (volume / planted).symlink_to(tmp_path / "checkout" / "json.py")
    else:
        (volume / planted).symlink_to(tmp_path / "checkout")
    with pytest.raises(VlmflowError, match=f"{planted} is a link"):
        copying.put(kubectl(tmp_path), make_target(tmp_path / "pictures"), f"{volume}/mine")
    assert list((tmp_path / "checkout").iterdir()) == []


def test_a_file_that_a_link_replaces_while_it_is_read_is_not_followed(tmp_path: Path) -> None:
    file = tmp_path / "from" / "inner" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    found = file_stream.files_at(tmp_path / "from")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "file").write_text("token")
    file.unlink()
    file.symlink_to(tmp_path / "secrets" / "file")
    with pytest.raises(file_stream.Refused, match="inner/file is a link"), file_stream.opened(found["inner/file"]):
        pass
    file.unlink()
    file.parent.rmdir()
    file.parent.symlink_to(tmp_path / "secrets")
    with pytest.raises(file_stream.Refused, match="inner is a link"), file_stream.opened(found["inner/file"]):
        pass


def test_missing_paths_are_named(volume: Path, tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match="targets/merged/none does not exist"):
        copying.get(kubectl(tmp_path), "merged/none", tmp_path / "x")


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "", "a\0"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(file_stream.Refused):
        file_stream.inside(tmp_path / "to", name)


CONTROLLER = """
import pathlib, sys, time
output, ended = pathlib.Path("output"), pathlib.Path("ended")
if sys.argv[1] == "code":
    print(ended.read_text() if ended.exists() else "on")
else:
    begin = int(sys.argv[3])
    sys.stdout.write(output.read_text()[begin:])
    if begin:
        output.write_text(output.read_text() + "the end")
        sys.stdout.write("the end")
        ended.write_text("7")
    sys.exit(1)
"""


def test_a_broken_connection_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(controller, "PAUSE", 0.0)
    Path("controller.py").write_text(CONTROLLER)
    Path("output").write_text("begun, ")
    assert controller.follow(kubectl(tmp_path), ("python", "controller.py")) == 7
    shown, said = capfd.readouterr()
    assert shown == "begun, the end"
    assert "The run continues" in said


def test_a_controller_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match="does not answer for 0 s") as failure:
        controller.follow(kubectl(tmp_path), ("python", "none.py"), patience=0)
    assert "the run continues" in failure.value.next_step
