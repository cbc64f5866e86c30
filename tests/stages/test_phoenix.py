"""A real Phoenix shows of each evaluated row what the models said, told apart, with scores to filter by."""

from pathlib import Path

import pytest

from phoenix_server import phoenix_server
from sent_run import send
from tracked_run import tracked_run


@pytest.mark.slow
def test_phoenix_shows_what_the_models_said(tmp_path: Path) -> None:
    folder = tracked_run(tmp_path / "run")
    (tmp_path / "phoenix").mkdir()
    with phoenix_server(tmp_path / "phoenix") as phoenix:
        for _ in range(2):  # a second sending adds nothing
            send(folder, otlp=phoenix.url, experiment="pictures")
        spans = phoenix.spans("pictures", 14)
        assert phoenix.spans("default", 0) == []
        rows = "parent_id is None and attributes['vlmflow']['score']"
        assert phoenix.filtered("pictures", f"{rows}['right'] == 1.0") == ["row-1 tuned"]
        assert phoenix.filtered("pictures", f"{rows}['margin_own'] > 0.5") == [f"row-{n} tuned" for n in range(3)]
    assert len(spans) == 14
    roots = {span["name"]: span for span in spans if span["parent_id"] is None}
    assert sorted(roots) == sorted(f"row-{number} {model}" for number in range(3) for model in ("base", "tuned"))
    assert {name: span["attributes"].get("output.value") for name, span in roots.items()} == {
        **dict.fromkeys(roots),
        "row-1 base": "wrong",
        "row-1 tuned": "gold 1",
    }
    kinds = {(span["name"], span["span_kind"]) for span in spans if span["parent_id"]}
    assert kinds == {("after 1 round", "LLM"), ("gold answer", "EVALUATOR")}
    assert {span["span_kind"] for span in roots.values()} == {"CHAIN"}
    for span in spans:
        if span["span_kind"] == "EVALUATOR":
            assert "output.value" not in span["attributes"], "no model said it"
            assert span["attributes"]["langfuse.observation.metadata.gold"].startswith("gold ")
    of_tuned = roots["row-1 tuned"]["attributes"]
    assert (of_tuned["vlmflow.score.right"], of_tuned["vlmflow.score.margin_own"]) == (1.0, 1.0)
