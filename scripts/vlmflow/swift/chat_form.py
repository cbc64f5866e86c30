"""A row's text in ms-swift's chat template, in the pieces that ms-swift tokenizes separately."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vlmflow.rows.chat import (
    IMAGE_TAG,
    ROLES,
    THOUGHT,
    Turn,
    as_written,
    declarations_of,
    dialogue_start,
    json_text,
    places_answered,
)
from vlmflow.rows.sharegpt import ShareGptRow

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
THOUGHT_END = "</think>"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
UNTRAINED = re.compile(r"<think>\s*</think>\s*")
"""The beginning of an answer that ms-swift does not train (4.6, loss_scale/config/ignore_empty_think.json)."""

END = "<|im_end|>\n"
"""The end of a turn; that of a trained answer is trained with it."""

TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_BEHIND = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""What the system prompt of a row with tools says before the declarations, one a line, and behind them."""

THINKING_TEMPLATES = {"qwen3", "qwen3_thinking"}
"""Qwen3's templates that cut the thoughts of earlier answers where only the last one is trained."""

HYBRID_TEMPLATES = {"qwen3"}
"""Qwen3's templates that put an empty thought before answers without one (add_non_thinking_prefix), and train none."""


@dataclass(frozen=True)
class ChatForm:
    """Qwen's chat form (ChatML), as ms-swift's templates of Qwen3 and Qwen3-VL write it.

    system: the system prompt of rows without a system turn; None for none.
    empty_thoughts: which answers without a thought get an empty one: "all", "last", or "none".
    last_answer_only: whether only the last answer of a row is trained. trains_empty_thoughts: whether empty thoughts
    are trained with their answers. cuts_thoughts: whether the thoughts of earlier answers are cut.

    Other forms are not supported: each run's check against ms-swift's own template refuses them.
    """

    system: str | None = None
    empty_thoughts: str = "none"
    last_answer_only: bool = False
    trains_empty_thoughts: bool = True
    cuts_thoughts: bool = False

    @classmethod
    def of(cls, text_args: Mapping[str, Any], last_answer_only: bool) -> Self:
        """Return the form of a run. text_args: see TrainSettings. last_answer_only: see TrainingData."""
        hybrid = text_args.get("template") in HYBRID_TEMPLATES
        added = hybrid and text_args.get("add_non_thinking_prefix", True)
        thoughts = ("last" if last_answer_only else "all") if added else "none"
        system = text_args.get("system")
        system = str(system).replace("\\n", "\n") if system is not None else None
        trains_empty = not hybrid or bool(text_args.get("disable_ignore_empty_think"))
        thinks = text_args.get("template") in THINKING_TEMPLATES
        cuts = last_answer_only and thinks and not text_args.get("preserve_thinking")
        return cls(system, thoughts, last_answer_only, trains_empty, cuts)

    def pieces(self, row: ShareGptRow) -> list[str]:
        """Return a row's text; each trained piece (an answer with its end) is separate from the text before it.

        A picture is one pad token between its marks.
        """
        pieces, before = [], ""
        for text, trained in self._parts(row):
            # ms-swift joins an answer that is not trained to the text before it. That makes other tokens only if it
            # begins with white space; the others are separate, because the rows of one trajectory share them.
            if trained or (trained is False and not text[0].isspace()):
                pieces += [before, text]
                before = ""
            else:
                before += text
        return [*pieces, before] if before else pieces

    def trained(self, row: ShareGptRow) -> list[str]:
        """Return the trained pieces of a row."""
        return [text for text, trained in self._parts(row) if trained]

    def _parts(self, row: ShareGptRow) -> Iterator[tuple[str, bool | None]]:
        """Yield the parts of a row's text, and whether each is trained; None for what is not of the assistant."""
        turns = row.conversations
        start = dialogue_start(turns)
        system = turns[0].value if start else self.system
        if row.tools:  # as Qwen's chat templates write the system prompt
            declared = "\n".join(map(json_text, declarations_of(row.tools) or []))
            system = (f"{system}\n\n" if system else "") + TOOLS_BEFORE + declared + TOOLS_BEHIND
        if system:
            yield f"<|im_start|>system\n{system}{END}", None
        for first, end in places_answered(turns):
            texts = [turn.value.replace(IMAGE_TAG, PICTURE) for turn in turns[start:first]]
            if turns[start].speaker == "observation":
                texts = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
            text = "\n".join(texts)
            yield f"<|im_start|>user\n{text}{END}<|im_start|>{ROLES['gpt']}\n", None
            yield from self._spoken(turns[first:end], end == len(turns))
            start = end

    def _spoken(self, turns: Sequence[Turn], is_last: bool) -> Iterator[tuple[str, bool]]:
        """Yield what the assistant says at one time, with its end, in parts."""
        kept = is_last or not self.last_answer_only
        trained = [kept and turn.loss is not False for turn in turns]
        texts = as_written(turns)
        if self.cuts_thoughts and not is_last:
            texts[0] = texts[0].split(THOUGHT_END)[-1].strip()
        wanted = self.empty_thoughts == "all" or (self.empty_thoughts == "last" and is_last)
        if wanted and not texts[0].startswith(THOUGHT):
            texts[0] = EMPTY_THOUGHT + texts[0]
        for text, ending, each in zip(texts, [*["\n"] * (len(texts) - 1), END], trained, strict=True):
            written = text + ending
            empty = None if self.trains_empty_thoughts or not each else UNTRAINED.match(written)
            if empty:
                yield empty.group(), False
                written = written[empty.end() :]
            if written:
                yield written, each

    def text(self, row: ShareGptRow) -> str:
        """Return a row as the model reads it, with one pad token for each picture."""
        return "".join(self.pieces(row))
