"""Why a row is not used: the closed set of reasons, and the account of them."""

import msgspec


class Reject(msgspec.Struct, frozen=True):
    """A row that is not used.

    reason: a key of REASONS.
    detail: what exactly, with the value, for a person who wants to put it right.
    """

    reason: str
    detail: str


REASONS = {
    "bad_json": "the row is no JSON by itself",
    "bad_shape": "a key is missing, or a value has another type than the raw form says",
    "wrong_role": "a turn is not from the one whose turn it is",
    "unbalanced_turns": "an answer without feedback, or no turns at all",
    "empty_turn": "a question, an answer or a feedback holds no text",
    "unreadable_score": "a feedback says no score, or no whole number from 0 to 10",
    "schema": "the row does not fit the published schema",
    "alternation": "human and gpt do not take turns, or gpt has not the last word",
    "image_tag": "the first turn does not begin with the one <image> tag, or tags and pictures differ in number",
    "stray_tag": "a tag that the trainer replaces (<image>, <video>, ...) stands inside the text",
    "special_token": "a token that ends or begins turns stands inside the text",
    "control_character": "a control character other than line feed and tab stands inside the text",
    "too_many_turns": "the conversation has more turns than the limit",
    "turn_too_long": "a turn has more characters than the limit",
    "picture_unresolved": "the picture's path does not stand in the image manifest",
    "duplicate": "the same picture with the same conversation came before",
    "in_test_split": "the picture is in the test split too",
}
"""Reasons that a conversation gives; those of pictures stand in `pictures.manifest`, and are prefixed `picture_`."""

HARMLESS = frozenset({"duplicate", "in_test_split"})
"""Reasons that say nothing against the data, and do not count toward the limit of rejects."""
