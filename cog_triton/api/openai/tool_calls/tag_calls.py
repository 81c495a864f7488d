"""Calls in tags: the name of the tool and its arguments stand in or between XML-like tags."""

import re
from typing import Any

from cog_triton.api.openai.tool_calls.argument_values import (
    properties_of,
    typed_call,
    typed_value,
    types_of,
    unwrapped,
)
from cog_triton.api.openai.tool_calls.json_calls import call_of_object_text
from cog_triton.api.openai.tool_calls.written_call import NAME, Schemas, WrittenCall, dumps

# --- The name of the function, and of each argument, in a tag

# A closing tag counts where another tag or the end follows: values may be code that has tags in it.
_FUNCTION = re.compile(
    rf"<function(?:=|\s+name=)[\"']?({NAME})[\"']?\s*>(.*?)"
    r"(?:</function>(?=\s*(?:<function|\Z))|\Z)",
    re.DOTALL,
)
_PARAMETER = re.compile(
    r"<param(?:eter)?(?:=|\s+name=)[\"']?([^>\s\"']+)[\"']?\s*>(.*?)"
    r"(?:</param(?:eter)?>(?=\s*(?:<param|</function>|\Z))|(?=\n<parameter=)|\Z)",
    re.DOTALL,
)
_CHARACTER_DATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*(?:</function>\s*)?")


def function_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of Qwen3-Coder and MiniCPM5; a call may also have a JSON object in it.

    <function=weather><parameter=city>Paris</parameter></function>
    <function name="weather"><param name="city"><![CDATA[Paris]]></param></function>
    """
    calls = []
    for name, body in _FUNCTION.findall(text):
        if body.strip().startswith("{"):
            call = call_of_object_text(name, body)
            if call is None:
                return None
            calls.append(call)
            continue
        if not _FUNCTION_END.fullmatch(_PARAMETER.sub("", body)):
            return None
        texts = {key: _argument_text(value) for key, value in _PARAMETER.findall(body)}
        calls.append(typed_call(name, texts, schemas))
    if _FUNCTION.sub("", text).strip():
        return None
    return calls or None


def _argument_text(value: str) -> str:
    """Return a value without the marks and line breaks around it."""
    quoted = _CHARACTER_DATA.fullmatch(value)
    return quoted[1] if quoted else unwrapped(value)


_INVOKE = re.compile(
    rf'<(｜DSML｜|\w+:|)invoke name="({NAME})"\s*>(.*?)'
    r"(?:</\1invoke>(?=\s*(?:<|\Z))|\Z)",
    re.DOTALL,
)
_NAMED_PARAMETER = re.compile(
    r'<(｜DSML｜|\w+:|)parameter name="([^"]+)"(?: string="(true|false)")?\s*>'
    r"(.*?)(?:</\1parameter>(?=\s*(?:<|\Z))|\Z)",
    re.DOTALL,
)


def invoke_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of MiniMax M2, DeepSeek V3.2 and Step 3; those of the last two have a prefix.

    <invoke name="weather"><parameter name="city">Paris</parameter></invoke>
    <｜DSML｜invoke name="weather"><｜DSML｜parameter name="city">Paris</｜DSML｜parameter>…
    <steptml:invoke name="weather"><steptml:parameter name="city">Paris</steptml:parameter>…
    """
    calls = []
    for _, name, body in _INVOKE.findall(text):
        properties = properties_of(name, schemas)
        values: dict[str, Any] = {}
        for _, key, is_string, value in _NAMED_PARAMETER.findall(body):
            schema = properties.get(key)
            if is_string == "true" and not types_of(schema):
                schema = {"type": "string"}
            values[key] = typed_value(unwrapped(value), schema)
        calls.append(WrittenCall(name, dumps(values)))
    return calls or None


_MINIMAX = re.escape("]<]minimax[>[")
_MINIMAX_INVOKE = re.compile(
    rf'{_MINIMAX}<invoke name="({NAME})">(.*?){_MINIMAX}</invoke>', re.DOTALL
)
_MINIMAX_ARGUMENT = re.compile(rf"{_MINIMAX}<([\w.-]+)>(.*?){_MINIMAX}</\1>", re.DOTALL)


def minimax_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of MiniMax M3, whose tags each have a mark before them.

    ]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>…
    """
    calls = [
        typed_call(name, dict(_MINIMAX_ARGUMENT.findall(body)), schemas)
        for name, body in _MINIMAX_INVOKE.findall(text)
    ]
    return calls or None


# --- A tag around the name of each argument, and one around its value

_ARGUMENT = re.compile(
    r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)(?:</arg_value>(?=\s*(?:<arg_key>|\Z))|\Z)",
    re.DOTALL,
)
_ARGUMENTS_CALL = re.compile(rf"\s*({NAME})\s*((?:<arg_key>.*)?)\Z", re.DOTALL)


def argument_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read a call of GLM 4.5; one without arguments is the name of a tool.

    weather<arg_key>city</arg_key><arg_value>Paris</arg_value>
    """
    match = _ARGUMENTS_CALL.match(text)
    if match is None or (not match[2] and match[1] not in schemas):
        return None
    if _ARGUMENT.sub("", match[2]).strip():
        return None
    return [typed_call(match[1], dict(_ARGUMENT.findall(match[2])), schemas)]


_TAG_NAME = re.compile(r"(</?(?:tool_call|tool_sep|arg_key|arg_value)):\w+>")
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)<tool_sep>(.*?)</tool_call>", re.DOTALL)


def named_tag_calls(text: str, schemas: Schemas) -> list[WrittenCall] | None:
    """Read the calls of Hunyuan 3, whose tags each have a suffix.

    <tool_call:opensource>weather<tool_sep:opensource><arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Paris</arg_value:opensource></tool_call:opensource>
    """
    calls = []
    for name, arguments in _TAGGED_CALL.findall(_TAG_NAME.sub(r"\1>", text)):
        is_name = re.fullmatch(NAME, name.strip()) is not None
        if not is_name or _ARGUMENT.sub("", arguments).strip():
            return None
        calls.append(typed_call(name.strip(), dict(_ARGUMENT.findall(arguments)), schemas))
    return calls or None
