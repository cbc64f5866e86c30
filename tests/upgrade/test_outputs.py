"""The comparison of two output folders finds differences, and ignores what always differs between runs."""

import json
from pathlib import Path

from outputs import differences


def made(folder: Path, number: int) -> Path:
    """Write outputs of a run at one commit, at one speed."""
    folder.mkdir()
    report = {"git_commit": f"{number}a", "all": [{"peak_memory": [number]}], "rows": 3, "digests": {}}
    (folder / "report.json").write_text(json.dumps(report))
    (folder / "card.md").write_text(f"Made at {number:07x} in {number}.5 s.")
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "logs").mkdir()
    (folder / "logs" / f"{number}.log").write_text("")
    return folder


def test_times_and_commits_may_differ(tmp_path: Path) -> None:
    assert not list(differences(made(tmp_path / "one", 1), made(tmp_path / "two", 2)))


def test_rows_values_words_and_missing_files_may_not(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 1), made(tmp_path / "two", 2)
    (two / "report.json").write_text(json.dumps(json.loads((two / "report.json").read_text()) | {"rows": 4}))
    (two / "card.md").write_text("Made by hand.")
    (two / "rows.jsonl").write_text("{} \n")
    (two / "more").write_text("")
    assert list(differences(one, two)) == [
        "card.md: other words",
        f"more: only in {two}",
        "report.json rows: 3 and 4",
        "rows.jsonl: 3 and 4 bytes",
    ]
