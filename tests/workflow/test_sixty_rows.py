"""The README's "Your 60 rows in five minutes", verbatim, up to the plan."""

import json
import re
import subprocess
from pathlib import Path

from PIL import Image, ImageDraw

from workflow_runs import ROOT


def readme_block(language: str, number: int = 0) -> str:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[number]


def write_sixty_rows(folder: Path) -> None:
    """Write a person's input: mine/rows.jsonl in the form of the README's line, and mine/pictures/."""
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
    """Its file verbatim, its command, and rows of its form."""
    write_sixty_rows(tmp_path)
    (tmp_path / "my-run.yaml").write_text(readme_block("yaml"))
    model = tmp_path / "runs" / "demo" / "tiny-model"
    model.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"):
        (model / name).write_text("{}")  # a plan does not read weights
    call = next(line for line in readme_block("console", 1).splitlines() if "ARGS=-n" in line)
    make, run, config, args = call.partition("#")[0].split()
    assert (make, run, config) == ("make", "run", "CONFIG=my-run.yaml")
    words = [f"CONFIG={tmp_path}/my-run.yaml", f"{args} --directory {tmp_path}", "--old-file=.venv/train.stamp"]
    planned = subprocess.run([make, run, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    said = planned.stdout + planned.stderr
    assert planned.returncode == 0, said[-4000:]
    jobs = said[said.rindex("Job stats:") :]
    for rule in ("convert_rows", "resolve_images", "train_smoke", "train_model", "publish_merged", "data_page"):
        assert re.search(rf"^{rule} +1$", jobs, re.MULTILINE), jobs
    assert "merged/my-run" in said
