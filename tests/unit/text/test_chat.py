"""Messages to prompts, by the demo model's template and by ones of the kinds that models have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import (
    ChatTemplateError,
    ConfigurationError,
    InvalidParameter,
    PromptRequired,
    PromptTooLong,
)
from cog_triton.request.limits import MESSAGES, TextLimits
from cog_triton.text.chat import (
    merged_system,
    render_chat,
    set_chat_template,
)
from cog_triton.text.tokenizer import load_tokenizer

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + PLAIN
)
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)
TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }} {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "{% endfor %};{% endfor %}"
)
SWITCH = "{% if enable_thinking %}<think>{% endif %}" + PLAIN

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def loaded(demo_model: Path) -> Any:
    return load_tokenizer(str(demo_model))


@pytest.fixture
def tokenizer(loaded: Any) -> Any:
    return copy.copy(loaded)


def with_template(tokenizer: Any, template: Any) -> Any:
    tokenizer.chat_template = template
    return tokenizer


def test_the_models_own_template_gives_the_ids_that_transformers_gives(tokenizer: Any) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "Hello!"}, USER]
    prompt = render_chat(tokenizer, messages)
    assert prompt == "<s><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!</s>" + (
        "<|user|>Hi<|end|><|assistant|>"
    )
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == own
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_prompt_that_does_not_begin_an_answer(tokenizer: Any) -> None:
    prompt = render_chat(tokenizer, [USER], add_generation_prompt=False)
    assert prompt == "<s><|user|>Hi<|end|>"


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM, ALTERNATES])
def test_without_a_system_role_its_text_goes_to_the_user(tokenizer: Any, template: str) -> None:
    prompt = render_chat(with_template(tokenizer, template), [SYSTEM, USER])
    assert prompt == "user: Be brief.\n\nHi\n"


def test_with_a_system_role_it_stays(tokenizer: Any) -> None:
    prompt = render_chat(with_template(tokenizer, PLAIN), [SYSTEM, USER])
    assert prompt == "system: Be brief.\nuser: Hi\n"


def test_the_developer_role_is_a_system_role_unless_the_template_knows_it(tokenizer: Any) -> None:
    messages = [{**SYSTEM, "role": "developer"}, USER]
    assert render_chat(with_template(tokenizer, PLAIN), messages).startswith("system: Be")
    knows = "{# developer #}" + PLAIN
    assert render_chat(with_template(tokenizer, knows), messages).startswith("developer: Be")


def test_system_messages_are_merged_in_order() -> None:
    more = {"role": "system", "content": "Be kind."}
    assert merged_system([SYSTEM, more, USER, SYSTEM]) == [
        {"role": "user", "content": "Be brief.\n\nBe kind.\n\nHi"},
        SYSTEM,
    ]
    assert merged_system([SYSTEM]) == [{"role": "user", "content": "Be brief."}]


def test_the_templates_own_words_are_the_error(tokenizer: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"E1005 .* roles must alternate"):
        render_chat(with_template(tokenizer, ALTERNATES), [USER, USER])


def test_without_a_template_it_is_said_what_to_do(tokenizer: Any) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template.*CHAT_TEMPLATE"):
        render_chat(with_template(tokenizer, None), [USER])


def test_a_model_may_have_another_template_for_tools(tokenizer: Any) -> None:
    with_template(tokenizer, {"default": PLAIN, "tool_use": TOOLS})
    assert render_chat(tokenizer, [USER]) == "user: Hi\n"
    assert render_chat(tokenizer, [USER], tools=[TOOL]).startswith("weather {")


def test_arguments_of_calls_are_objects_for_templates(tokenizer: Any) -> None:
    function = {"name": "weather", "arguments": '{"city": "Łódź"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    prompt = render_chat(with_template(tokenizer, TOOLS), messages, tools=[TOOL])
    assert prompt.endswith("user: Hi;assistant: weather(Łódź);")


def test_parts_of_text_are_joined(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    messages = [{"role": "user", "content": parts}]
    assert render_chat(with_template(tokenizer, PLAIN), messages) == "user: Hi\nthere\n"


def test_the_templates_switches(tokenizer: Any) -> None:
    with_template(tokenizer, SWITCH)
    assert render_chat(tokenizer, [USER]) == "user: Hi\n"
    assert render_chat(tokenizer, [USER], kwargs={"enable_thinking": True}) == "<think>user: Hi\n"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools"])
def test_what_is_not_the_templates_is_no_switch(tokenizer: Any, name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"chat_template_kwargs must not have {name}"):
        render_chat(tokenizer, [USER], kwargs={name: "{{ 1 }}"})


def test_templates_run_in_a_sandbox(tokenizer: Any) -> None:
    with_template(tokenizer, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(ChatTemplateError, match="unsafe"):
        render_chat(tokenizer, [USER])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"content": "Hi"}, r"messages\[0\] must be an object with a role"),
        ({"role": "user", "content": 5}, r"messages\[0\].content must be a text or a list"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url is not supported"),
        ({"role": "user", "content": ["Hi"]}, "None is not supported"),
    ],
)
def test_what_is_no_message(tokenizer: Any, message: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidParameter, match=why):
        render_chat(tokenizer, [message])


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "none"])
def test_arguments_that_a_model_got_wrong_stay_a_text(tokenizer: Any, arguments: str) -> None:
    """Agents send back what a model wrote, also where max_tokens cut it off."""
    with_template(tokenizer, "{{ messages[0].tool_calls[0].function.arguments }}")
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render_chat(tokenizer, [message]) == arguments


def test_there_must_be_messages_and_not_too_many(tokenizer: Any) -> None:
    with pytest.raises(PromptRequired):
        render_chat(tokenizer, [])
    with pytest.raises(InvalidParameter, match=f"at most {MESSAGES}"):
        render_chat(tokenizer, [USER] * (MESSAGES + 1))


def test_sizes_are_counted_before_anything_is_rendered(tokenizer: Any) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError

    tokenizer.apply_chat_template = fail
    for long in (
        {"messages": [{"role": "user", "content": "x" * 101}]},
        {"messages": [{**USER, "name": "x" * 101}]},
        {"messages": [USER], "kwargs": {"date": "x" * 101}},
    ):
        with pytest.raises(PromptTooLong, match="100 are the most"):
            render_chat(tokenizer, limits=TextLimits(100, ""), **long)


def test_the_rendered_prompt_is_counted_too(tokenizer: Any) -> None:
    with_template(tokenizer, "{{ 'x' * 200 }}")
    with pytest.raises(PromptTooLong, match="the prompt in its chat template has 200"):
        render_chat(tokenizer, [USER], limits=TextLimits(100, ""))


def test_a_template_of_the_settings(tokenizer: Any) -> None:
    set_chat_template(tokenizer, PLAIN)
    assert render_chat(tokenizer, [USER]) == "user: Hi\n"
    set_chat_template(tokenizer, "{{ raise_exception('not today') }}")
    with pytest.raises(ConfigurationError, match=r"CHAT_TEMPLATE, line 2: .*endfor"):
        set_chat_template(tokenizer, "\n{% for m in messages %}")


def test_a_chat_template_of_the_settings_may_be_a_file(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }} ż", encoding="utf-8")
    set_chat_template(tokenizer, str(tmp_path / "chat.jinja"))
    assert render_chat(tokenizer, [USER]) == "Hi ż"
    with pytest.raises(ConfigurationError, match=r"CHAT_TEMPLATE=none\.jinja cannot be read"):
        set_chat_template(tokenizer, "none.jinja")
