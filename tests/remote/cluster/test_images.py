"""The project's built images: their user, their content, and what they must not contain."""

import json
import os
import re
import stat
from pathlib import Path

import pytest

from cluster import images, jobs
from cluster.cluster import Cluster
from cluster.image_store import carry_image, layers_in
from cluster.paths import PROJECT

TARGETS = pytest.mark.parametrize("target", images.TARGETS)

LEFT_BY_BUILDS = ("/root/*", "/tmp/*", "/var/cache/apt/*", "/var/lib/apt/lists/*", "/home/*/.cache", "/etc/pip.conf")  # noqa: S108
"""Caches and settings of build steps, which no layer may contain."""


def contents(layer: images.Layer, pattern: str) -> list[str]:
    """Return a layer's matching files and non-empty folders; a whiteout means a removed file."""
    found = []
    for path in layer.files.glob(pattern.lstrip("/")):
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode) or (stat.S_ISDIR(status.st_mode) and not os.listdir(path)):
            continue
        found.append(f"/{path.relative_to(layer.files)}")
    return found


@TARGETS
def test_a_build_leaves_no_caches_and_nothing_of_the_machine_that_built(cluster: Cluster, target: str) -> None:
    layers = images.layers(images.project_image(target))
    # The lowest layer is the base, which may have Debian's package lists.
    left = [path for layer in layers[1:] for pattern in LEFT_BY_BUILDS for path in contents(layer, pattern)]
    assert left == []


@TARGETS
def test_an_image_has_its_user_its_revision_and_tini_for_signals(cluster: Cluster, target: str) -> None:
    configuration = images.configuration(images.project_image(target))["config"]
    assert configuration["User"] == "1000"
    assert configuration["Entrypoint"] == ["/usr/bin/tini", "-g", "--"]
    labels = {key.rpartition(".")[2]: value for key, value in configuration["Labels"].items()}
    assert images.image_name(target) == f"vlmflow/{target}:{labels['version']}"
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])


@TARGETS
def test_an_image_runs_without_rights_and_reads_nothing_from_an_index(cluster: Cluster, target: str) -> None:
    image = images.project_image(target)
    cluster.carry_in(image)
    code = """
import getpass, importlib.metadata, json, os, pathlib, subprocess
home = pathlib.Path.home()
(home / "written").touch()
rest = ("CapEff", "NoNewPrivs", "Seccomp")
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "user": getpass.getuser(), "uid": os.getuid(), "home": str(home),
    "pins": {each.name.lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()},
    **{key: status[key] for key in rest},
}))
"""
    made = jobs.job(f"image-{target}", ["/usr/bin/tini", "-g", "--", "python", "-c", code], image)
    cluster.kubectl("delete", "job", f"image-{target}", "--ignore-not-found")
    said = json.loads(jobs.run(cluster, made, limit=120))
    assert (said["user"], said["uid"], said["home"]) == ("vlmflow", 1000, "/home/vlmflow")
    assert (said["CapEff"], said["NoNewPrivs"], said["Seccomp"]) == ("0000000000000000", "1", "2")
    for name, version in locked(PROJECT / "envs" / f"{target}.lock").items():
        assert said["pins"].get(name) == version, name


def locked(path: Path) -> dict[str, str]:
    """Return the pins of a lock file that hold for this machine (every line names one package)."""
    pins = {}
    for line in path.read_text().splitlines():
        requirement = line.split(" ;")[0].split(" \\")[0].strip()
        name, found, version = requirement.partition("==")
        if found and not line.startswith((" ", "#")) and " ;" not in line:
            pins[name.split("[")[0].lower().replace("_", "-")] = version
    return pins


def test_an_image_is_imported_unchanged_and_only_once(cluster: Cluster) -> None:
    image = images.project_image("data")
    cluster.carry_in(image)
    before = layers_in(cluster.node)
    carry_image(cluster.node, image)
    assert layers_in(cluster.node) == before
    lowest = images.layers(image)[0]
    assert lowest.digest in before
    built = (lowest.files / "etc" / "debian_version").stat()
    store = cluster.node.image_store / "io.containerd.snapshotter.v1.overlayfs" / "snapshots"
    carried = {path.stat().st_ino for path in store.glob("*/fs/etc/debian_version")}
    assert built.st_ino in carried, "a copy, where a link would do"


def test_an_image_is_built_again_only_when_its_sources_change(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    name = images.project_image("data")
    identity = images.image_id(name)
    capsys.readouterr()
    assert images.project_image("data") == name
    assert images.image_id(name) == identity
    assert "building" not in capsys.readouterr().out
