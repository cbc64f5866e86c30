"""The tiny tokenizer: Qwen's ids and splitting, and every text survives a round trip."""

import json
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from vlmflow.demo.sample import write_sample
from vlmflow.demo.tiny_model import embedding_rows, fire_texts, write_tokenizer

MERGES = 200
TEXTS = ["The square at the top left is green.", "The square at the top right is red."] * 20


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, write_tokenizer(folder, TEXTS, MERGES)


@pytest.fixture(scope="module")
def tokenizer(written):
    return AutoTokenizer.from_pretrained(written[0])


@pytest.mark.parametrize(
    ("token", "identity"),
    [("<|endoftext|>", 151643), ("<|im_end|>", 151645), ("<|image_pad|>", 151655), ("</think>", 151668)],
)
def test_added_tokens_have_the_ids_of_qwen3(tokenizer, token, identity):
    """The ids are those in the tokenizer_config.json of Qwen3."""
    assert tokenizer(f"a{token}b")["input_ids"][1] == identity
    assert tokenizer.convert_ids_to_tokens(identity) == token


def test_words_of_the_texts_become_single_tokens(tokenizer):
    assert len(tokenizer("The square at the top left is green.")["input_ids"]) == 9
    assert len(tokenizer("Zebra")["input_ids"]) > 1


def test_every_id_in_use_is_given_and_none_other(written, tokenizer):
    ids = written[1]
    assert ids == tokenizer.get_vocab()
    assert len(set(ids.values())) == len(ids)
    assert embedding_rows(ids) == 151_672
    assert 256 + 26 < len(ids) <= 256 + MERGES + 26


def test_without_a_gap_the_added_tokens_follow_the_merges(tmp_path):
    ids = write_tokenizer(tmp_path, ["one two three"], MERGES, gap=False)
    assert sorted(ids.values()) == list(range(len(ids)))
    assert AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("</think>") == len(ids) - 1


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
@example("½ ﬁ e\u0301 \r\n 12345  can't")
def test_every_text_survives_a_round_trip(written, tokenizer, text):
    """NFC is Qwen's own normalisation: nothing else may change, with transformers and without."""
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert Tokenizer.from_file(str(written[0] / "tokenizer.json")).encode(text).ids == ids


def test_chat_template_writes_turns_as_qwen_does(tokenizer):
    content = [{"type": "image"}, {"type": "text", "text": "Which?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}, {"role": "assistant", "content": "Red."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which?<|im_end|>\n"
        "<|im_start|>assistant\nRed.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_texts_are_those_of_usable_rows(tmp_path):
    write_sample(tmp_path / "fire", 50, 48, seed=1)
    raw = tmp_path / "fire" / "FIRE-train-100K.json"
    faults = json.loads((tmp_path / "fire" / "faults.json").read_bytes())
    (number,) = [fault["row"] for fault in faults if fault["fault"] == "lone_surrogate"]
    texts = list(fire_texts([raw]))
    rows = json.loads(raw.read_bytes())
    assert rows[0]["conversations"][0]["value"].strip() in texts
    assert rows[number]["conversations"][0]["value"].strip() not in texts
    assert all("<image>" not in text or text.startswith("Thought") for text in texts)
