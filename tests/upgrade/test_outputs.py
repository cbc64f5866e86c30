"""The comparison of two output folders finds differences, and ignores what always differs between runs."""

import json
from pathlib import Path

import pytest
from msgspec import structs
from outputs import differences

from made_accounts import MADE_OF, some_gate, some_provenance, some_report, some_stats
from vlmflow.core.account import write_account
from vlmflow.core.progress import clock
from vlmflow.reports.card import model_card
from vlmflow.reports.counts_page import counts_page
from vlmflow.reports.training_pages import gate_page

PAGES = ("README.md", "counts.html", "gate.html")


def made(folder: Path, seconds: int, names: str = "q_proj|k_proj") -> Path:
    """Write the accounts and pages of a run that took some seconds and as many MB. names: the adapter's layers."""
    folder.mkdir()
    speed, memory = 4_000 / seconds, [seconds * 1_000_000]
    report = some_report(seconds=seconds + 0.25, tokens_per_second=speed, peak_memory=memory)
    estimate = f"8 steps, 4,000 tokens, {clock(seconds)}; 1 of 9 rows left over"
    full_run = structs.replace(some_gate().full_run, seconds=seconds, readable=estimate)
    gate = structs.replace(some_gate(), peak_memory=memory, tokens_per_second=speed, full_run=full_run)
    facts = some_provenance(smoke=gate, training=report, git_commit=f"{seconds:040x}")
    write_account(folder / "provenance.json", facts)
    (folder / "README.md").write_text(model_card(facts))
    (folder / "gate.html").write_text(gate_page("mine", gate, MADE_OF))
    (folder / "counts.html").write_text(counts_page(some_stats()))
    (folder / "adapter_config.json").write_text(json.dumps({"target_modules": f"^({names})$"}))
    (folder / "rows.jsonl").write_text("{}\n")
    (folder / "logs").mkdir()
    (folder / "logs" / f"{seconds}.log").write_text("")
    return folder


def test_commits_times_speeds_and_peak_memory_may_differ(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 50), made(tmp_path / "two", 7_261, "k_proj|q_proj")
    pages = [name for name in PAGES if (one / name).read_bytes() != (two / name).read_bytes()]
    assert pages == ["README.md", "gate.html"]
    assert not list(differences(one, two))


@pytest.mark.parametrize(
    ("page", "text", "instead"),
    [
        ("counts.html", '<b>1</b><span class="soft small">rows', '<b>2</b><span class="soft small">rows'),
        ("gate.html", "<b>9</b>", "<b>8</b>"),
        ("gate.html", "8 steps, 4,000 tokens", "8 steps, 4,001 tokens"),
        ("gate.html", "1 of 9 rows", "2 of 9 rows"),
        ("README.md", "| train | 1 | 1 |", "| train | 2 | 2 |"),
        ("README.md", "4,000 tokens in", "4,001 tokens in"),
        ("README.md", "loss: 2.0000", "loss: 2.0001"),
    ],
)
def test_another_count_in_a_page_is_noticed(tmp_path: Path, page: str, text: str, instead: str) -> None:
    one, two = made(tmp_path / "one", 50), made(tmp_path / "two", 60)
    before = (two / page).read_text()
    assert text in before
    (two / page).write_text(before.replace(text, instead, 1))
    (found,) = differences(one, two)
    assert found.startswith(f"{page}, line ")


def test_rows_values_layers_and_missing_files_may_not_differ(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one", 1), made(tmp_path / "two", 2, "q_proj|v_proj")
    facts = json.loads((two / "provenance.json").read_text())
    facts["training"] |= {"steps": 9, "layers": None, "versions": []}
    (two / "provenance.json").write_text(json.dumps(facts))
    (two / "README.md").write_text((two / "README.md").read_text() + "More.")
    (two / "rows.jsonl").write_text("{} \n")
    (two / "more").write_text("")
    lines = len((one / "README.md").read_text().splitlines())
    assert list(differences(one, two)) == [
        f"README.md, line {lines + 1}: 'nothing' and 'More.'",
        "adapter_config.json target_modules.0: 'k_proj' and 'q_proj'",
        "adapter_config.json target_modules.1: 'q_proj' and 'v_proj'",
        f"more: only in {two}",
        "provenance.json training.layers: [] and None",
        "provenance.json training.steps: 8 and 9",
        "provenance.json training.versions: {} and []",
        "rows.jsonl: 3 and 4 bytes",
    ]
