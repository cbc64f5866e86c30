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
    "source_left_out": "the row's source is none of those that are asked for (sources)",
    "not_sampled": "fewer rows are asked for, and this one was not drawn (max_samples, or #N behind the address)",
    "text_only": "the row has no picture, and rows with pictures are asked for (modality)",
    "has_picture": "the row has a picture, and rows without are asked for (modality)",
    "bad_table_row": "the table's row cannot be read: a wrong number of fields, a broken or open quotation, no UTF-8",
    "bad_json": "the row is no JSON by itself",
    "bad_shape": "a key is missing, or a value has another type than the raw form says",
    "wrong_role": "a turn is not from the one whose turn it is",
    "unbalanced_turns": "a trajectory's answer has no feedback, or a conversation has no turns at all",
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
    "several_pictures": "the row names more than one picture",
    "picture_unresolved": "the picture's path does not stand in the image manifest",
    "duplicate": "the same picture, or none, with the same conversation came before",
    "in_test_split": "the picture, or the prompt of a row without, is in the test split too",
    "near_test_picture": "the picture looks like one of the test split (near_duplicates.drop)",
    "near_test_question": "a row without a picture asks what a test row asks in other letters (near_duplicates.drop)",
}
"""Reasons that a conversation gives; those of pictures are in `pictures.image_manifest`, with the prefix `picture_`."""

LEFT_OUT = frozenset({"source_left_out", "not_sampled", "text_only", "has_picture"})
"""Rows that the configuration does not ask for: they are counted, and do not stand in the quarantine."""

HARMLESS = LEFT_OUT | frozenset({"duplicate", "in_test_split", "near_test_picture", "near_test_question"})
"""Reasons that say nothing against the data, and do not count toward the limit of rejects."""
