"""The pages are true: links resolve, what they name exists, and the version is that of pyproject.toml."""

import ast
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import pytest
import yaml

from made_rows import form_rows
from vlmflow.config.model import Config, check_config
from vlmflow.config.yaml_file import read_layers
from vlmflow.rows.convert import ConvertedRow
from workflow_runs import ROOT, VERSION, refusal

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("k8s/*.md"), *ROOT.glob(".github/**/*.md")],
)
HOW_DO_I = ROOT / "docs" / "how-do-i.md"
CALL = re.compile(r"^make (\S+)((?: [A-Z]+=(?:\"[^\"]*\"|\S+))*)", re.MULTILINE)
"""A call of make in a page: its target, and its variables with their values."""

FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"((?:docs/[a-z-]+|k8s/README)\.md)(?:, ([A-Z][\w ]+))?")
"""A page that code or a message names, with the heading after a comma: `docs/kubernetes.md, Upgrade`."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def headings_of(page: Path) -> set[str]:
    return set(HEADING.findall(FENCE.sub("", page.read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_and_anchor_is_there(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}: {target} has no such heading"


def test_every_page_that_code_names_is_there_with_its_heading() -> None:
    files = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("rules/*"), *ROOT.glob("k8s/**/*.yaml"), *ROOT.glob("*.yaml")]
    found = 0
    for file in [*files, ROOT / "Snakefile", ROOT / "Makefile", ROOT / "Dockerfile"]:
        for name, heading in NAMED.findall(file.read_text()):
            page = ROOT / name
            found += 1
            assert page.is_file(), f"{file}: {name}"
            if heading:
                headings = headings_of(page)
                assert any(heading.startswith(one) for one in headings), f"{file}: {name}, {heading}"
    assert found > 20


FILE = re.compile(r"`((?:tests|scripts|rules|k8s|profiles|docs)/[\w./-]+\.\w+)`")


def test_every_file_that_a_page_names_is_there() -> None:
    theirs = ("k8s/overlays/mine/kustomization.yaml",)
    named = [(page, name) for page in PAGES for name in FILE.findall(page.read_text()) if name not in theirs]
    assert len(named) > 5
    for page, name in named:
        assert (ROOT / name).is_file(), f"{page}: {name}"


def texts_of_the_code() -> str:
    """Return all strings of the code, one per line; f-strings are split at their values."""
    files = [*ROOT.glob("scripts/**/*.py"), ROOT / "k8s" / "base" / "controller.py"]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*texts, (ROOT / "Makefile").read_text()])


FROM_OTHERS = {
    *("Directory cannot be locked", "missing in storage"),  # Snakemake
    "Invalid host header",  # Starlette
    *("is forbidden", "attempting to grant RBAC permissions not currently held", "not found"),  # the API server
    *("untolerated taint", "didn't match Pod's node affinity"),  # the scheduler
    *("Permission denied", "Read-only file system", "unhandled system error"),  # the system, NCCL
}
"""Words of quoted messages that are not ours."""


@pytest.mark.lengthy
def test_every_message_of_the_troubles_page_is_one_of_the_code() -> None:
    code = texts_of_the_code()
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "troubles.md").read_text(), re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 40
    for message in messages:
        for said in re.split(r"[…:;,()\"/=]|\. |\b\d[\d.]*|\bGB\b", message):
            words = said.strip(" .").split(" ")
            parts = {" ".join(part) for part in (words, words[1:], words[:-1])}  # the first or last may be a value
            assert len(words) < 2 or any(part in code or part in FROM_OTHERS for part in parts), (
                f"docs/troubles.md: {message}: no code says {said!r}"
            )


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page that are in one language."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def test_every_block_of_yaml_is_yaml() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page, "yaml")]
    assert len(found) > 5
    for page, block in found:
        assert yaml.safe_load(block), f"{page}: {block}"


def test_every_answer_of_the_how_do_i_page_is_a_configuration(tmp_path: Path) -> None:
    first, *answers = blocks(HOW_DO_I, "yaml")
    (tmp_path / "my-run.yaml").write_text(first)
    assert len(answers) > 15
    for answer in answers:
        (tmp_path / "answer.yaml").write_text(answer)
        files = [ROOT / "config.yaml", tmp_path / "my-run.yaml", tmp_path / "answer.yaml"]
        assert isinstance(check_config(read_layers(files), files), Config), answer


def test_every_row_of_the_how_do_i_page_is_read() -> None:
    read = form_rows("messages", None, {}, None, None)
    rows = blocks(HOW_DO_I, "json")
    assert len(rows) > 1
    for row in rows:
        (made,) = read("id", 0, row.encode())
        assert isinstance(made, ConvertedRow), row


def test_answers_of_the_how_do_i_page_are_short() -> None:
    for language in ("yaml", "json", "console", "python"):
        for block in blocks(HOW_DO_I, language):
            assert len(block.splitlines()) <= 12, block


def test_make_has_every_target_and_variable_that_a_page_calls() -> None:
    makefile = (ROOT / "Makefile").read_text()
    calls = [call for page in PAGES for block in blocks(page, "console") for call in CALL.findall(block)]
    assert len(calls) > 10
    for target, variables in calls:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) or target.startswith(".venv/"), target
        for variable in re.findall(r"([A-Z]+)=", variables):
            assert re.search(rf"^{variable} [?:]=", makefile, re.MULTILINE), f"make {target} {variable}=…"


def calls_of_vlmflow(page: Path) -> tuple[list[str], list[str]]:
    """Return what stands behind `vlmflow` in the lines of a page's console blocks, and in its text as code."""
    lines = "\n".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    typed = [call for line in lines for call in re.findall(r"(?:^|[|;&] ?)vlmflow +([^#|;&>]+)", line)]
    named = re.findall(r"`vlmflow ([^`&]+)[`&]", FENCE.sub("", page.read_text()))
    return typed, [call for call in named if call not in ("COMMAND --help", "cluster …")]


def test_vlmflow_has_every_command_and_option_that_a_page_calls() -> None:
    found = [(page, *calls_of_vlmflow(page)) for page in PAGES]
    assert sum(len(typed) for _, typed, _ in found) > 30
    assert sum(len(named) for _, _, named in found) > 30
    for page, typed, named in found:
        for call in typed:
            assert refusal(shlex.split(call)) == "", f"{page}: vlmflow {call}"
        for call in named:
            said = refusal(words := shlex.split(call))
            assert said == "" or ("Missing" in said and len(words) <= 2), f"{page}: vlmflow {call}: {said}"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_uninstalling_names_every_kind_but_those_that_hold_data() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    named = re.search(r"kubectl -n vlmflow delete (\S+) -l", page[page.index("## Uninstall") :])[1].split(",")
    holds_data = {"Namespace", "PersistentVolumeClaim", "PersistentVolume"}
    cluster_wide = {"ClusterRole", "ClusterRoleBinding"}  # a command of their own
    kustomize = {"Kustomization", "Component", None}
    kinds = {"Secret", "Job", "ConfigMap", "PodTemplate"}  # made by `make`, the executor, a generator, older overlays
    for file in ROOT.glob("k8s/**/*.yaml"):
        kinds |= {(document or {}).get("kind") for document in yaml.safe_load_all(file.read_text())}
    assert {plural(kind) for kind in kinds - holds_data - cluster_wide - kustomize} <= set(named)
    assert not {plural(kind) for kind in holds_data} & set(named)


def plural(kind: str) -> str:
    return re.sub("ys$", "ies", f"{kind.lower()}s")


def test_folders_of_the_library_import_as_the_design_page_says() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    order = re.findall(r"`(\w+)`", re.search(r"only from earlier ones in this list: (.*?)\. ", page, re.DOTALL)[1])
    library = ROOT / "scripts" / "vlmflow"
    assert set(order) < {folder.name for folder in library.iterdir()}
    for number, folder in enumerate(order):
        for file in (library / folder).rglob("*.py"):
            imported = set(re.findall(r"^\s*(?:from|import) vlmflow\.(\w+)", file.read_text(), re.MULTILINE))
            assert imported <= set(order[: number + 1]), f"{file}: {imported - set(order[: number + 1])}"


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


SERVED = re.compile(r"^\| .+ \| `([\w.]+)` \| `([\w/]+\.py)::(\w+)` \|$", re.MULTILINE)


def test_each_item_of_trained_is_served_has_its_code_and_its_test() -> None:
    page = (ROOT / "docs" / "internals.md").read_text()
    rows = SERVED.findall(page)
    assert len(rows) == page.count("\n| ") - 1, "each line of the table but its head"
    for name, file, test in rows:
        module, _, function = name.rpartition(".")
        code = (ROOT / "scripts" / module.replace(".", "/")).with_suffix(".py").read_text()
        assert re.search(rf"^def {function}\(", code, re.MULTILINE), name
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"
