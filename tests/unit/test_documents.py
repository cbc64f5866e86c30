"""What the pages say can be followed: links lead somewhere, the README's run is one, kinds are complete."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageDraw

from roads import ROOT

PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("k8s/*.md"), *ROOT.glob(".github/**/*.md")],
)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"docs/([a-z-]+\.md)(?:, ([A-Z][\w ]+))?")
"""A page that code or a message names, with the heading behind a comma: `docs/kubernetes.md, Upgrade`."""


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
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
            page = ROOT / "docs" / name
            found += 1
            assert page.is_file(), f"{file}: docs/{name}"
            if heading:
                headings = headings_of(page)
                assert any(heading.startswith(one) for one in headings), f"{file}: docs/{name}, {heading}"
    assert found > 20


def test_every_block_of_yaml_is_yaml() -> None:
    blocks = [
        (page, textwrap.dedent(block))
        for page in PAGES
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) > 5
    for page, block in blocks:
        assert yaml.safe_load(block), f"{page}: {block}"


def readme_block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[number]


def write_sixty_rows(folder: Path) -> None:
    """Write what a person brings: mine/rows.jsonl in the form of the README's line, and mine/pictures/."""
    row = json.loads(readme_block("json"))
    pictures = folder / "mine" / "pictures"
    pictures.mkdir(parents=True)
    lines = []
    for number in range(60):
        picture = Image.new("RGB", (160 + number, 120), (4 * number, 80, 255 - 4 * number))
        ImageDraw.Draw(picture).ellipse((10 + number, 10, 60 + number, 60), fill=(255 - 3 * number, 2 * number, 40))
        picture.save(pictures / f"{number}.jpg")
        question, answer = (dict(turn) for turn in row["messages"])
        answer["content"] = f"A ball, the one with number {number}."
        lines.append(json.dumps({"messages": [question, answer], "image": f"{number}.jpg"}))
    (folder / "mine" / "rows.jsonl").write_text("\n".join(lines) + "\n")


def test_the_readme_s_run_of_sixty_rows_is_planned(tmp_path: Path) -> None:
    """Its file word for word, its command, and rows as it shows one."""
    write_sixty_rows(tmp_path)
    (tmp_path / "my-run.yaml").write_text(readme_block("yaml"))
    model = tmp_path / "runs" / "demo" / "tiny-model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (model / name).write_text("{}")  # a plan reads no weights
    call = next(line for line in readme_block("console", 1).splitlines() if " -n " in line)
    words = call.partition("#")[0].split()
    assert words[0] == ".venv/bin/snakemake"
    snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), *words[1:]]
    planned = subprocess.run(snakemake, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = planned.stdout + planned.stderr
    assert planned.returncode == 0, said[-4000:]
    jobs = said[said.rindex("Job stats:") :]
    for rule in ("convert_rows", "resolve_images", "train_smoke", "train_lora", "publish_merged", "data_page"):
        assert re.search(rf"^{rule} +1$", jobs, re.MULTILINE), jobs
    assert "merged/my-run" in said


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_uninstalling_names_every_kind_but_those_that_hold_data() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    named = re.search(r"kubectl -n vlmflow delete (\S+) -l", page[page.index("## Uninstall") :])[1].split(",")
    holds_data = {"Namespace", "PersistentVolumeClaim", "PersistentVolume"}
    cluster_wide = {"ClusterRole", "ClusterRoleBinding"}  # a command of their own
    kustomize = {"Kustomization", "Component", "PatchTransformer", None}
    kinds = {"CronJob", "Secret", "Job", "ConfigMap"}  # made by a transformer, `make`, the executor, a generator
    for file in ROOT.glob("k8s/**/*.yaml"):
        kinds |= {(document or {}).get("kind") for document in yaml.safe_load_all(file.read_text())}
    assert {plural(kind) for kind in kinds - holds_data - cluster_wide - kustomize} <= set(named)
    assert not {plural(kind) for kind in holds_data} & set(named)


def plural(kind: str) -> str:
    return re.sub("ys$", "ies", f"{kind.lower()}s")
