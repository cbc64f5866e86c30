"""The reasons why a row is not used."""

import msgspec


class Reject(msgspec.Struct, frozen=True):
    """A row that is not used.

    reason: a key of REASONS, or `picture_` and a key of `pictures.image_manifest.REASONS`.
    detail: the exact cause, with the value, for people.
    """

    reason: str
    detail: str


REASONS = {
    "source_left_out": "the row's source is not among the requested ones (sources)",
    "not_sampled": "fewer rows are requested, and this one was not drawn (max_samples, or #N after the address)",
    "not_drawn": "the mixture takes only a part of the data set's rows, and this one was not drawn (mix)",
    "text_only": "the row has no picture, and rows with pictures are requested (modality)",
    "has_picture": "the row has a picture, and rows without pictures are requested (modality)",
    "not_taken": "the row's label does not call its answer a good one (take: true)",
    "no_good_attempt": "no attempt of the trajectory has the score from which attempts are trained (min_score)",
    "bad_table_row": "the table's row cannot be read: wrong number of fields, broken or open quotation, not UTF-8",
    "bad_json": "the row is not valid JSON",
    "duplicate_key": "a key is given twice in one object, or keys of pictures differ only in letter case",
    "bad_shape": "a key is missing, or a value does not have the type that the raw form requires",
    "wrong_role": "a speaker that the form does not know, or that does not speak there",
    "unbalanced_turns": "a trajectory's answer has no feedback, or a conversation has no turns at all",
    "empty_turn": "a question, an answer or a feedback holds no text",
    "unreadable_score": "a feedback has no score, or not a whole number from 0 to 10",
    "schema": "the row does not fit the published schema",
    "alternation": "the speakers do not take turns in the required order, or the last turn is no answer",
    "nothing_trained": "no answer is trained",
    "bad_tools": "the tools are no list of declarations, each of a function with a name",
    "bad_call": "a call is not JSON, names no declared tool, or does not fit the responses behind it",
    "image_tag": "the row has more or fewer <image> tags than pictures",
    "stray_tag": "the text contains a tag or placeholder that the trainer replaces (<image>, {{ROUND0}}, ...)",
    "special_token": "the text contains a token that begins or ends turns, calls, responses or thoughts",
    "control_character": "the text contains a control character other than line feed and tab",
    "too_many_turns": "the conversation has more turns than the limit",
    "turn_too_long": "a turn, or the declarations of the tools, have more characters than the limit",
    "too_many_pictures": "the row has more pictures than the limit",
    "bad_picture": "a picture in the row itself is not base64, or one of several is empty",
    "picture_unresolved": "the picture's path is not in the image manifest",
    "duplicate": "an earlier row has the same conversation and the same pictures, or none",
    "in_test_split": "a picture, or the prompt of a row without one, is also in a test split",
    "in_val_split": "a picture, or the prompt of a row without one, is also in a validation split",
    "near_test_picture": "a picture looks like one in the test split (near_duplicates.drop)",
    "near_test_question": "a row without a picture asks nearly the same as a test row (near_duplicates.drop)",
}
"""All reasons but those of unusable pictures: these are in `pictures.image_manifest`, and get the prefix `picture_`."""

LEFT_OUT = frozenset(
    {"source_left_out", "not_sampled", "not_drawn", "text_only", "has_picture", "not_taken", "no_good_attempt"}
)
"""Reasons of rows that the configuration does not request: they are counted, but not in the quarantine."""

HARMLESS = LEFT_OUT | frozenset(
    {"duplicate", "in_test_split", "in_val_split", "near_test_picture", "near_test_question"}
)
"""Reasons that are no fault of the data: these rows do not count toward the limit of rejects."""
