"""The model card of merged weights: their training data, its sources and licences, and how to use them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from huggingface_hub import ModelCard
from msgspec import structs

from drawn_pictures import put
from made_accounts import (
    LENGTHS,
    answers_alone,
    compared,
    some_checks,
    some_evaluation,
    some_figures,
    some_gate,
    some_provenance,
    some_report,
    some_stats,
)
from vlmflow.config.model import check_config
from vlmflow.core.errors import VlmflowError
from vlmflow.evaluation.report import MarginReport
from vlmflow.harness.params import RuleParams
from vlmflow.lengths.summary import ChatTemplate, FittedSplit
from vlmflow.merging.proof import LimitedFile, LogitProof
from vlmflow.pictures.budget import ScaleLimits
from vlmflow.pictures.manifest import PictureCounts
from vlmflow.publish.package import rights_of
from vlmflow.reports.card import model_card
from vlmflow.reports.licences import LicenceOfSource, StatedLicences, hub_datasets, stated_licences
from vlmflow.reports.provenance import BaseModelFiles
from vlmflow.rows.stats import SplitCounts
from vlmflow.supervisor.report import EndedEarly

DATA: dict[str, Any] = {
    "dataset": "alpaca",
    "kind": "alpaca",
    "modality": None,
    "train": SplitCounts(15, 9, {"duplicate": 1, "not_sampled": 5}),
}


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        (
            {},
            [
                "(rows of kind alpaca)",
                "import AutoModelForCausalLM, AutoTokenizer",
                "have 1,000 tokens;",
                "| train | 15 | 9 | 1 | 5 |",
            ],
            ["ImageTextToText", "PICTURE", "trajectory", "for pictures"],
        ),
        ({"sees_pictures": True}, ["AutoModelForImageTextToText", "AutoProcessor"], ["PICTURE", "CausalLM"]),
        (
            {"sees_pictures": True, "data": {"kind": "fire", "pictures": {"train": PictureCounts(named=1, usable=1)}}},
            ["(trajectory form)", "AutoModelForImageTextToText", '"path": "PICTURE"'],
            ["CausalLM"],
        ),
    ],
)
def test_the_card_is_of_this_model_and_these_rows(changes: dict[str, Any], said: list[str], unsaid: list[str]) -> None:
    card = model_card(some_provenance(**changes | {"data": some_stats(**DATA | changes.get("data", {}))}))
    assert [text for text in said if text not in card] == []
    assert [text for text in unsaid if text in card] == []


LOGITS = LogitProof(
    verdict="agree",
    rows=4,
    positions=200,
    dtype="bfloat16",
    device="cpu",
    spread=1.0,
    deviation=0.02,
    allowed_deviation=0.04,
    effect=0.03,
    effect_found=0.71,
    effect_rounded=0.715,
    top1_agreement=0.99,
    clear_positions=100,
    clear_disagreements=0,
)


def test_the_card_says_if_the_logits_are_inconclusive() -> None:
    assert "Logits on" not in model_card(some_provenance())
    card = model_card(some_provenance(verification=some_checks(LOGITS)))
    assert "Logits on 4 rows" in card
    assert "inconclusive" not in card
    hidden = structs.replace(LOGITS, verdict="inconclusive")
    card = model_card(some_provenance(verification=some_checks(hidden)))
    assert "This comparison is **inconclusive**" in card
    assert "shows only 0.71 times the adapter's effect; these weights show\n  0.71." in card


def test_the_card_says_how_much_bad_text_was_trained() -> None:
    said = "46% of the trained text is attempts scored below 8; run good trains the others"
    card = model_card(some_provenance(trained_text=said))
    assert f"\n\n{said}.\n\n## Rights" in card
    assert "the test split (0).\n\n## Rights" in model_card(some_provenance())


def test_it_tells_whether_servers_give_the_model_what_it_is_trained_on() -> None:
    """The words of the difference are the model owner's."""
    assert "Chat template" not in model_card(some_provenance())
    equal = model_card(some_provenance(chat_template=ChatTemplate(22, None)))
    assert "- Chat template: the one in this folder gives 22 compared rows the tokens of the training." in equal
    card = model_card(some_provenance(chat_template=ChatTemplate(22, "row r: after '<b>' the training has `x`")))
    assert "**it differs from the training**" in card
    assert "<b>" not in card


def test_it_names_the_tokens_at_which_an_answer_ends() -> None:
    """The texts are those of the model's tokenizer."""
    assert "End of an answer" not in model_card(some_provenance())
    said = "- End of an answer: the model stops at &lt;\\|end\\|&gt;{} the trained answers end.\n"
    assert said.format("; with it") in model_card(some_provenance(stop_tokens=["<|end|>"]))
    assert said.format(" and 7; with one of them") in model_card(some_provenance(stop_tokens=["<|end|>", "7"]))


def test_every_byte_of_a_card() -> None:
    """Every part that a card can have; texts from the data have characters of Markdown, HTML and Jinja."""
    odd = "a|b`c` <&> {{ d }}\n# e"
    lengths = structs.replace(LENGTHS, tokens=10_000, picture_tokens=1_234, median=1_000)
    card = model_card(
        some_provenance(
            rights=StatedLicences(
                dataset="fire",
                sources=["hf://datasets/owner/name/train.json", "own & <mine>.json"],
                licence="cc-by-4.0",
                questions=[LicenceOfSource(odd, 1_042, odd)],
                pictures=[LicenceOfSource("gqa", 1_012, "unknown"), LicenceOfSource(".", 30, "mit")],
            ),
            base_model=BaseModelFiles('hf://owner/"base" <&>', "abc", "digest", {}, []),
            smoke=structs.replace(
                some_gate(),
                lengths=lengths,
                fitted={"train": FittedSplit(1_012, 3, 1_003, lengths), "val": FittedSplit(9, 1, 0, LENGTHS)},
            ),
            training=some_report(target=16, ended_early=EndedEarly(3, 8, 2.0), seconds=12_345.67),
            verification=some_checks(structs.replace(LOGITS, verdict="inconclusive")),
            data=some_stats(
                train=SplitCounts(15, 9, {"duplicate": 1, "not_sampled": 5}),
                test=SplitCounts(3, 3, {}),
                pictures={"train": PictureCounts(named=9, usable=9)},
            ),
            sees_pictures=True,
            picture_limits=LimitedFile("preprocessor_config.json", "", "", ScaleLimits(4_096, 1_048_576)),
        )
    )
    assert card == Path(__file__).with_name("whole_card.txt").read_text()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (ScaleLimits(longest_edge=1_540), "Pictures are scaled to at most 1,540 pixels a side, as in the training:\n"),
        (ScaleLimits(max_patches=3), "Pictures are cut into at most 3 tiles, as in the training:\n"),
    ],
)
def test_the_card_says_how_pictures_are_limited(limits: ScaleLimits, said: str) -> None:
    facts = some_provenance(picture_limits=LimitedFile("processor_config.json", "", "", limits))
    assert f"{said}`processor_config.json` has these limits" in model_card(facts)


def test_no_text_from_outside_acts_in_the_card() -> None:
    """Licences, sources and names are texts of the configuration, of rows and of model folders."""
    bad = "<script>x</script> \x1b[31m\u202e ![p](//e.org/p) *b* `c a\\\\|b"
    checks = some_checks(structs.replace(LOGITS, dtype=bad, device=bad))
    facts = some_provenance(
        run=bad,
        rights=StatedLicences(bad, [bad], bad, [LicenceOfSource(bad, 1, bad)], [LicenceOfSource(bad, 1, bad)]),
        base_model=BaseModelFiles(bad, "abc", "digest", {}, []),
        training=some_report(device=bad, experimental=[bad]),
        verification=checks,
        stop_tokens=[bad],
    )
    whole = model_card(facts)
    _, metadata, card = whole.partition("## Use")[0].split("---\n", 2)
    assert [character for character in whole if not character.isprintable() and character != "\n"] == []
    assert metadata.count("\n") == 3
    inert = re.sub(r"(?<!\\)`[^`\n]*(?<!\\)`", "", card)
    assert "<" not in inert
    assert r"\*b\*" in inert
    assert re.search(r"(?<!\\)[\[\]]", inert) is None
    rows = [line for line in card.splitlines() if line.startswith(("| data set", "| questions", "| pictures"))]
    assert [len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) for row in rows] == [4, 4, 4]


def test_an_evaluation_is_in_the_card_and_in_the_hubs_form() -> None:
    losses = {"own": compared(2.0, 1.0, rows=200)}
    few = some_figures(rows=365, right_first=compared(0.5, 0.48, None), sees=None, losses=losses)
    evaluations = {
        "val": some_evaluation(costs_first_answers=True),
        "test": some_evaluation(split="test", looks=3, figures=MarginReport(some_figures(), few, {})),
    }
    card = model_card(some_provenance(evaluations=evaluations))
    assert "Not evaluated" not in card
    section = card.partition("## Evaluation\n")[2].partition("\n## Use")[0]
    assert "**val: learned; costs first answers.** The tuned model learned to use feedback." in section
    shares = "rows in which … | base | tuned | tuned minus base"
    uses = "its own feedback helps the right answer more than another row's feedback | 50.0% (46.0 to 54.0) | "
    all_rows, rest = section.rpartition(
        "With 95 % intervals, without 35 rows whose feedback contains the gold answer:"
    )[::2]
    assert all_rows.count(f"\n\n| {shares} |\n|---|---:|---:|---:|\n| {uses}75.0% (71.0 to 79.0) | +25.0 points (") == 3
    assert rest.count(f"\n\n| {shares} |\n|---|---:|---:|---:|\n| {uses}75.0% (71.0 to 79.0) | +25.0 points (") == 1
    assert "| 50.0% (no interval) | 48.0% (no interval) | -2.0 points (no interval) |" in rest
    assert "another row's picture | 80.0% (76.0 to 84.0)" not in rest
    loss = "\n| loss of the right answer, with its own feedback | 2.000 | 1.000 | -1.000 (-1.040 to -0.960) |"
    of_few = "\n| loss of the right answer, with its own feedback (200 of 365 rows) | 2.000 | 1.000 |"
    assert (section.count(loss), section.count(of_few)) == (3, 1)
    assert "The test split of `fire` had been looked at 3 times with this evaluation; later looks" in section
    assert "Left out, for both models: 2 rows without feedback.\n" in section
    assert "Controls are the feedback of up to three other rows" in section
    results = ModelCard(card).data.eval_results
    assert results is not None
    name = "rows in which the right answer is likelier than the wrong one, with its own feedback"
    val, test = (result for result in results if result.metric_name == name)
    assert (val.dataset_split, test.dataset_split, val.metric_value) == ("validation", "test", 0.75)
    assert val.metric_type == "share"
    assert val.task_type in ("image-text-to-text", "text-generation")


def test_the_card_speaks_of_feedback_only_where_there_is_some() -> None:
    figures = MarginReport(answers_alone(), None, {})
    plain = some_evaluation(feedback=False, figures=figures, left_out={"over_long": 3}, sentence="Better.")
    card = model_card(some_provenance(evaluations={"val": plain}))
    section = card.partition("## Evaluation\n")[2].partition("\n## Use")[0]
    assert "Left out, for both models: 3 rows longer than train.max" in section
    assert "| loss of the answers, after the row's own turns | 2.000 | 1.900 | -0.100 (-0.140 to -0.060) |" in section
    assert "\nThe best checkpoint was chosen by its loss on val." in section
    for word in ("feedback", "rows in which", "wrong"):
        assert word not in section


def test_a_run_without_an_evaluation_says_so() -> None:
    card = model_card(some_provenance())
    assert "Not evaluated: nothing here says whether the model is better than its base." in card
    assert "model-index" not in card


def test_a_base_that_a_run_made_keeps_its_story() -> None:
    """Data, licences and base of all rounds are in the card, and in the hub's metadata."""
    rights = [
        StatedLicences("alpaca", [f"hf://datasets/{name}/rows.json"], "cc-by-nc-4.0", [], pictures)
        for name, pictures in (("a/first", [LicenceOfSource("coco", 7, "unknown")]), ("b/second", []))
    ]
    first = some_provenance(run="first_", data=some_stats(**DATA, digests={"test.jsonl": "0"}), rights=rights[0])
    base = BaseModelFiles("merged/first_", None, "digest", {}, [], first)
    card = model_card(some_provenance(rights=rights[1], base_model=base))
    metadata = ModelCard(card).data
    assert metadata.base_model == "Qwen/Qwen3-8B"
    assert metadata.datasets == ["a/first", "b/second"]
    said = "`merged/first_` is the result of run `first_`: `hf://Qwen/Qwen3-8B`, trained (tuner lora, 8 steps) on the"
    assert said in card
    assert "Run `first_` was trained on other rows, and nothing compared them with this test split." in card
    section = card.partition("## Rights")[2].partition("## Training")[0]
    assert "that of the base's run `first_` from `hf://datasets/a/first/rows.json`" in section
    assert "`hf://Qwen/Qwen3-8B` has its own licence" in section
    assert "| pictures of `coco` (run `first_`) | 7 | unknown |" in section
    assert "nothing compared them" not in model_card(some_provenance(base_model=BaseModelFiles("m", None, "d", {}, [])))


HUB = "hf://datasets/PengxiangLi/FIRE/FIRE-train-100K.json"


def row(source: str, *images: str) -> dict[str, object]:
    talk = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    whole = {"id": "x", "source": source, "images": list(images), "attempts": [1], "scores": []}
    return whole | {"conversations": talk}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    all_rows = [row("vqav2", "coco/train2017/1.jpg"), row("llava", "coco/train2017/2.jpg"), row("vqav2", "gqa/3.jpg")]
    all_rows += [row("a|b`c`\n# x", "4.jpg"), row("text")]
    return put(tmp_path / "train.jsonl", b"".join(json.dumps(one).encode() + b"\n" for one in all_rows))


def section_of(stated: StatedLicences) -> str:
    """Return the model card's section on licences."""
    return model_card(some_provenance(rights=stated)).partition("## Rights\n\n")[2].partition("\n\n## ")[0]


def test_stated_licences_are_listed_and_others_are_unknown(rows: Path) -> None:
    licences = {"gqa": "cc-by-4.0", "llava": "mit"}
    stated = stated_licences("fire", [HUB, "/home/me/FIRE-test.json"], "cc-by-4.0", licences, {}, rows)
    assert stated.sources == [HUB, "FIRE-test.json"]  # no path of this machine
    assert stated.licence == "cc-by-4.0"
    assert {(one.source, one.rows, one.licence) for one in stated.pictures} == {
        ("coco", 2, "unknown"),
        ("gqa", 1, "cc-by-4.0"),
        (".", 1, "unknown"),
    }
    assert stated.questions[0] == LicenceOfSource("vqav2", 2, "unknown")
    assert {one.source: one.licence for one in stated.questions}["llava"] == "mit"
    assert hub_datasets(stated) == ["PengxiangLi/FIRE"]


def licences_of(dataset: dict[str, object], picture_sources: dict[str, object]) -> dict[str, str]:
    merged = {
        "models": {"m": {"source": "hf://a/m", "model_type": "qwen3_vl"}},
        "datasets": {"d": {"kind": "messages", "train": HUB, **dataset}},
        "runs": {"r": {"model": "m", "dataset": "d"}},
        "picture_sources": picture_sources,
    }
    return RuleParams(check_config(merged, [])).picture_licences(SimpleNamespace(run="r"))


def test_the_licence_of_a_picture_source_reaches_the_card(tmp_path: Path) -> None:
    """The longest prefix decides, COCO's pictures match by number, and the data set's own licence overrides all."""
    stated = licences_of({}, {"coco-train2017": {"licence": "cc-by-4.0"}, "gqa": {"licence": "a"}})
    assert stated["chartqa/"] == "cc-by-nc-4.0"  # from picture_sources.yaml
    stated["chartqa/own/"] = "mine"
    names = ["chartqa/train/1.png", "chartqa/2.png.rgb.png", "chartqa/own/3.png", "gqa/images/4.jpg", "sam/5.jpg"]
    names.append("coco/train2014/COCO_train2014_000000000009.jpg.rgb.png")
    lines = b"".join(json.dumps(row("s", name)).encode() + b"\n" for name in names)
    found = stated_licences("d", [HUB], None, {"gqa": "b"}, stated, put(tmp_path / "train.jsonl", lines))
    assert [(one.source, one.rows, one.licence) for one in found.pictures] == [
        ("chartqa", 2, "cc-by-nc-4.0"),
        ("chartqa", 1, "mine"),
        ("coco", 1, "cc-by-4.0"),
        ("gqa", 1, "b"),
        ("sam", 1, "unknown"),
    ]
    assert "| pictures of `chartqa` | 2 | cc-by-nc-4.0 |" in section_of(found)


def test_rows_without_pictures_wait_for_no_picture_licence() -> None:
    assert licences_of({"modality": "text"}, {"gqa": {"licence": "a"}}) == {}


def test_the_section_is_a_table_whatever_the_sources_are_called(rows: Path) -> None:
    section = section_of(stated_licences("fire", [HUB], None, {}, {}, rows))
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert "| data set `fire` | | unknown |" in table
    assert "| pictures of `coco` | 2 | unknown |" in table
    assert r"| questions from `a\|b'c' # x` | 1 | unknown |" in table
    assert {line.replace(r"\|", "").count("|") for line in table} == {4}


def test_a_long_list_ends_with_a_sum(tmp_path: Path) -> None:
    lines = b"".join(json.dumps(row(f"s{number:03}")).encode() + b"\n" for number in range(50))
    section = section_of(stated_licences("fire", [], None, {}, {}, put(tmp_path / "t.jsonl", lines)))
    assert "| questions from 10 more | 10 | see provenance.json |" in section


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with pytest.raises(VlmflowError, match=r"t\.jsonl, line 1: "):
        stated_licences("fire", [], None, {}, {}, put(tmp_path / "t.jsonl", b"{"))


def test_a_mixture_states_the_licences_of_its_data_sets(tmp_path: Path) -> None:
    merged = {
        "models": {"m": {"source": "hf://a/m", "model_type": "qwen3_vl"}},
        "datasets": {
            "fire": {"kind": "fire", "train": HUB, "licence": "cc-by-4.0", "source_licences": {"gqa": "b", "vg": "c"}},
            "chats": {"kind": "messages", "modality": "text", "train": "chats.jsonl"},
            "blend": {"mix": {"fire": "all", "chats": "30%"}},
        },
        "runs": {"r": {"model": "m", "dataset": "blend"}},
    }
    settings = check_config(merged, [])
    params, run = RuleParams(settings), SimpleNamespace(run="r")
    given = params.run("dataset.all_addresses", "dataset.licence", "dataset.source_licences")(run)
    names = ["fire/chartqa/1.png", "fire/gqa/2.png", "fire/3.png"]
    lines = [row("fire/vg", name) | {"id": f"fire:train-{name}"} for name in names]
    lines.append(row("chats") | {"id": "chats:train-1"})
    file = put(tmp_path / "train.jsonl", b"".join(json.dumps(one).encode() + b"\n" for one in lines))
    stated = stated_licences("blend", *given.values(), params.picture_licences(run), file)
    assert stated.sources == [HUB, "chats.jsonl"]
    assert stated.licence == "fire: cc-by-4.0; chats: unknown"
    assert [(one.source, one.rows, one.licence) for one in stated.questions] == [
        ("fire/vg", 3, "c"),
        ("chats", 1, "unknown"),
    ]
    assert {(one.source, one.licence) for one in stated.pictures} == {
        ("fire/chartqa", "cc-by-nc-4.0"),
        ("fire/gqa", "b"),
        ("fire/.", "unknown"),
    }
    with pytest.raises(VlmflowError, match="forbids to pass on"):
        rights_of(msgspec.structs.replace(stated, licence="fire: no redistribution; chats: mit"))
