"""Keys that change what a row means if its form does not read them: their meaning, and the values that have it.

Sources, the owners' descriptions of their forms: LLaMA-Factory (data/README.md: system, history, tools, kto_tag,
chosen, rejected, videos, audios), TRL (dataset_formats: label, chosen, rejected, tools), ms-swift (Custom-dataset:
label, rejected_response, rejected_messages, loss, loss_scale, videos, audios), OpenAI's fine-tuning format (weight,
tools, functions, tool_calls, function_call), and OpenOrca (system_prompt). What is not trained: besides these axolotl
(train, training, train_detail, training_detail, train_on_turn), LLaMA-Factory's second version (loss_weight), Tinker
(trainable), verl (loss_mask) and torchtune (masked).
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Meaning(NamedTuple):
    """What a key means in a row.

    says: its meaning, for people. has: whether a value has this meaning; null, empty and neutral values do not.
    of_answers: in a turn, it counts only if the assistant speaks; what others say is not trained. turns: its content
    may be written as turns instead.
    """

    says: str
    has: Callable[[Any], bool]
    of_answers: bool = False
    turns: bool = False


NOTHING = frozenset({"", "null", "none", "nan", "[]", "{}"})
"""Texts that stand for no value in tables, and in lists written as JSON."""


def folded(key: str) -> str:
    """Return a key in lower case without separators: equal for `lossWeight`, `loss-weight` and `Loss_weight`."""
    return key.translate(SEPARATORS).lower()


SEPARATORS = str.maketrans("", "", "_- ")


def is_given(value: Any) -> bool:
    """Return whether a value holds anything.

    Null, false, blank texts, those in NOTHING, and lists and objects of only such values hold nothing.
    """
    if isinstance(value, str):
        return value.strip().lower() not in NOTHING
    if isinstance(value, list | dict):
        return any(map(is_given, value.values() if isinstance(value, dict) else value))
    return value is not None and value is not False


def is_bad(value: Any) -> bool:
    """Return whether a label calls its answer bad: false or 0, also as texts. Other texts are names of classes."""
    return value in (False, 0) or (isinstance(value, str) and value.strip().lower() in ("false", "0"))


def is_not_one(value: Any) -> bool:
    """Return whether a weight is a number other than 1, or a list has one; true is 1, false is 0, no value is 1."""
    if isinstance(value, list):
        return any(map(is_not_one, value))
    if isinstance(value, str) and value.strip().lower() in NOTHING:
        return False
    try:
        return isinstance(value, bool | int | float | str) and float(value) != 1
    except OverflowError:  # a number of hundreds of digits
        return True
    except ValueError:
        return isinstance(value, str) and value.strip().lower() in NO


NO = ("false", "no", "off")


def trained(weight: Any) -> bool | None:
    """Return whether an answer of this weight is trained; None for a part of it, or more than once."""
    if not is_not_one(weight):
        return True
    none = is_bad(weight) or (isinstance(weight, str) and weight.strip().lower() in NO)
    return False if none else None


WEIGHT = Meaning("the weight of the answers in training; 0 and false mean none", is_not_one)
MASKED = Meaning("true means that the answers are not trained", lambda value: is_given(value) and not is_bad(value))
PARTS = Meaning("which parts of the answers are trained", is_given)
PREFERENCE = Meaning(
    "a better and a worse answer, for preference training (DPO); take: chosen trains the better one", is_given
)
LABEL = Meaning("false marks the answer as a bad one, for KTO training; take: true leaves it out", is_bad)
TOOLS = Meaning("the tools that answers may call", is_given)
SYSTEM = Meaning("the system prompt", is_given, turns=True)
REGIONS = Meaning("regions of the pictures, for grounding", is_given)
MEDIA = Meaning("videos or audio that the row is about; frames_as_pictures reads frames in files", is_given)

WEIGHTS = (
    "weight",
    "loss",
    "loss_weight",
    "loss_scale",
    "loss_mask",
    "train",
    "training",
    "trainable",
    "train_on_turn",
)
TRAINED = {
    **dict.fromkeys(WEIGHTS, WEIGHT),
    "masked": MASKED,
    **dict.fromkeys(("train_detail", "training_detail"), PARTS),
}
"""Every maker's words for what is not trained."""

MEDIA_KEYS = dict.fromkeys(("video", "videos", "audio", "audios"), MEDIA)
OF_TEXTS = MEDIA_KEYS | {
    key: meaning._replace(has=is_bad) if meaning is WEIGHT else meaning for key, meaning in TRAINED.items()
}
"""Those of rows that are one text, whose other weights are those of a corpus."""

OF_CONVERSATIONS = {
    **MEDIA_KEYS,
    **TRAINED,
    "objects": REGIONS,
    **dict.fromkeys(("system", "system_prompt"), SYSTEM),
    **dict.fromkeys(("tools", "functions"), TOOLS),
    **dict.fromkeys(("label", "kto_tag"), LABEL),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages"), PREFERENCE),
}
HISTORY = {"history": Meaning("the turns before the question", is_given, turns=True)}
OF_ANSWERS = {key: meaning._replace(of_answers=True) for key, meaning in TRAINED.items()}
OF_TURNS = {
    **MEDIA_KEYS,
    **OF_ANSWERS,
    **{f"content.{key}": meaning for key, meaning in OF_ANSWERS.items()},
    **dict.fromkeys(("tool_calls", "function_call"), Meaning("tool calls", is_given)),
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "thinking"), Meaning("the assistant's reasoning before its answer", is_given)
    ),
    **dict.fromkeys(("image", "images"), Meaning("pictures given in the turn, not in the row", is_given)),
}
