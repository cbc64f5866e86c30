"""The wheel: it has the clone's files, gives targets the same digests, and works where there is no clone."""

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import vlmflow
from small_workflow import make_rows
from vlmflow.core.child_programs import python_of
from vlmflow.harness.staleness import Code
from workflow_runs import ROOT, VERSION, checkout

UV = Path(sys.executable).with_name("uv")
BUILT = "built_from.txt"


class Wheel(NamedTuple):
    """A clone, its commit, the wheel that was built of it, and the folder into which that is unpacked."""

    clone: Path
    commit: str
    file: Path
    site: Path

    @property
    def workflow(self) -> Path:
        return self.site / "vlmflow" / "workflow"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    folder = tmp_path_factory.mktemp("wheel")
    clone = checkout(folder / "clone")
    call = [UV, "build", "--quiet", "--wheel", "--build-constraints", "envs/build.lock", "--out-dir", folder / "dist"]
    subprocess.run(call, cwd=clone, check=True)
    (file,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "site")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True).stdout
    return Wheel(clone, head.strip(), file, folder / "site")


def files_in(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# --- what it holds


def test_its_files_are_the_clones(wheel: Wheel) -> None:
    package = files_in(wheel.site / "vlmflow")
    workflow = {
        name.removeprefix("workflow/"): package.pop(name) for name in [*package] if name.startswith("workflow/")
    }
    assert workflow.pop(BUILT).decode().strip() == wheel.commit
    assert package == files_in(wheel.clone / "scripts" / "vlmflow")
    for name, content in workflow.items():
        assert content == (wheel.clone / name).read_bytes(), name
    for folder in ("envs", "notebooks", "profiles", "recipes", "rules", "scripts/stages"):
        inside = {name for name in workflow if name.startswith(f"{folder}/")}
        assert inside == {f"{folder}/{name}" for name in files_in(wheel.clone / folder)}, folder
    assert {name for name in workflow if name.startswith("scripts/vlmflow")} == {"scripts/vlmflow/__init__.py"}
    assert {"Snakefile", "config.yaml", "pins.yaml", "picture_sources.yaml"} < set(workflow)


def test_one_version_is_everywhere(wheel: Wheel) -> None:
    assert vlmflow.__version__ == VERSION
    assert wheel.file.name == f"vlmflow-{VERSION}-py3-none-any.whl"


def test_a_change_that_is_not_committed_is_told(wheel: Wheel, tmp_path: Path) -> None:
    clone = shutil.copytree(wheel.clone, tmp_path / "clone", symlinks=True)
    with (clone / "config.yaml").open("a") as file:
        file.write("# mine\n")
    call = [UV, "build", "--quiet", "--build-constraints", "envs/build.lock", "--out-dir", tmp_path / "dist"]
    subprocess.run(call, cwd=clone, check=True)
    (file,) = (tmp_path / "dist").glob("*.whl")
    said = zipfile.ZipFile(file).read(f"vlmflow/workflow/{BUILT}").decode()
    assert said.strip() == f"{wheel.commit}+changes", "also of the wheel that is built of an sdist"


def test_the_code_of_every_stage_has_the_clones_digest(wheel: Wheel) -> None:
    """So nothing is stale for whoever goes on with a run of the other kind."""
    ours, theirs = Code(wheel.clone / "scripts"), Code(wheel.workflow / "scripts", package=wheel.site / "vlmflow")
    stages = sorted(file.stem for file in (wheel.clone / "scripts" / "stages").glob("*.py"))
    assert len(stages) > 30
    forms = tuple(f"vlmflow.rows.forms.{file.stem}" for file in (ROOT / "scripts/vlmflow/rows/forms").glob("*.py"))
    more = {"convert_rows": forms, "tell": ("vlmflow.search.study_program",)}
    for stage in stages:
        reads = "vlmflow/reports/templates" if stage.endswith("_page") else None
        digests = [code.digest(f"stages.{stage}", *more.get(stage, ()), reads=reads) for code in (ours, theirs)]
        assert digests[0] == digests[1], stage


# --- where there is no clone


def in_python(wheel: Wheel, code: str, python: Path = Path(sys.executable), path: Path | None = None) -> str:
    """Run code in a new process that finds the unpacked wheel as if it were installed; return what it prints.

    path: instead, its PYTHONPATH.
    """
    own = f"import sys; sys.path.insert(0, {str(wheel.site)!r}); " if path is None else ""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLMFLOW"))}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    words = [str(python), "-c", own + code]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", ["track", "search"])
def test_another_environment_sees_our_modules_and_none_of_the_packages_beside_them(wheel: Wheel, name: str) -> None:
    (wheel.site / "beside.py").touch()
    path = Path(in_python(wheel, "from vlmflow.core.processes import import_path; print(import_path())"))
    assert path == wheel.workflow / "scripts"
    assert {place.name for place in path.iterdir()} == {"stages", "vlmflow"}
    code = (
        "import importlib.util, vlmflow.core.child_programs as module; "
        "print(module.__file__, importlib.util.find_spec('beside'))"
    )
    module = wheel.site / "vlmflow" / "core" / "child_programs.py"
    assert in_python(wheel, code, python_of(name), path) == f"{module} None"


MODULE = """
module vlmflow:
    snakefile: "SNAKEFILE"
use rule * from vlmflow
"""


@pytest.fixture
def served(wheel: Wheel) -> Iterator[str]:
    """Serve the wheel's workflow, and return the address of its Snakefile."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(wheel.workflow))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/Snakefile"
        server.shutdown()


def as_address(wheel: Wheel, folder: Path, address: str) -> list[str]:
    return ["--snakefile", address]


def as_module_of_an_address(wheel: Wheel, folder: Path, address: str) -> list[str]:
    (folder / "Snakefile").write_text(MODULE.replace("SNAKEFILE", address))
    return []


def as_module(wheel: Wheel, folder: Path, address: str) -> list[str]:
    (folder / "Snakefile").write_text(MODULE.replace("SNAKEFILE", str(wheel.workflow / "Snakefile")))
    return []


def in_pods(wheel: Wheel, folder: Path, address: str) -> list[str]:
    block = {"kind": "prompt_completion", "modality": "text", "train": "rows.jsonl"}
    (make_rows(folder) / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"x": block}}))
    words = ["--snakefile", str(wheel.workflow / "Snakefile"), "--configfile", "mine.yaml"]
    words += ["--default-storage-provider", "fs", "--default-storage-prefix", str(folder), "--shared-fs-usage", "none"]
    return [*words, "--executor", "kubernetes", "--jobs", "1", "--", "data/x/stats.json"]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("way", "said"),
    [
        (as_address, "vlmflow: Snakemake cannot fetch it by an address"),
        (as_module_of_an_address, "vlmflow: Snakemake cannot fetch it by an address"),
        (as_module, "nor use it as a module: install it with pip, and write `vlmflow run FILE`"),
        (in_pods, "vlmflow: pods get their files from a git repository: clone vlmflow"),
    ],
)
def test_what_needs_a_clone_is_refused_with_a_sentence_before_the_first_job(
    wheel: Wheel, tmp_path: Path, served: str, way: Callable[[Wheel, Path, str], list[str]], said: str
) -> None:
    words = [sys.executable, "-m", "snakemake", "--cores", "1", *way(wheel, tmp_path, served)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "vlmflow:" in line]
    assert said in line
    assert "Traceback" not in done.stderr
    assert "rule " not in done.stderr + done.stdout
    assert not (tmp_path / "data").exists()


OUTER = """
rule train:
    output: "runs/merged/my-run"
    shell: "cd runs && vlmflow run my-run.yaml --cores 1 -n"
"""


@pytest.mark.slow
def test_a_run_in_a_bare_environment_ends_with_proven_weights(wheel: Wheel, tmp_path: Path) -> None:
    """Installed from its lock, without clone and network: begun, made, verified, and called by another workflow."""
    place = tmp_path / "python"
    uv = [UV, "pip", "install", "--quiet", "--python", place / "bin" / "python"]
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, place], check=True)
    subprocess.run([*uv, "--require-hashes", "-r", wheel.workflow / "envs" / "train.lock"], check=True)
    subprocess.run([*uv, "--no-deps", wheel.file], check=True)
    away = wheel.clone.rename(wheel.clone.with_name("away"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLMFLOW"))}
    home = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": "/tmp"}  # noqa: S108
    environment = kept | home | {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def offline(words: str, folder: Path = tmp_path, code: int = 0) -> str:
        call = ["unshare", "--net", "--map-root-user", "bash", "-c", f"ip link set lo up && {words}"]
        done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    try:
        offline("vlmflow init runs")
        offline("vlmflow init runs", code=1)
        runs = tmp_path / "runs"
        offline("vlmflow run my-run.yaml --cores 2", runs)
        proof = json.loads((runs / "merged" / "my-run" / "provenance.json").read_text())
        assert proof["git_commit"] == wheel.commit
        assert proof["versions"]["vlmflow"] == VERSION
        told = json.loads(offline("vlmflow verify --json", runs))
        assert told["good"]
        assert "Nothing to be done" in offline("vlmflow run my-run.yaml -n 2>&1", runs)
        assert "merged/qwen3vl-fire" in offline("vlmflow demo -n")
        shutil.rmtree(runs / "merged")
        (tmp_path / "Snakefile").write_text(OUTER)
        said = offline("snakemake --cores 1 2>&1", code=1)
        assert "publish_merged" in said, "the plan of the inner workflow"
        assert "runs/merged/my-run" in said
    finally:
        away.rename(wheel.clone)
