"""Messages to prompts, by the demo model's template and by ones of the kinds that models have."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from cog_triton.errors import (
    ChatTemplateError,
    CogTritonError,
    ConfigurationError,
    InvalidParameter,
    PromptTooLong,
)
from cog_triton.request.limits import MESSAGES, TextLimits
from cog_triton.text.chat import render_chat, set_chat_template
from cog_triton.text.tokenizer import load_tokenizer

# Chat templates of the kinds that models have, and messages for them.
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}{{ m.role }}: {{ m.content }};{% endfor %}"
)
WITH_DEVELOPER = "{# developer #}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name }} {{ t | tojson }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }})"
    "{% endfor %};{% endfor %}"
)
WITH_SWITCH = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
DEVELOPER = {"role": "developer", "content": "Be brief."}
USER_PARTS: dict[str, Any] = {
    "role": "user",
    "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}],
}
WEATHER_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Łódź"}'},
        }
    ],
}


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


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        pytest.param(PLAIN, [SYSTEM, USER], "system: Be brief.\nuser: Hi\n", id="system prompt"),
        pytest.param(
            NO_SYSTEM,
            [SYSTEM, USER],
            "user: Be brief.\n\nHi;",
            id="system prompt goes to the user, where it raises",
        ),
        pytest.param(
            DROPS_SYSTEM,
            [SYSTEM, SYSTEM, USER],
            "user: Be brief.\n\nBe brief.\n\nHi\n",
            id="system prompts go to the user in order, where they are dropped",
        ),
        pytest.param(
            ALTERNATES,
            [SYSTEM, USER],
            "user: Be brief.\n\nHi;",
            id="system prompt goes to the user, where roles alternate",
        ),
        pytest.param(NO_SYSTEM, [SYSTEM], "user: Be brief.;", id="system prompt without a user"),
        pytest.param(PLAIN, [DEVELOPER], "system: Be brief.\n", id="developer is the system"),
        pytest.param(
            WITH_DEVELOPER,
            [DEVELOPER],
            "developer: Be brief.;",
            id="developer that the template knows",
        ),
        pytest.param(PLAIN, [USER_PARTS], "user: Hi\nthere\n", id="parts"),
        pytest.param(
            WITH_TOOLS,
            [USER, WEATHER_CALL],
            "user: Hi;assistant: weather(Łódź);",
            id="arguments of calls are objects",
        ),
    ],
)
def test_rendered_chats(tokenizer: Any, template: str, messages: list[Any], prompt: str) -> None:
    assert render(tokenizer, template, messages) == prompt


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        pytest.param(
            "{{ raise_exception('not today') }}",
            [USER],
            "E1005 ChatTemplateError: .*not today",
            id="what the template raises",
        ),
        pytest.param(
            None,
            [USER],
            "ChatTemplateError: the model has no chat template.*CHAT_TEMPLATE",
            id="no template",
        ),
        pytest.param(
            "{{ messages.__class__.__mro__ }}",
            [USER],
            "ChatTemplateError: .*unsafe",
            id="what is unsafe",
        ),
        pytest.param(PLAIN, [], "PromptRequired: .*at least one", id="no messages"),
        pytest.param(
            PLAIN,
            [{"content": "Hi"}],
            r"InvalidParameter: messages\[0\] must be an object with a role",
            id="no role",
        ),
        pytest.param(
            PLAIN,
            [{"role": "user", "content": 5}],
            r"InvalidParameter: .*\[0\].content must be a string or a",
            id="content that is a number",
        ),
        pytest.param(
            PLAIN,
            [{"role": "user", "content": ["Hi"]}],
            "InvalidParameter: .*None is not supported",
            id="part that is a text",
        ),
        pytest.param(
            PLAIN,
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "InvalidParameter: .*image_url is not",
            id="image",
        ),
    ],
)
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
    call = {**WEATHER_CALL, "tool_calls": [{"function": function}]}
    assert render(tokenizer, template, [call]) == arguments


def test_a_model_may_have_another_template_for_tools(tokenizer: Any) -> None:
    templates = {"default": PLAIN, "tool_use": WITH_TOOLS}
    tool = {"type": "function", "function": {"name": "weather"}}
    assert render(tokenizer, templates, [USER]) == "user: Hi\n"
    assert render(tokenizer, templates, [USER], tools=[tool]).startswith("weather {")


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        # As Command R+'s, which joins the texts of what a tool need not have.
        (
            "{% for t in tools %}{{ ': ' + t.function.description }}"
            "{% for p in t.function.parameters.properties.values() %}{{ ': ' + p.description }}"
            "{% endfor %}{% endfor %}{{ messages[0].content }}",
            [{"type": "function", "function": {"name": "f"}}],
        ),
        (
            "{% for t in tools %}{% for p in t.function.parameters.properties.values() %}"
            "{{ ': ' + p.description }}{% endfor %}{% endfor %}{{ messages[0].content }}",
            [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}],
        ),
        # As Hermes' for tools, which goes through them in any case.
        ("{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}", []),
    ],
    ids=["a tool without anything", "an argument without a description", "no tools"],
)
def test_templates_that_need_more_of_tools(
    tokenizer: Any, template: str, tools: list[dict[str, Any]]
) -> None:
    tokenizer.chat_template = template
    assert "Hi" in render_chat(tokenizer, [{"role": "user", "content": "Hi"}], tools=tools)


def test_the_templates_switches(tokenizer: Any) -> None:
    switch, thinking = WITH_SWITCH, {"enable_thinking": True}
    assert render(tokenizer, switch, [USER]) == "Hi"
    assert render(tokenizer, switch, [USER], kwargs=thinking) == "<think>Hi"
    for name in ("chat_template", "tokenize", "messages", "tools"):
        with pytest.raises(InvalidParameter, match=f"chat_template_kwargs must not contain {name}"):
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
        with pytest.raises(PromptTooLong, match="the limit is 100"):
            render_chat(tokenizer, messages, limits=limits, **options)  # type: ignore[arg-type]


ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}|{% endif %}{% endfor %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}{{ m.role }}={{ m.content[0]['text'] }};{% endfor %}"
PARTS_OF_USERS = (
    "{% for m in messages %}{{ m.role }}="
    "{% if m.role == 'user' %}{% for part in m.content %}{{ part['text'] }}{% endfor %}"
    "{% else %}{{ '' + m.content }}{% endif %};{% endfor %}"
)
BY_MACRO = (
    "{% macro show(content) %}{% for part in content %}{% if part is mapping %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m['content']) }};"
    "{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %};{% endfor %}"
)
AS_JSON = "{% for m in messages %}{{ m.content | tojson }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "of_text", "of_parts"),
    [
        pytest.param(
            ONLY_PARTS,
            "[system]Be brief.|[user]Hi|",
            "[system]Be brief.|[user]Hi|there|",
            id="goes through parts",
        ),
        pytest.param(
            FIRST_PART, "system=Be brief.;user=Hi;", "system=Be brief.;user=Hi;", id="first part"
        ),
        pytest.param(
            PARTS_OF_USERS,
            "system=Be brief.;user=Hi;",
            "system=Be brief.;user=Hithere;",
            id="parts of users, texts of others",
        ),
        pytest.param(BY_MACRO, "Be brief.;Hi;", "Be brief.;Hithere;", id="in a macro"),
        pytest.param(BOTH, "Be brief.;Hi;", "Be brief.;<Hi><there>;", id="either"),
        pytest.param(
            PLAIN,
            "system: Be brief.\nuser: Hi\n",
            "system: Be brief.\nuser: Hi\nthere\n",
            id="prints texts",
        ),
        pytest.param(AS_JSON, '"Be brief.";"Hi";', '"Be brief.";"Hi\\nthere";', id="prints JSON"),
    ],
)
def test_a_content_comes_in_the_form_that_the_template_reads(
    tokenizer: Any, template: str, of_text: str, of_parts: str
) -> None:
    assert render(tokenizer, template, [SYSTEM, USER]) == of_text
    assert render(tokenizer, template, [SYSTEM, USER_PARTS]) == of_parts


def test_the_system_prompt_goes_to_the_user_in_a_template_of_parts(tokenizer: Any) -> None:
    template = ONLY_PARTS.replace("in messages", "in messages if m.role != 'system'")
    assert render(tokenizer, template, [SYSTEM, USER]) == "[user]Be brief.\n\nHi|"
    assert render(tokenizer, template, [SYSTEM, USER_PARTS]) == "[user]Be brief.\n\nHi\nthere|"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ '{}{}'.format(messages[0].content) }}", id="IndexError"),
        pytest.param("{{ 7 // (messages | length - 1) }}", id="ZeroDivisionError"),
        pytest.param("{{ messages[0].content + 1 }}", id="TypeError"),
        pytest.param("{% for i in range(999999) %}.{% endfor %}", id="OverflowError"),
        pytest.param("{{ messages.append.__globals__ }}", id="SecurityError"),
        pytest.param(
            "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
            id="RecursionError",
        ),
        pytest.param("{{ messages[0].content.encode('ascii') }}", id="UnicodeEncodeError"),
        pytest.param("{{ messages[0].content.nothing.nothing }}", id="UndefinedError"),
        pytest.param("{{ 'x'.join(5) }}", id="not iterable"),
        pytest.param("{% if %}", id="TemplateSyntaxError"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(tokenizer: Any, template: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template"):
        render(tokenizer, template, [{"role": "user", "content": "Grüße"}])


CALL = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
ENDED = "{% endfor %};{% endfor %}"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param("{{ c.function.name + c.function.arguments }}", "weather", id="joins texts"),
        pytest.param("{{ c.function.name }}{{ c.function.arguments }}", "weather", id="prints"),
        pytest.param(
            "{{ c.function.name }}{{ c.function.arguments | tojson }}", "weather", id="JSON"
        ),
        pytest.param("{{ c.function | tojson }}", '"arguments": ', id="JSON of the function"),
        pytest.param(
            "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
            "{{ {k: v} | tojson }}{% endfor %}",
            "weather",
            id="goes through them",
        ),
        pytest.param(
            "{{ c.function.name }}{% if c.function.arguments is string %}"
            "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}",
            "weather",
            id="either",
        ),
    ],
)
@pytest.mark.parametrize("as_object", [False, True], ids=["from a text", "from an object"])
def test_arguments_come_in_the_form_that_the_template_reads(
    tokenizer: Any, call: str, expected: str, as_object: bool
) -> None:
    arguments: Any = {"city": "Łódź"} if as_object else '{"city": "Łódź"}'
    function = {"name": "weather", "arguments": arguments}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    prompt = render(tokenizer, CALL + call + ENDED, [USER, turn])
    assert f'{expected}{{"city": "Łódź"}}' in prompt


OBJECTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for name, value in c.function.arguments|items %}[{{ name }}={{ value }}]{% endfor %}"
    "{% endfor %}{% endfor %}"
)
# As DeepSeek's, which puts texts together.
TEXTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.arguments + ']' }}{% endfor %}{% endfor %}"
)
PYTHONS = TEXTS.replace("{{ '[' + c.function.arguments + ']' }}", "[{{ c.function.arguments }}]")


@pytest.mark.parametrize(
    ("template", "arguments", "written"),
    [
        pytest.param(OBJECTS, {"a": 1}, "[a=1]", id="objects"),
        pytest.param(OBJECTS, '{"a": ', '[arguments={"a": ]', id="objects, a text cut off"),
        pytest.param(OBJECTS, "null", "[arguments=null]", id="objects, a text that is no object"),
        pytest.param(OBJECTS, None, "", id="objects, none"),
        pytest.param(TEXTS, {"a": 1}, '[{"a": 1}]', id="texts"),
        pytest.param(TEXTS, '{"a": ', '[{"a": ]', id="texts, a text cut off"),
        pytest.param(TEXTS, None, "[{}]", id="texts, none"),
        pytest.param(PYTHONS, {"a": 1}, '[{"a": 1}]', id="a template that would write Python"),
    ],
)
def test_arguments_that_are_no_object_have_the_form_that_the_template_needs(
    tokenizer: Any, template: str, arguments: Any, written: str
) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert render(tokenizer, template, messages) == f"<user>Hi<assistant>{written}"


def model_with(directory: Path, demo_model: Path, **files: str) -> Any:
    """The demo model's tokenizer without its chat template, and with other files."""
    shutil.copytree(demo_model, directory, ignore=lambda *_: ["chat_template.jinja"])
    for name, content in files.items():
        file = directory / name.replace("__", "/").replace("_json", ".json").replace(
            "_jinja", ".jinja"
        )
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
    return load_tokenizer(str(directory))


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"chat_template_jinja": "{{ messages[0].content }}"}, id="Jinja"),
        pytest.param({"chat_template_jinja": "\ufeff{{ messages[0].content }}"}, id="with a mark"),
        pytest.param(
            {"chat_template_json": '{"chat_template": "{{ messages[0].content }}"}'}, id="JSON"
        ),
        pytest.param(
            {"chat_template_json": '\ufeff{"chat_template": "{{ messages[0].content }}"}'},
            id="JSON with a mark",
        ),
        pytest.param(
            {
                "chat_template_json": '{"chat_template": [{"name": "default", "template": '
                '"{{ messages[0].content }}"}]}'
            },
            id="named ones in JSON",
        ),
    ],
)
def test_chat_templates_in_files_of_a_model(
    tmp_path: Path, demo_model: Path, files: dict[str, str]
) -> None:
    tokenizer = model_with(tmp_path / "model", demo_model, **files)
    assert render_chat(tokenizer, [USER]) == "Hi"


def test_additional_chat_templates_of_a_model(tmp_path: Path, demo_model: Path) -> None:
    tokenizer = model_with(
        tmp_path / "model",
        demo_model,
        chat_template_jinja="{{ messages[0].content }}",
        additional_chat_templates__tool_use_jinja="\ufefftools: {{ messages[0].content }}",
    )
    assert render_chat(tokenizer, [USER]) == "Hi"
    tool = {"type": "function", "function": {"name": "weather"}}
    assert render_chat(tokenizer, [USER], tools=[tool]) == "tools: Hi"


def test_a_chat_template_file_that_is_none(tmp_path: Path, demo_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"chat_template\.json is not a chat template"):
        model_with(tmp_path / "model", demo_model, chat_template_json='{"template": ""}')


def test_a_template_of_the_settings_or_of_a_file(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("\ufeff{{ messages[0].content }} ż", encoding="utf-8")
    for setting, prompt in ((PLAIN, "user: Hi\n"), (str(file), "Hi ż")):
        set_chat_template(tokenizer, setting)
        assert render_chat(tokenizer, [USER]) == prompt
    set_chat_template(tokenizer, "{{ raise_exception('not today') }}")
    for setting, why in (
        ("\n{% for m in messages %}", r"CHAT_TEMPLATE, line 2: .*endfor"),
        ("none.jinja", r"CHAT_TEMPLATE=none\.jinja cannot be read"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            set_chat_template(tokenizer, setting)


_AS_GPT_OSS = """{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.content and m.thinking -%}{{ raise_exception("content or thinking, not both") }}{%- endif -%}
<think>{{ m.content or m.thinking }}</think>{{ m.tool_calls[0].function.arguments | tojson }}
{%- else -%}<{{ m.role }}>{{ m.content }}{%- endif -%}
{%- endfor -%}"""
_AS_SOLAR = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning %}({{ m.reasoning }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "content", "thoughts"),
    [
        pytest.param(_AS_SOLAR, "I look.", "(I think.)I look.", id="reasoning"),
        pytest.param(
            _AS_SOLAR.replace("m.reasoning", "m.thought"),
            "I look.",
            "(I think.)I look.",
            id="thought",
        ),
        pytest.param(
            _AS_SOLAR.replace("m.reasoning", "m.thinking"),
            "I look.",
            "(I think.)I look.",
            id="thinking",
        ),
        pytest.param(_AS_GPT_OSS, "", "<think>I think.</think>", id="thinking of a call alone"),
        pytest.param(
            _AS_GPT_OSS,
            "I look.",
            "<think>I think.\n\nI look.</think>",
            id="thinking with no text beside it",
        ),
    ],
)
def test_thoughts_come_under_the_name_that_the_template_reads(
    tokenizer: Any, template: str, content: str, thoughts: str
) -> None:
    function = {"name": "look", "arguments": '{"at": "x"}'}
    turn = {
        "role": "assistant",
        "content": content,
        "reasoning_content": "I think.",
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": "abcdefgh1", "content": "Seen"}
    prompt = render(tokenizer, template, [USER, turn, result])
    assert f'{thoughts}{{"at": "x"}}' in prompt
    assert prompt.count("I think.") == 1
    assert turn["content"] == content
