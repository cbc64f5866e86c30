"""The version is that of pyproject.toml, also where it must be repeated."""

import re
import subprocess

import pytest
import yaml

from workflow_runs import ROOT, VERSION

IMAGE = re.compile(r"\bvlmflow[-/](?:data|train|track|search|jupyter):([\w.-]+)")
TAG = re.compile(r"newTag: ([\w.-]+)")
ARGUMENT = re.compile(r"^ARG VERSION=(\S+)", re.MULTILINE)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and not name.startswith(("tests/", "envs/"))]


@pytest.mark.parametrize(("pattern", "at_least"), [(IMAGE, 14), (TAG, 6), (ARGUMENT, 2)])
def test_every_image_has_the_version(pattern: re.Pattern[str], at_least: int) -> None:
    named = [
        (name, version)
        for name in tracked()
        if (ROOT / name).is_file()
        for version in pattern.findall((ROOT / name).read_text(errors="replace"))
    ]
    assert len(named) >= at_least
    assert {version for _, version in named} == {VERSION}, named


def test_citation_and_release_notes_have_the_version() -> None:
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == VERSION
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == VERSION
