"""Messages to prompts, by the demo model's template and by ones of the kinds that models have."""

import copy
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import CogTritonError, ConfigurationError, InvalidParameter, PromptTooLong
from cog_triton.request.limits import MESSAGES, TextLimits
from cog_triton.text.chat import render_chat, set_chat_template
from tests.support import load_cases

CASES = load_cases(__file__, "chat.yaml")
TEMPLATES, MESSAGE = CASES["templates"], CASES["messages"]
SYSTEM, USER = MESSAGE["system"], MESSAGE["user"]


@pytest.fixture
def tokenizer(tokenizer: Any) -> Any:
    return copy.copy(tokenizer)


def render(tokenizer: Any, template: Any, messages: list[Any], **options: Any) -> str:
    tokenizer.chat_template = template
    return render_chat(tokenizer, messages, **options)


def test_the_models_own_template_gives_the_ids_that_transformers_gives(tokenizer: Any) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "Hello!"}, USER]
    prompt = render_chat(tokenizer, messages)
    assert prompt == "<s><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!</s>" + (
        "<|user|>Hi<|end|><|assistant|>"
    )
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ids.count(tokenizer.bos_token_id) == 1
    assert render_chat(tokenizer, [USER], add_generation_prompt=False) == "<s><|user|>Hi<|end|>"


@pytest.mark.parametrize(("template", "messages", "prompt"), CASES["rendered"])
def test_rendered_chats(tokenizer: Any, template: str, messages: list[Any], prompt: str) -> None:
    assert render(tokenizer, template, messages) == prompt


@pytest.mark.parametrize(("template", "messages", "error"), CASES["refused"])
def test_messages_that_are_refused(
    tokenizer: Any, template: str | None, messages: list[Any], error: str
) -> None:
    with pytest.raises(CogTritonError, match=error):
        render(tokenizer, template, messages)


@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1]", "none"])
def test_arguments_that_a_model_got_wrong_stay_a_text(tokenizer: Any, arguments: str) -> None:
    """Agents send back what a model wrote, also where max_tokens cut it off."""
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    function = {"name": "weather", "arguments": arguments}
    call = {**MESSAGE["call"], "tool_calls": [{"function": function}]}
    assert render(tokenizer, template, [call]) == arguments


def test_a_model_may_have_another_template_for_tools(tokenizer: Any) -> None:
    templates = {"default": TEMPLATES["plain"], "tool_use": TEMPLATES["tools"]}
    tool = {"type": "function", "function": {"name": "weather"}}
    assert render(tokenizer, templates, [USER]) == "user: Hi\n"
    assert render(tokenizer, templates, [USER], tools=[tool]).startswith("weather {")


def test_the_templates_switches(tokenizer: Any) -> None:
    switch, thinking = TEMPLATES["switch"], {"enable_thinking": True}
    assert render(tokenizer, switch, [USER]) == "Hi"
    assert render(tokenizer, switch, [USER], kwargs=thinking) == "<think>Hi"
    for name in ("chat_template", "tokenize", "messages", "tools"):
        with pytest.raises(InvalidParameter, match=f"chat_template_kwargs must not have {name}"):
            render(tokenizer, switch, [USER], kwargs={name: "{{ 1 }}"})


def test_sizes_are_counted_before_anything_is_rendered_and_after(tokenizer: Any) -> None:
    limits = TextLimits(100, "")
    with pytest.raises(PromptTooLong, match="the prompt in its chat template has 200"):
        render(tokenizer, "{{ 'x' * 200 }}", [USER], limits=limits)
    with pytest.raises(InvalidParameter, match=f"at most {MESSAGES}"):
        render_chat(tokenizer, [USER] * (MESSAGES + 1))
    tokenizer.apply_chat_template = None
    for messages, options in (
        ([{"role": "user", "content": "x" * 101}], {}),
        ([{**USER, "name": "x" * 101}], {}),
        ([USER], {"tools": [{"x" * 101: 1}]}),
    ):
        with pytest.raises(PromptTooLong, match="100 are the most"):
            render_chat(tokenizer, messages, limits=limits, **options)  # type: ignore[arg-type]


def test_a_template_of_the_settings_or_of_a_file(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }} ż", encoding="utf-8")
    for setting, prompt in ((TEMPLATES["plain"], "user: Hi\n"), (str(file), "Hi ż")):
        set_chat_template(tokenizer, setting)
        assert render_chat(tokenizer, [USER]) == prompt
    set_chat_template(tokenizer, "{{ raise_exception('not today') }}")
    for setting, why in (
        ("\n{% for m in messages %}", r"CHAT_TEMPLATE, line 2: .*endfor"),
        ("none.jinja", r"CHAT_TEMPLATE=none\.jinja cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            set_chat_template(tokenizer, setting)
