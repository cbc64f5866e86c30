"""Reads the turns of chats as their makers write them: contents of parts, calls and responses, reasoning, weights.

Sources, the makers' descriptions: OpenAI (chat completions and responses: parts, tool_calls, function_call, functions,
developer, weight), Anthropic (messages: source, tool_use, tool_result, thinking, input_schema), Qwen (qwen_vl_utils:
{type: image, image}), LLaMA-Factory (ShareGPT: function_call, observation, tools; v1: parts with value, reasoning,
tool_call), axolotl (parts with path, url, base64), Oumi (parts with content), ms-swift (tool_call, tool_response).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vlmflow.config.raw_forms import is_given, trained
from vlmflow.rows.chat import ASSISTANT, IMAGE_TAG, Reject, Speaker, Turn, call_text, with_thought
from vlmflow.rows.raw_text import (
    CALL_PARTS,
    INNER_KEYS,
    PARTS,
    PICTURE_KEYS,
    PICTURE_PARTS,
    RESPONSE_PARTS,
    TEXT_PARTS,
    THOUGHT_PARTS,
    BadChat,
    Reading,
    UnreadKey,
    calls_in,
    declared,
    decoded,
    kind_of,
    pictures_of_part,
    text_of,
)

SPEAKERS: dict[str, Speaker] = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "human": "human",
    "assistant": "gpt",
    "gpt": "gpt",
    "chatgpt": "gpt",
    "bot": "gpt",
    "model": "gpt",
    "function_call": "function_call",
    "tool_call": "function_call",
    "tool": "observation",
    "tool_response": "observation",
    "function": "observation",
    "function_response": "observation",
    "observation": "observation",
    "observations": "observation",
    "ipython": "observation",
}
"""Every maker's words for who speaks."""

WRITTEN_CALL, WRITTEN_RESPONSE = "<tool_call>", "<tool_response>"
"""Before calls and responses that are written out in texts, as Hermes and Qwen's chat templates write them."""

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
CALL_KEYS = ("tool_calls", "function_call")
LOSS_KEYS = ("loss", "weight", "train", "training", "loss_weight")
"""The keys of a turn that say whether it is trained."""

OF_ASSISTANT = (*THOUGHT_KEYS, *CALL_KEYS)


def reading_of(key: str, turns: Sequence[Any], who: str, content: str, system: Any, *tools: Any) -> Reading | Reject:
    """Return what the turns of a chat say, with a system prompt and tools beside them, or why they cannot be used.

    key: the row's key of the turns, for messages. turns: decoded JSON. who, content: the keys of a turn that name the
    speaker and have the content. system: a text or parts. tools: declarations, each a list or a JSON text. What is
    UNSET or null is absent.
    """
    try:
        return _Chat(key, who, content).read(turns, system, tools)
    except BadChat as error:
        return error.reject
    except RecursionError:
        return Reject("bad_shape", f"{key}: values are too deep")


class _Chat:
    """A chat that is being read, turn by turn.

    turns, pictures, unread: see Reading. calls: the ids of the calls in a row that are read last. responses: their
    responses so far: id, text, pictures. number: that of the turn; -1 is the system prompt beside the turns. beside:
    how many pictures that are named beside the turns were shown so far.
    """

    def __init__(self, key: str, who: str, content: str) -> None:
        self.key, self.who, self.content = key, who, content
        self.number, self.beside = -1, 0
        self.turns: list[Turn] = []
        self.pictures: list[str] = []
        self.unread: list[UnreadKey] = []
        self.calls: list[Any] = []
        self.responses: list[tuple[Any, str, list[str]]] = []

    def read(self, turns: Sequence[Any], system: Any, tools: Iterable[Any]) -> Reading:
        if not turns:
            raise BadChat("unbalanced_turns", f"{self.key} has no turns")
        if system and is_given(system):
            self._say("system", self._content(system))
        for self.number, turn in enumerate(turns):
            if type(turn) is not dict:
                raise BadChat("bad_shape", f"{self._place} is {kind_of(turn)}, not an object")
            self._turn(turn)
        self._respond()
        return Reading(self.turns, self.pictures, declared(tools), self.unread)

    @property
    def _place(self) -> str:
        return self.key if self.number < 0 else f"{self.key}[{self.number}]"

    def _turn(self, turn: dict[str, Any]) -> None:
        named = turn.get(self.who)
        speaker = SPEAKERS.get(named) if type(named) is str else None
        if speaker is None:
            shown = repr(named[:40]) if type(named) is str else kind_of(named)
            raise BadChat("wrong_role", f"{self._place}: {shown} is none of {', '.join(SPEAKERS)}")
        content = turn.get(self.content)
        plain = len(turn) == 2
        if plain and type(content) is str and speaker in ("human", "gpt"):  # nearly all
            self._say(speaker, content)
            return
        first, responses = len(self.turns), len(self.responses)
        if speaker == "observation":
            pictures: list[str] = []
            text = self._content(content, pictures=pictures)
            written = _written(WRITTEN_RESPONSE, text) if not pictures else []
            self.responses += [(turn.get("tool_call_id"), response, pictures) for response in written or [text]]
        elif speaker == "function_call":
            for call in calls_in(content, self._place):
                self._call(call)
        elif speaker == "gpt" and not plain:
            self._answer(turn, content)
        else:
            text = self._content(content, answers=speaker == "gpt", responses=speaker == "human")
            if text or (len(self.turns) == first and len(self.responses) == responses):
                self._say(speaker, text)
        if not plain:
            self._other_keys(turn, speaker in ASSISTANT, self.turns[first:])

    def _answer(self, turn: Mapping[str, Any], content: Any) -> None:
        """Read a turn of the assistant: its reasoning, its texts and its calls, in this order."""
        where = self._place
        given: list[Any] = [thought for key in THOUGHT_KEYS if is_given(thought := turn.get(key))]
        if len(given) > 1 or any(type(thought) is not str for thought in given):
            raise BadChat("bad_shape", f"{where}: its reasoning is not one text ({', '.join(THOUGHT_KEYS)})")
        calls = [call for key in CALL_KEYS if is_given(held := turn.get(key)) for call in calls_in(held, where)]
        first = len(self.turns)
        absent = content is None and bool(calls or given)
        text = "" if absent else self._content(content, answers=True)
        if given:
            text = with_thought(given[0], text)
        if text or not (calls or len(self.turns) > first):
            self._say("gpt", text)
        for call in calls:
            self._call(call)

    def _other_keys(self, turn: Mapping[str, Any], answers: bool, made: Sequence[Turn]) -> None:
        """Mark what is not trained of the turns `made`, and note the keys of a raw turn that are not read."""
        for key, value in turn.items():
            if key in LOSS_KEYS:
                if answers and value is not None:
                    is_trained = trained(value)
                    if is_trained is None:
                        self.unread.append(UnreadKey(key, value, answers))
                    elif not is_trained:
                        for made_turn in made:
                            if made_turn.speaker in ASSISTANT:
                                made_turn.loss = False
            elif not (
                answers or value is None if key in OF_ASSISTANT else key in (self.who, self.content, "tool_call_id")
            ):
                self.unread.append(UnreadKey(key, value, answers))

    def _say(self, speaker: Speaker, text: str) -> None:
        before, mark, after = text.partition(WRITTEN_CALL) if speaker == "gpt" else (text, "", "")
        if mark and (calls := _written(WRITTEN_CALL, mark + after)):
            if before.strip():
                self._say(speaker, before)
            for call in calls:
                self._call(decoded(call, "bad_call", f"{self._place}: the call"))
            return
        if self.responses:
            self._respond()
        self.calls = []
        self.turns.append(Turn(speaker, text))

    def _call(self, call: Any) -> None:
        """Add a call. call: {"id", "function": {"name", "arguments"}}, or name and arguments directly."""
        where = self._place
        self._respond()
        held: Any = call.get("function", call) if type(call) is dict else None
        name = held.get("name") if type(held) is dict else None
        if held is None or type(name) is not str:
            raise BadChat("bad_call", f"{where}: a call names no function")
        arguments = held.get("arguments", held.get("input"))
        if type(arguments) is str:
            arguments = decoded(arguments, "bad_call", f"{where}: the arguments of {name[:40]!r}") if arguments else {}
        if arguments is None:
            arguments = {}
        if type(arguments) is not dict:
            raise BadChat("bad_call", f"{where}: arguments of {name[:40]!r} are {kind_of(arguments)}, not an object")
        self.calls.append(call.get("id"))
        self.turns.append(Turn("function_call", call_text(name, arguments)))

    def _respond(self) -> None:
        """Add the responses to the calls in a row, in the order of the calls."""
        if not self.responses:
            return
        if any(response[0] is not None for response in self.responses):
            ids, calls = [str(response[0]) for response in self.responses], list(map(str, self.calls))
            places = {call: index for index, call in enumerate(calls)}
            if len(places) < len(calls) or sorted(ids) != sorted(calls):
                raise BadChat("bad_call", f"responses to the calls {_listed(ids)}, but calls {_listed(calls)}")
            ordered = sorted(self.responses, key=lambda response: places[str(response[0])])
            if ordered != self.responses and any(IMAGE_TAG in text and not names for _, text, names in ordered):
                raise BadChat("bad_call", "responses with picture tags are not in the order of their calls")
            self.responses = ordered
        for _, text, pictures in self.responses:
            self.turns.append(Turn("observation", text))
            self.pictures += pictures
        self.calls, self.responses = [], []

    def _content(
        self, content: Any, answers: bool = False, pictures: list[str] | None = None, responses: bool = False
    ) -> str:
        """Return the text of a content, with a tag for each picture; add its calls and responses.

        answers: whether it may have reasoning and calls. pictures: gets the pictures' names; None for those of the
        chat. responses: whether it may have responses.
        """
        if type(content) is str:
            return content
        if type(content) is not list:
            held = kind_of(content)
            raise BadChat("bad_shape", f"{self._place}: its {self.content} is {held}, not a text or a list of parts")
        names = self.pictures if pictures is None else pictures
        texts: list[str] = []
        thoughts: list[str] = []
        for number, part in enumerate(content):
            if type(part) is not dict:
                raise BadChat("bad_shape", f"{self._place}.{self.content}[{number}] is {kind_of(part)}, not an object")
            kind = part.get("type")
            if kind == "text" and len(part) == 2 and type(text := part.get("text")) is str:  # nearly all
                texts.append(text)
                continue
            where = f"{self._place}.{self.content}[{number}]"
            if kind is None:
                kind = next((name for name in ("text", "image", "image_url") if part.get(name) is not None), None)
            keys = PARTS.get(kind) if type(kind) is str else None
            if keys is None:
                shown = repr(kind[:40]) if type(kind) is str else kind_of(kind)
                raise BadChat("bad_shape", f"{where} is of type {shown}, none of {', '.join(PARTS)}")
            if kind in PICTURE_PARTS:
                texts.append(IMAGE_TAG)
                named = pictures_of_part(part, keys, where)
                if not named:
                    self._beside(part, where)
                names += named
            elif kind in TEXT_PARTS:
                texts.append(text_of(part, keys, where))
            elif kind in THOUGHT_PARTS and answers and not texts:
                thoughts.append(text_of(part, keys, where))
            elif kind in CALL_PARTS and answers:
                if text := _with_thoughts(thoughts, texts):
                    self._say("gpt", text)
                thoughts, texts = [], []
                for call in calls_in(part["value"], where) if "value" in part else [part]:
                    self._call(call)
            elif kind in RESPONSE_PARTS and responses:
                shown_in: list[str] = []
                text = self._content(part.get("content", ""), pictures=shown_in)
                self.responses.append((part.get("tool_use_id"), text, shown_in))
            else:
                fault = "comes behind a text" if kind in THOUGHT_PARTS and answers else "is another speaker's"
                raise BadChat("wrong_role", f"{where}: a part of type {kind} {fault}")
            self._keys_of_part(part, keys, answers)
        return _with_thoughts(thoughts, texts)

    def _beside(self, part: Mapping[str, Any], where: str) -> None:
        """Count a picture that is named beside the turns; if its part says which one it is, it must be the next."""
        index = part.get("index", self.beside)
        if index is not None and index != self.beside:
            raise BadChat("bad_shape", f"{where} shows picture {index} of the row, not {self.beside}, the next one")
        self.beside += 1

    def _keys_of_part(self, part: Mapping[str, Any], keys: Sequence[str], answers: bool) -> None:
        """Note the keys of a part that are not read, and those of an object that stands for its picture."""
        for key, value in part.items():
            if value is None or key == "type":
                continue
            if key not in keys:
                self.unread.append(UnreadKey(f"{self.content}.{key}", value, answers))
            elif type(value) is dict and keys is PICTURE_KEYS:
                known = (*INNER_KEYS, "type", "media_type")
                inner = ((name, held) for name, held in value.items() if held is not None and name not in known)
                self.unread += [UnreadKey(f"{self.content}.{key}.{name}", held, answers) for name, held in inner]


def _with_thoughts(thoughts: Sequence[str], texts: Sequence[str]) -> str:
    """Return the texts of an answer's parts as one, behind its thoughts."""
    text, thought = "".join(texts), "\n".join(thoughts)
    return with_thought(thought, text) if thought.strip() else text


def _written(mark: str, text: str) -> list[str]:
    """Return what is written out in a text, each between marks; [] if something else is there too."""
    *parts, rest = map(str.strip, text.split(mark.replace("<", "</")))
    if rest or not all(part.startswith(mark) for part in parts):
        return []
    return [part.removeprefix(mark) for part in parts]


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - 10} more" if len(ids) > 10 else ""
    return (", ".join(name[:40] for name in ids[:10]) or "none") + more
