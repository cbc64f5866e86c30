"""Rows with tools: as ms-swift trains them, as the model's own chat template serves them, and as they are counted."""

import copy
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from made_rows import write_picture
from vlmflow.config.settings import RowLimits
from vlmflow.core.errors import VlmflowError
from vlmflow.demo.tiny_model import TinyShape, write_tiny_model
from vlmflow.lengths.against_swift import accepted_difference
from vlmflow.lengths.count import TokenCounter
from vlmflow.pictures.manifest import PictureEntry
from vlmflow.rows.chat import (
    Turn,
    call_text,
    declarations_of,
    messages_of,
    tags_in,
    times_answered,
    tools_text,
    trained_messages_of,
    with_thought,
)
from vlmflow.rows.sharegpt import ShareGptRow, as_line, first_fault
from vlmflow.serving.client import with_ids
from vlmflow.serving.guarded import with_texts, with_unreadable
from vlmflow.swift.chat_form import ChatForm
from vlmflow.swift.child_process import environment
from vlmflow.swift.own_template import AGENT_TEMPLATE, encode_rows_as_served, read_rows_by_type
from vlmflow.swift.served_rows import first_difference
from workflow_runs import ROOT

PUBLISHED = ROOT / "tests" / "published" / "Qwen3-VL-8B-Instruct" / "chat_template.jinja"

PIECES = ["two ", "cats", ".", "\n", "é", "猫", "🙂", "{", '"', "\\", ": ", "\t", "</b>", "1"]


def texts(*more: str) -> st.SearchStrategy[str]:
    """Draw a text that holds more than white space, and `more` pieces."""
    return st.lists(st.sampled_from([*PIECES, *more]), min_size=1, max_size=6).map("".join).filter(str.strip)


SPOKEN = texts().filter(lambda text: not text.startswith("\n"))
"""Of a prompt's last line feed and an answer's first one a server makes a single token, in later prompts."""

ANSWERS = SPOKEN | st.builds(with_thought, st.sampled_from(["", "Hm.\n\nYes"]), SPOKEN)

SHOWN = texts("<image>")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(), inner, max_size=3),
    max_leaves=5,
)

OBJECTS = st.dictionaries(texts(), VALUES, max_size=3)

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}

NAMES = ["see", "führe_aus", "a.b c"]


@st.composite
def rows(draw: st.DrawFn) -> ShareGptRow:
    """Draw a row in which the assistant may call functions, in any order that is allowed."""
    drawn = draw(st.booleans())

    def spoken(last: bool = False, calls: bool = True) -> list[Turn]:
        """Return what the assistant says at one time: a text, calls, or both. last: that is trained."""
        count = draw(st.integers(0, 3)) if calls else 0
        said = [Turn("gpt", draw(ANSWERS))] if not count or draw(st.booleans()) else []
        called = [Turn("function_call", call_text(draw(st.sampled_from(NAMES)), draw(OBJECTS))) for _ in range(count)]
        for some in (said, called):
            loss = draw(st.booleans()) or (last and some is (called or said))
            for turn in some if drawn else ():
                turn.loss = loss
        return [*said, *called]

    turns = [Turn("system", draw(texts()))] if draw(st.booleans()) else []
    rounds = draw(st.integers(1, 3))
    for number in range(rounds):
        turns.append(Turn("human", draw(SHOWN)))
        for _ in range(draw(st.integers(0, 2))):
            turns += spoken()
            calls = len(turns) - max(place for place, turn in enumerate(turns) if turn.speaker != "function_call") - 1
            turns += [Turn("observation", draw(SHOWN)) for _ in range(draw(st.integers(1, calls)) if calls else 0)]
            if not calls:
                turns.append(Turn("human", draw(SHOWN)))
        turns += spoken(last=number == rounds - 1)
    tools = [
        {"type": "function", "function": {"name": name, "description": draw(VALUES), "parameters": draw(OBJECTS)}}
        for name in NAMES
    ]
    called = any(turn.speaker == "function_call" for turn in turns)
    declared = tools_text(tools) if called or draw(st.booleans()) else ""
    attempts = list(range(1, times_answered(turns) + 1))
    return ShareGptRow("r", "s", ["p.png"] * tags_in(turns), [*attempts], [], turns, declared)


@dataclass(frozen=True)
class Base:
    """A tiny Qwen3-VL with the published chat template."""

    folder: Path
    processor: Any

    def template(self, **settings: Any) -> Any:
        """Return ms-swift's template, for training."""
        from swift import get_template

        template = get_template(self.processor, max_length=1 << 20, **settings)
        template.set_mode("train")
        return template

    def once(self, ids: Sequence[int]) -> list[int]:
        """Return tokens with one for each picture."""
        pad = self.processor.image_token_id
        return [token for before, token in zip([None, *ids], ids, strict=False) if token != pad or before != pad]

    def tokens(self, text: str) -> list[int]:
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    folder = tmp_path_factory.mktemp("base")
    words = ["Call two functions: see the cats. You may call one or more functions to assist with the user query."]
    write_tiny_model(folder / "model", words, TinyShape(merges=64), seed=1)
    (folder / "model" / "chat_template.json").write_text(json.dumps({"chat_template": PUBLISHED.read_text()}))
    write_picture(folder / "pictures" / "p.png")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(folder / "pictures", 16, folder / "cache", threads=1).items():
            patch.setitem(os.environ, name, value)
        from swift import get_processor
        from swift.agent_template import agent_template_map
        from swift.dataset import loader
        from swift.dataset.preprocessor import core
        from swift.loss_scale import LossScale
        from swift.template import base as template

        patch.setitem(agent_template_map, AGENT_TEMPLATE, agent_template_map[AGENT_TEMPLATE])
        for place, name in (
            *[(loader, "hf_load_dataset"), (core, "remove_arrow_padding"), (template, "remove_arrow_padding")],
            *[(template.Template, "_remove_history_thinking"), (LossScale, "_inner_call")],
        ):
            patch.setattr(place, name, getattr(place, name))  # other tests read as ms-swift itself does
        read_rows_by_type()
        encode_rows_as_served()
        yield Base(folder / "model", get_processor(str(folder / "model"), model_type="qwen3_vl"))


def encoded(template: Any, row: ShareGptRow) -> tuple[list[int], list[int]]:
    """Return a row's tokens in the training, and those of them that are trained."""
    given = {"messages": trained_messages_of(row.conversations), "images": row.images}
    made = template.encode(given | ({"tools": row.tools} if row.tools else {}))
    return list(made["input_ids"]), [label for label in made["labels"] if label != -100]


def taught(turns: Sequence[Turn]) -> str:
    """Return the texts of some turns that are to be trained."""
    found = ""
    for turn, later in zip(turns, [*turns[1:], None], strict=True):
        if turn.speaker in ("gpt", "function_call") and turn.loss is not False:
            call = turn.speaker == "function_call"
            found += f"<tool_call>\n{turn.value}\n</tool_call>" if call else turn.value
            found += "\n" if later and later.speaker == "function_call" else "<|im_end|>\n"
    return found


def test_training_serving_and_counting_make_the_same_tokens(base: Base) -> None:
    """Whatever the conversation, also through a server; and a label has nothing but what is to be trained."""
    from transformers.cli.serving.utils import BaseHandler, Modality

    read = with_texts(BaseHandler.get_processor_inputs_from_messages)
    template = base.template()
    picture = PictureEntry(path="p", rows=1, name="p.png", width=64, height=48, sha256="0" * 64)
    counter = TokenCounter(base.folder, [picture], 16)

    @given(row=rows())
    @settings(max_examples=60)
    def check(row: ShareGptRow) -> None:
        assert first_fault(row, RowLimits(max_turns=1_000)) is None
        ids, trained = encoded(template, row)
        messages = messages_of(row.conversations, [{"type": "image"}] * len(row.images))
        given = {"tools": declarations_of(row.tools), "tokenize": False}
        served = base.processor.apply_chat_template(messages, **given)
        assert base.processor.decode(base.once(ids)) == normalize("NFC", served)
        assert base.once(ids) == base.tokens(served)
        asked = with_ids(messages_of(row.conversations, [IMAGE] * len(row.images)))
        of_server = base.processor.apply_chat_template(read(json.loads(json.dumps(asked)), Modality.VLM), **given)
        assert of_server == served
        assert base.processor.decode(trained) == normalize("NFC", taught(row.conversations))
        assert (sum(counter.count([row])[0]), *counter.count_trained([row])) == (len(ids), len(trained))

    check()


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("chat", ["qwen3_vl", "qwen3"])
def test_empty_thoughts_and_last_answers_are_counted(base: Base, chat: str, last_only: bool) -> None:
    """A thought stands before all that is said at one time: a text with its calls, or calls alone."""
    form = ChatForm.of({"template": chat}, last_only)
    loss_scale = "last_round" if last_only else "default"
    if chat == "qwen3":
        loss_scale += "+ignore_empty_think"  # as its arguments make it
    template = base.template(template_type=chat, loss_scale=loss_scale)

    @given(row=rows())
    @settings(max_examples=40)
    def check(row: ShareGptRow) -> None:
        row.images.clear()
        for turn in row.conversations:
            turn.value = turn.value.replace("<image>", "it")
        ids, trained = encoded(template, row)
        assert ids == [token for piece in form.pieces(row) for token in base.tokens(piece)]
        assert trained == [token for piece in form.trained(row) for token in base.tokens(piece)]

    check()


def said(speaker: Any, text: str, **more: Any) -> Turn:
    return Turn(speaker, text, **more)


TOOLS = tools_text([{"type": "function", "function": {"name": "see", "parameters": {"x": None}}}])
CALL = said("function_call", call_text("see", {"größe": [1.0, None]}))
PLAIN = ShareGptRow("plain", "s", [], [1], [], [said("human", "one"), said("gpt", "two")])
CALLS = ShareGptRow(
    "calls",
    "s",
    ["p.png", "p.png"],
    [1, 2],
    [],
    [
        said("human", "Is <image> red?"),
        *[CALL, CALL, said("observation", "<image>"), said("observation", "1")],
        said("gpt", "two"),
    ],
    TOOLS,
)


def test_a_file_of_rows_is_read_with_its_tools(base: Base, tmp_path: Path) -> None:
    """Also where only a later row has some; a file without tools has no column for them."""
    from swift.dataset import load_dataset

    for name, lines in {"both": [PLAIN, CALLS, PLAIN], "none": [PLAIN]}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes(b"".join(as_line(row, row.images) + b"\n" for row in lines))
        found, _ = load_dataset([str(file)], strict=True)
        assert ("tools" in found.column_names) == (name == "both")
        template = base.template()
        read = [template.encode(row)["input_ids"] for row in found]
        assert read == [encoded(template, row)[0] for row in lines]


def test_a_column_that_changes_its_look_after_10_mb_is_not_guessed(base: Base, tmp_path: Path) -> None:
    from swift.dataset import load_dataset

    file = tmp_path / "rows.jsonl"
    dates = [replace(PLAIN, id="2026-11-27T00:00:00", source="x" * 11_000_000), replace(PLAIN, id="7")]
    file.write_bytes(b"".join(as_line(row, []) + b"\n" for row in dates))
    found, _ = load_dataset([str(file)], strict=True)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("written", "said", "calls"),
    [
        ('I look.\n<tool_call>\n{"name": "see", "arguments": {}}\n</tool_call>', "I look.", ["see"]),
        *((text, text, []) for text in ('<tool_call>\n{"name": "see", "arg', "<tool_call>\n[1]\n</tool_call>")),
        *((text, text, []) for text in ('<tool_call>\n{"name": "see"}\n</tool_call>', "No.")),
    ],
)
def test_what_our_server_cannot_read_as_calls_is_a_text(base: Base, written: str, said: str, calls: list[str]) -> None:
    """Also where an answer is cut in a call: an evaluation goes on."""
    from transformers.cli.serving.utils import parse_assistant_message

    model = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_vl"))
    ids, before = base.tokens(written + "<|im_end|>"), [base.tokens("<|im_start|>assistant\n")]
    read = with_unreadable(parse_assistant_message)
    text, _, found = read(base.processor, model, ids, input_ids=before, cleaned_content=written)
    assert (text, [call.name for call in found or []]) == (said, calls)


def test_a_chat_template_is_compared_at_calls_and_refused_without_tools(base: Base) -> None:
    template = base.template()
    trained = [encoded(template, row)[0] for row in (PLAIN, CALLS)]
    processor = copy.copy(base.processor)

    def found(before: str, after: str) -> dict[str, Any]:
        published = PUBLISHED.read_text()
        assert before in published
        processor.chat_template = published.replace(before, after)
        return first_difference(processor, [PLAIN, CALLS], trained)

    assert found("<tool_call>", "<tool_call>") == {}
    assert found("</tool_call>' }}", "</tool_call> ' }}")["before"].endswith("</tool_call>")
    assert found("'\\n<tool_response>\\n'", "'\\n<tool_response>'")["row"] == "calls"
    none = found("{%- if tools %}", "{%- if false %}")
    assert none == {"row": "calls", "no_tools": True}
    with pytest.raises(VlmflowError, match="row calls has tools, and the model's chat template writes none"):
        accepted_difference(none, base.folder, {}, template_differs=True)
