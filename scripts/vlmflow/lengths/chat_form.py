"""A row's text in ms-swift's chat template, in the pieces that ms-swift tokenizes separately."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vlmflow.rows.chat import IMAGE_TAG, ROLES, dialogue_start
from vlmflow.rows.sharegpt import ShareGptRow

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
THOUGHT = "<think>"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

HYBRID_TEMPLATES = {"qwen3"}
"""Qwen3's templates that put an empty thought before answers without one (add_non_thinking_prefix)."""


@dataclass(frozen=True)
class ChatForm:
    """Qwen's chat form (ChatML), as ms-swift's templates of Qwen3 and Qwen3-VL write it.

    system: the system prompt of rows without a system turn; None for none.
    empty_thoughts: which answers without a thought get an empty one: "all", "last", or "none".

    Other forms are not supported: each run's check against ms-swift's own template refuses them.
    """

    system: str | None = None
    empty_thoughts: str = "none"

    @classmethod
    def of(cls, text_args: Mapping[str, Any], last_answer_only: bool) -> Self:
        """Return the form of a run. text_args: see TrainSettings. last_answer_only: see TrainingData."""
        hybrid = text_args.get("template") in HYBRID_TEMPLATES and text_args.get("add_non_thinking_prefix", True)
        thoughts = ("last" if last_answer_only else "all") if hybrid else "none"
        system = text_args.get("system")
        return cls(str(system).replace("\\n", "\n") if system is not None else None, thoughts)

    def pieces(self, row: ShareGptRow) -> list[str]:
        """Return a row's text; each trained piece (an answer with its end) is separate from the text before it.

        A picture is one pad token between its marks.
        """
        pieces = []
        own = dialogue_start(row.conversations) > 0
        before = f"<|im_start|>system\n{self.system}<|im_end|>\n" if self.system and not own else ""
        last = len(row.conversations) - 1
        for number, turn in enumerate(row.conversations):
            if turn.speaker == "gpt":
                thinks = self.empty_thoughts == "all" or (self.empty_thoughts == "last" and number == last)
                if thinks and not turn.value.startswith(THOUGHT):
                    before += EMPTY_THOUGHT
                pieces += [before, f"{turn.value}<|im_end|>\n"]
                before = ""
                continue
            text = turn.value.replace(IMAGE_TAG, PICTURE)
            before += f"<|im_start|>{ROLES[turn.speaker]}\n{text}<|im_end|>\n"
            if turn.speaker == "human":
                before += f"<|im_start|>{ROLES['gpt']}\n"
        return pieces

    def text(self, row: ShareGptRow) -> str:
        """Return a row as the model reads it, with one pad token for each picture."""
        return "".join(self.pieces(row))
