"""Chat templates: equal to transformers on the demo model, and shut in."""

from pathlib import Path

import pytest

from gateway.chat import ChatError, ChatTemplate, Message
from gateway.tokenizer import Tokenizer

TURNS = [
    Message("system", "Be brief."),
    Message("user", "  Who's there? <b>&</b> "),
    Message("assistant", "Nay, answer me."),
    Message("user", "Long live the king!"),
]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_demo_template_gives_what_transformers_gives(
    demo_model: Path, generation_prompt: bool
) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(demo_model)
    tokenizer = Tokenizer.from_directory(demo_model)
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special.names)
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    assert template.render(
        TURNS, generation_prompt=generation_prompt
    ) == reference.apply_chat_template(
        messages, add_generation_prompt=generation_prompt, tokenize=False
    )


def test_functions_that_templates_rely_on_are_there() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{{ extra }}{{ eos_token }}{% endfor %}",
        {"eos_token": "</s>"},
    )
    text = template.render(TURNS[1:], arguments={"extra": "!"})
    assert text == '{"role": "user", "content": "  Who\'s there? <b>&</b> "}!</s>'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ (messages | list).__init__.__globals__ }}",
        "{{ 'x' * 100000000 * 100 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(1000000) %}{{ i }}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].role.upper() }}",
    ],
)
def test_templates_cannot_reach_out(source: str) -> None:
    with pytest.raises(ChatError):
        ChatTemplate(source, {}).render(TURNS)


def test_broken_template_and_no_messages_say_so() -> None:
    with pytest.raises(ChatError, match="does not compile"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(ChatError, match="no messages"):
        ChatTemplate("x", {}).render([])
