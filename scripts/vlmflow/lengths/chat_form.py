"""A row's text in ms-swift's chat template, in the pieces that ms-swift tokenizes separately."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vlmflow.rows.chat import IMAGE_TAG, ROLES, Turn, dialogue_start
from vlmflow.rows.sharegpt import ShareGptRow

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
THOUGHT = "<think>"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
END = "<|im_end|>\n"
"""The end of a turn; that of a trained answer is trained with it."""

HYBRID_TEMPLATES = {"qwen3"}
"""Qwen3's templates that put an empty thought before answers without one (add_non_thinking_prefix)."""


@dataclass(frozen=True)
class ChatForm:
    """Qwen's chat form (ChatML), as ms-swift's templates of Qwen3 and Qwen3-VL write it.

    system: the system prompt of rows without a system turn; None for none.
    empty_thoughts: which answers without a thought get an empty one: "all", "last", or "none".
    last_answer_only: whether only the last answer of a row is trained. trains_empty_thoughts: whether the empty
    thoughts before trained answers are trained, too.

    Other forms are not supported: each run's check against ms-swift's own template refuses them.
    """

    system: str | None = None
    empty_thoughts: str = "none"
    last_answer_only: bool = False
    trains_empty_thoughts: bool = False

    @classmethod
    def of(cls, text_args: Mapping[str, Any], last_answer_only: bool) -> Self:
        """Return the form of a run. text_args: see TrainSettings. last_answer_only: see TrainingData."""
        hybrid = text_args.get("template") in HYBRID_TEMPLATES and text_args.get("add_non_thinking_prefix", True)
        thoughts = ("last" if last_answer_only else "all") if hybrid else "none"
        system = text_args.get("system")
        system = str(system).replace("\\n", "\n") if system is not None else None
        return cls(system, thoughts, last_answer_only, bool(text_args.get("disable_ignore_empty_think")))

    def pieces(self, row: ShareGptRow) -> list[str]:
        """Return a row's text; each trained piece (an answer with its end) is separate from the text before it.

        A picture is one pad token between its marks.
        """
        pieces = []
        own = dialogue_start(row.conversations) > 0
        before = f"<|im_start|>system\n{self.system}<|im_end|>\n" if self.system and not own else ""
        last = row.conversations[-1]
        for turn in row.conversations:
            if turn.speaker == "gpt":
                if self._has_empty_thought(turn, turn is last):
                    before += EMPTY_THOUGHT
                pieces += [before, turn.value + END]
                before = ""
                continue
            text = turn.value.replace(IMAGE_TAG, PICTURE)
            before += f"<|im_start|>{ROLES[turn.speaker]}\n{text}<|im_end|>\n"
            if turn.speaker == "human":
                before += f"<|im_start|>{ROLES['gpt']}\n"
        return pieces

    def trained(self, row: ShareGptRow) -> list[str]:
        """Return the trained pieces of a row."""
        pieces = []
        last = row.conversations[-1]
        for turn in [last] if self.last_answer_only else row.conversations:
            if turn.speaker == "gpt" and turn.loss is not False:
                if self.trains_empty_thoughts and self._has_empty_thought(turn, turn is last):
                    pieces.append(EMPTY_THOUGHT)
                pieces.append(turn.value + END)
        return pieces

    def _has_empty_thought(self, answer: Turn, is_last: bool) -> bool:
        """Return whether the template puts an empty thought before an answer."""
        wanted = self.empty_thoughts == "all" or (self.empty_thoughts == "last" and is_last)
        return wanted and not answer.value.startswith(THOUGHT)

    def text(self, row: ShareGptRow) -> str:
        """Return a row as the model reads it, with one pad token for each picture."""
        return "".join(self.pieces(row))
