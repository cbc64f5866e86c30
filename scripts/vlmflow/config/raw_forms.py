"""Keys that change what a row means if its form does not read them: their meaning, and the values that have it.

Sources, the owners' descriptions of their forms: LLaMA-Factory (data/README.md: system, history, tools, kto_tag,
chosen, rejected, videos, audios), TRL (dataset_formats: label, chosen, rejected, tools), ms-swift (Custom-dataset:
label, rejected_response, rejected_messages, loss, loss_scale, videos, audios), OpenAI's fine-tuning format (weight,
tools, functions, tool_calls, function_call), and OpenOrca (system_prompt). What is not trained: besides these axolotl
(train, training, train_detail, training_detail, train_on_turn), LLaMA-Factory's second version (loss_weight), Tinker
(trainable), verl (loss_mask) and torchtune (masked).

The forms that raw rows may have. Each is one module of `vlmflow.rows.forms`, described by its FORM.

Other modules ask this one about forms. None of them names a form: one more module there is one more form.
"""

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType, NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec


class Meaning(NamedTuple):
    """What a key means in a row.

    says: its meaning, for people. has: whether a value has this meaning; null, empty and neutral values do not.
    of_answers: in a turn, it counts only if the assistant speaks; what others say is not trained. turns: its content
    may be written as turns instead. inside: whether it counts also in an object under a key of any name.
    """

    says: str
    has: Callable[[Any], bool]
    of_answers: bool = False
    turns: bool = False
    inside: bool = False


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
TOOLS = Meaning("the tools that answers may call", is_given, inside=True)
SYSTEM = Meaning("the system prompt", is_given, turns=True, inside=True)
REASONING = Meaning("the assistant's reasoning before its answer", is_given, inside=True)
NO_REASONING = Meaning("false asks for an answer without reasoning", is_bad, inside=True)
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

REASONINGS = dict.fromkeys(
    (
        *("reasoning", "reasoning_content", "reasoning_details", "reasoning_text", "thinking", "thought", "thoughts"),
        *("cot", "complex_cot", "chain_of_thought", "rationale", "rationales"),
    ),
    REASONING,
)
OF_CONVERSATIONS = {
    **MEDIA_KEYS,
    **TRAINED,
    "objects": REGIONS,
    **dict.fromkeys(("system", "system_prompt", "system_message", "custom_instructions"), SYSTEM),
    **dict.fromkeys(("tools", "functions", "xml_tools", "python_tools"), TOOLS),
    **REASONINGS,
    "enable_thinking": NO_REASONING,
    **dict.fromkeys(("label", "kto_tag"), LABEL),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages"), PREFERENCE),
}
INSIDE = frozenset(folded(key) for key, meaning in OF_CONVERSATIONS.items() if meaning.inside)
HISTORY = {"history": Meaning("the turns before the question", is_given, turns=True)}
OF_ANSWERS = {key: meaning._replace(of_answers=True) for key, meaning in TRAINED.items()}
OF_TURNS = {
    **MEDIA_KEYS,
    **OF_ANSWERS,
    **{f"content.{key}": meaning for key, meaning in OF_ANSWERS.items()},
    **dict.fromkeys(("tool_calls", "function_call"), Meaning("tool calls", is_given)),
    **REASONINGS,
    **dict.fromkeys(("image", "images"), Meaning("pictures given in the turn, not in the row", is_given)),
}


PACKAGE = "vlmflow.rows.forms"


class PictureCell(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A picture in the form of the library `datasets`. path: its path. bytes: the picture itself, as base64."""

    path: str | None = None
    bytes: str | None = None


PictureNames = str | list[str | PictureCell | None] | PictureCell | None
"""A picture, or several."""

ANY_ROW = {"image": PictureNames, "images": PictureNames, "source": Any}
"""Keys that rows may have in every form that is not `fixed`, with their types."""

PICTURES = ("image", "images")
"""Those of them that name pictures; they count in any letter case."""


@dataclass(frozen=True)
class RawForm:
    """One raw form.

    kinds: its names in the configuration: one, or several for the same form.
    row: what a row looks like, for people: a cell of the table in docs/data.md.
    content: a class whose annotations are the keys of a row, besides those of ANY_ROW, with their types; a key that may
    be null may also be missing.
    read: makes a `raw_text.Reading`, or a Reject, from a row with the attributes of `content`, and the setting
    `prompt`; each is one training row. None if the form has `rows`, or if the kind is found in the rows.
    rows: for raw rows that are not just one conversation: takes `converted.HowToConvert`, returns a `converted.RowsOf`.
    turns: the key that has the turns, as objects whose first field names the speaker; None if there is no such key.
    rounds: whether these objects are rounds instead, each a question with its answer, and maybe with its source.
    speakers: the names of speakers, each with its role in a conversation (`chat.Turn.speaker`).
    fast_types: by key, types that replace those in `content` in a first, direct attempt to decode a row; rows without a
    fault pass it.
    meanings: the keys besides the turns that change what a row means if they are not read.
    chosen_by: those of `meanings` that have none if the setting `columns` says which key is read instead, and this one.
    answer: the key of the only answer, in a form without `turns`: what preference data have chosen stands there.
    joins: the keys whose lists, one after another, are the turns of a row without `turns`; preference data have the
    chosen answer in place of the last.
    lists_are: the kind of the rows whose keys hold lists where this form has texts; None if there are no such rows.
    settings: the settings of a data set that this form has, but not every form.
    fixed: rows are as their one owner publishes them: all have a picture, and no key has another name in a file.
    one_prompt: all rows have the same prompt, the setting `prompt`.
    pictures_in_turns: whether pictures and source may stand elsewhere than under the keys of ANY_ROW: in the turns, or
    where another kind has them that the rows are found to be of.
    moves_tags: the kinds in which the tag of a single picture moves to a line of its own before the first question, as
    their makers' trainer moves it.
    feedback: the kinds in which the human's later turns are feedback on the answer before, and the last answer is
    right.
    gold: returns the right answer that a raw row's bytes have beside its turns, or None; None if the form has no such
    key.
    """

    kinds: tuple[str, ...]
    row: str
    content: type[Any]
    read: Callable[[Any, str | None], Any] | None = None
    rows: Callable[[Any], Any] | None = None
    turns: str | None = None
    rounds: bool = False
    speakers: Mapping[str, str] = field(default_factory=dict)
    fast_types: Mapping[str, Any] = field(default_factory=dict)
    meanings: Mapping[str, Meaning] = field(default_factory=lambda: OF_CONVERSATIONS)
    chosen_by: Mapping[str, str] = field(default_factory=dict)
    answer: str | None = None
    joins: tuple[str, ...] = ()
    lists_are: str | None = None
    settings: tuple[str, ...] = ("ignore_keys", "take", "frames_as_pictures")
    fixed: bool = False
    one_prompt: bool = False
    pictures_in_turns: bool = False
    moves_tags: tuple[str, ...] = ()
    feedback: tuple[str, ...] = ()
    gold: Callable[[bytes], str | None] | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """The form's own keys, with their types."""
        return get_type_hints(self.content)

    @property
    def all_keys(self) -> dict[str, Any]:
        """The keys that are read from a row, with their types."""
        return self.keys if self.fixed else {**self.keys, **ANY_ROW}

    def names(self, columns: Mapping[str, str], ignored: Collection[str] = ()) -> dict[str, str]:
        """Return the keys that are read from rows, with their names in the file.

        If `image` is called `images`, or the other way round, the other one is not read. Nor is a key of the form that
        a row may lack, if its name is that of another key, or in `ignored`, the setting `ignore_keys`.
        """
        own, taken = self.keys, {*columns.values(), *ignored}
        names = {
            key: columns.get(key, key)
            for key in self.all_keys
            if key not in own or not may_be_null(own[key]) or key in columns or key not in taken
        }
        for key, other in (("image", "images"), ("images", "image")):
            if columns.get(key) == other and other not in columns:
                del names[other]
        return names

    def meanings_of_rows(self, columns: Mapping[str, str]) -> dict[str, Meaning]:
        """Return the keys besides the turns that change what rows mean if they are not read, as in another letter case.

        A key that is read has a meaning only if it is ignored.
        """
        return {key: meaning for key, meaning in self.meanings.items() if self.chosen_by.get(key) not in columns}

    def meanings_of(self, columns: Mapping[str, str]) -> dict[str, Meaning]:
        """Return the same, and also the keys of turns, as `messages.weight`."""
        if not self.turns:
            return self.meanings_of_rows(columns)
        turns = self.names(columns)[self.turns]
        of_turns = {
            f"{turns}.{key}": meaning._replace(of_answers=False) if self.rounds else meaning
            for key, meaning in OF_TURNS.items()
        }
        return self.meanings_of_rows(columns) | of_turns


def may_be_null(holds: Any) -> bool:
    """Return whether a key of this type may be null, or missing."""
    return holds is Any or NoneType in get_args(holds)


def holds_list(holds: Any) -> bool:
    """Return whether a key of this type holds a list, and no text."""
    kinds = get_args(holds) if get_origin(holds) in (Union, UnionType) else (holds,)
    return str not in kinds and any(get_origin(kind) is list for kind in kinds)


def picture_keys(names: Mapping[str, str]) -> list[str]:
    """Return the names of the keys of pictures in the file. names: those of all keys that are read."""
    return [names[key] for key in PICTURES if key in names]


@cache
def _modules() -> dict[str, ModuleType]:
    """Return the module of every kind, sorted by kind."""
    package = importlib.import_module(PACKAGE)
    modules = [importlib.import_module(f"{PACKAGE}.{entry.name}") for entry in pkgutil.iter_modules(package.__path__)]
    forms = [(kind, module) for module in modules for kind in module.FORM.kinds]
    if len(forms) > len(dict(forms)):
        raise ValueError(f"two modules of {PACKAGE} define a form of the same kind: {[kind for kind, _ in forms]}")
    return dict(sorted(forms))


def kinds() -> list[str]:
    """Return what `datasets.NAME.kind` may be, in alphabetical order: the kinds of all modules of PACKAGE."""
    return list(_modules())


def form_of(kind: str) -> RawForm:
    """Return the form that rows of a kind have. kind: one of `kinds()`; KeyError for another."""
    form: RawForm = _modules()[kind].FORM
    return form


def has_feedback(kind: str) -> bool:
    """Return whether the later turns of the human are feedback in rows of a kind."""
    return kind in form_of(kind).feedback


def modules_of(kind: str) -> list[str]:
    """Return the names of the modules with the forms of rows of a kind; a stage that converts it depends on them."""
    form = form_of(kind)
    others = [form.lists_are] if form.lists_are else [] if form.read or form.rows else kinds()
    return list(dict.fromkeys(_modules()[name].__name__ for name in [kind, *others]))


def kinds_with(setting: str) -> list[str]:
    """Return the kinds whose form has a setting that not every form has."""
    return [kind for kind in kinds() if setting in form_of(kind).settings]


def all_settings() -> list[str]:
    """Return the settings of data sets that not every form has."""
    return list(dict.fromkeys(setting for kind in kinds() for setting in form_of(kind).settings))


def table() -> str:
    """Return the table of kinds for docs/data.md: what a row of each looks like."""
    forms = dict.fromkeys(module.FORM.kinds for module in _modules().values())
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {form_of(names[0]).row} |" for names in forms]
    return "\n".join(["| `kind` | a row |", "|---|---|", *rows, ""])
