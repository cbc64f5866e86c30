"""Keys from the environment: each that no header can carry is refused, and none is repeated."""

import base64

import pytest

from vlmflow.core.child_programs import ANSWER_KEY, MLFLOW_KEYS, OTLP_KEYS, SECRETS, key_of, keys_of, without_keys
from vlmflow.core.errors import VlmflowError

HEADERS = OTLP_KEYS[0]


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {*SECRETS, *MLFLOW_KEYS}:
        monkeypatch.delenv(name, raising=False)


def test_white_space_at_the_ends_is_no_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", " very-secret\r\n")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "  \n")
    assert key_of("MLFLOW_TRACKING_TOKEN") == "very-secret"
    assert key_of("MLFLOW_TRACKING_USERNAME") is None
    assert keys_of(MLFLOW_KEYS) == dict.fromkeys(MLFLOW_KEYS, "") | {"MLFLOW_TRACKING_TOKEN": "very-secret"}


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", *OTLP_KEYS, ANSWER_KEY])
@pytest.mark.parametrize("inside", ["\n", "\r", "\x1b", "\x7f", "\N{NO-BREAK SPACE}", "\udcff"])
def test_a_key_that_no_header_can_carry_is_refused_without_its_value(
    name: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"a=very{inside}secret")
    with pytest.raises(VlmflowError, match=name) as caught:
        key_of(name)
    assert "very" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_letters_that_are_not_ascii_are_in_passwords_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "geheimnisträger")
    assert key_of("MLFLOW_TRACKING_PASSWORD") == "geheimnisträger"
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "geheimnisträger")
    with pytest.raises(VlmflowError, match="MLFLOW_TRACKING_TOKEN"):
        key_of("MLFLOW_TRACKING_TOKEN")


@pytest.mark.parametrize(
    ("value", "entry"),
    [
        ("very-secret", "1 of 1"),
        ("a=b,very-secret", "2 of 2"),
        ("Authorization=", "1 of 1"),
        ("=very-secret", "1 of 1"),
        ('"Authorization=very-secret"', "1 of 1"),
        ("a=b, Authorization=very;secret, c=d", "2 of 3"),
        ("Authorization: Basic very-secret", "1 of 1"),
        ("Authorization=very%0Asecret", "1 of 1"),
        ("Authorization=tr%C3%A4ger", "1 of 1"),
    ],
)
def test_an_entry_that_opentelemetry_would_drop_is_refused(
    value: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEADERS, value)
    with pytest.raises(VlmflowError, match=f"{HEADERS}: its entry {entry} is not NAME=VALUE") as caught:
        key_of(HEADERS)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        "Authorization=Basic%20cGs6c2s=",
        "Authorization=Basic cGs6c2s=, x-mlflow-experiment-id=0",
        "a=b,,c=d,",
        "api-key=k%2Ck%3B",
    ],
)
def test_entries_that_opentelemetry_takes_stay(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, value)
    assert key_of(HEADERS) == value


def test_no_form_of_a_key_stays_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEADERS, "Authorization=Basic%20cGs6c2stdmVyeS1zZWNyZXQ=,x-mlflow-experiment-id=0\n")
    monkeypatch.setenv(ANSWER_KEY, "sk-answer\n")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "very-secret")
    pair = base64.b64encode(b"ann:very-secret").decode()
    text = f"10 'Basic cGs6c2stdmVyeS1zZWNyZXQ=' cGs6c2stdmVyeS1zZWNyZXQ= sk-answer very-secret Basic {pair} ann"
    assert without_keys(text) == "10 '***' *** *** *** Basic *** ann"
    monkeypatch.setenv(ANSWER_KEY, "sk\nanswer\\1")
    assert without_keys(f"Illegal header value {b'Bearer sk' + bytes([10]) + b'answer' + bytes([92]) + b'1'!r}") == (
        "Illegal header value b'Bearer ***'"
    )


def test_a_key_that_a_server_repeats_in_its_own_form_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ANSWER_KEY, "sk/\"<answer>'&\\1 é")
    repeated = (
        r"""{"key": "sk/\"<answer>'&\\1 \u00e9"}""",
        "<p>sk/&quot;&lt;answer&gt;&#x27;&amp;\\1 é</p>",
        "?key=sk/%22%3Canswer%3E%27%26%5C1%20%C3%A9&",
        "?key=sk%2F%22%3Canswer%3E%27%26%5C1%20%C3%A9&",
    )
    assert [without_keys(text) for text in repeated] == ['{"key": "***"}', "<p>***</p>", "?key=***&", "?key=***&"]
