import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.body import RowError
from gateway.batch.rows import DEFAULT_COMPLETION_TOKENS, parse_row

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def row(body: object, url: str = "/v1/chat/completions", **changes: object) -> str:
    return json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body, **changes})


def test_chat_fields_reach_the_request() -> None:
    body = {
        **CHAT,
        "model": "demo",
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "seed": 11,
        "stop": ["\n", "END"],
        "logprobs": True,
        "top_logprobs": 3,
        "logit_bias": {"5": -100},
        "user": "somebody",
    }
    (request,) = parse_row(1, row(body)).requests
    assert request.model == "demo"
    assert request.max_tokens == 7
    assert request.chat.messages[0].content == "Hello"
    assert (request.n, request.sampling.seed, list(request.stop)) == (2, 11, ["\n", "END"])
    assert request.sampling.logprobs == 3
    assert dict(request.sampling.logit_bias) == {5: -100.0}
    assert request.sampling.temperature == pytest.approx(0.5)


def test_unset_temperature_stays_unset_and_zero_stays_zero() -> None:
    (unset,) = parse_row(1, row(CHAT)).requests
    (zero,) = parse_row(1, row({**CHAT, "temperature": 0})).requests
    assert not unset.sampling.HasField("temperature")
    assert zero.sampling.HasField("temperature")
    assert zero.sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("prompt", "kinds"),
    [
        ("text", ["text"]),
        (["one", "two"], ["text", "text"]),
        ([1, 2, 3], ["token_ids"]),
        ([[1, 2], [3]], ["token_ids", "token_ids"]),
    ],
)
def test_every_prompt_form_of_completions(prompt: object, kinds: list[str]) -> None:
    requests = parse_row(1, row({"prompt": prompt}, "/v1/completions")).requests
    assert [request.WhichOneof("prompt") for request in requests] == kinds
    assert all(request.max_tokens == DEFAULT_COMPLETION_TOKENS for request in requests)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (request,) = parse_row(1, row({"messages": [{"role": "user", "content": parts}]})).requests
    assert request.chat.messages[0].content == "ab"


BAD = [
    ("not json", "", "invalid_json"),
    ("[]", "", "invalid_json"),
    (json.dumps({"url": "/v1/completions"}), "custom_id", "invalid_request"),
    (row(CHAT, custom_id=""), "custom_id", "invalid_request"),
    (row(CHAT, custom_id="x" * 600), "custom_id", "invalid_request"),
    (row(CHAT, method="GET"), "method", "invalid_request"),
    (row(CHAT, url="/v1/embeddings"), "url", "invalid_request"),
    (row(CHAT, urll="x"), "urll", "invalid_request"),
    (row("text"), "body", "invalid_request"),
    (row({}), "body.messages", "invalid_request"),
    (row({"messages": []}), "body.messages", "invalid_request"),
    (row({"messages": [{"role": "user"}]}), "body.messages[0].content", "invalid_request"),
    (row({**CHAT, "temperature": "hot"}), "body.temperature", "invalid_request"),
    (row({**CHAT, "temperature": float("nan")}), "body.temperature", "invalid_request"),
    (row({**CHAT, "max_tokens": -1}), "body.max_tokens", "invalid_request"),
    (row({**CHAT, "max_tokens": 1.5}), "body.max_tokens", "invalid_request"),
    (row({**CHAT, "n": True}), "body.n", "invalid_request"),
    (row({**CHAT, "stream": True}), "body.stream", "invalid_request"),
    (row({**CHAT, "temprature": 1}), "body.temprature", "invalid_request"),
    (row({**CHAT, "tools": []}), "body.tools", "invalid_request"),
    (row({**CHAT, "top_logprobs": 2}), "body.top_logprobs", "invalid_request"),
    (row({**CHAT, "logit_bias": {"x": 1}}), "body.logit_bias", "invalid_request"),
    (row({"prompt": []}, "/v1/completions"), "body.prompt", "invalid_request"),
    (row({"prompt": [1, "a"]}, "/v1/completions"), "body.prompt", "invalid_request"),
    (row({"prompt": "a", "best_of": 4}, "/v1/completions"), "body.best_of", "invalid_request"),
    (row({"messages": [{"role": "user", "content": "\ud800"}]}), "body", "invalid_request"),
]


@pytest.mark.parametrize(("text", "param", "code"), BAD, ids=range(len(BAD)))
def test_faults_name_the_field(text: str, param: str, code: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(3, text)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_a_misspelt_field_names_the_nearest() -> None:
    with pytest.raises(RowError, match="did you mean 'temperature'"):
        parse_row(1, row({**CHAT, "temprature": 1}))


def test_a_fault_in_the_body_still_knows_its_custom_id() -> None:
    with pytest.raises(RowError) as caught:
        parse_row(1, row({}, custom_id="mine"))
    assert caught.value.custom_id == "mine"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["messages", "prompt", "n", "stop", "logit_bias", "seed", "logprobs", "max_tokens", "x"]


@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values),
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
)
def test_any_json_is_a_row_or_a_row_error(body: dict[str, object], url: str) -> None:
    try:
        assert parse_row(1, row(body, url)).requests
    except RowError as error:
        assert error.custom_id == "a"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_row_error(data: bytes) -> None:
    with pytest.raises(RowError):
        parse_row(1, data)
