"""What clients ask, what the engine makes of it, and what the clients get: the answers and their events.

An id ends with the number of those that were drawn for the request; the prompt has 3 tokens, to the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cog_triton.generation import Chunk
from cog_triton.protocol.log_probs import TokenLogProb
from tests.unit.api.openai.support import ANTHROPIC, CHAT, RESPONSES, TEXT

Json = dict[str, Any]


@dataclass(frozen=True)
class AnswerCase:
    """A request, the chunks of the engine, the answer, and its events where they are tested too."""

    name: str
    path: str
    chunks: Sequence[Chunk]
    answer: Json
    fields: Json = field(default_factory=dict)
    stream_fields: Json = field(default_factory=dict)  # of a request for a stream, beside those
    events: Sequence[Json] | None = None


def chunk(text: str, output_tokens: int, **fields: Any) -> Chunk:
    return Chunk(text, output_tokens, input_tokens=3, **fields)


THOUGHTS_TEXT_AND_CALL = [
    chunk("<think>Let me", 2),
    chunk(" see</think>\n\n", 4),
    chunk("Well.", 5),
    chunk('\n<tool_call>{"name": "f", "arguments": {"a"', 9),
    chunk(": 1}}</tool_call>", 12),
    chunk("", 13, finish_reason="stop"),
]

WITH_IDS = [
    chunk("a", 1, ids=(97,)),
    chunk("b", 2, ids=(98,)),
    chunk("", 3, ids=(0,), finish_reason="stop", stop_token=0),
]

# Those of thoughts are left out of a response; the text of the last but one comes late.
WITH_LOG_PROBS = [
    chunk("<think>x</think>", 1, log_probs=(TokenLogProb(120, -0.1),)),
    chunk("a", 2, log_probs=(TokenLogProb(97, -0.5, top=((97, -0.5), (98, -1.5))),)),
    chunk("", 3, log_probs=(TokenLogProb(98, -2.0),)),
    chunk("b", 3, finish_reason="length"),
]

WITH_PROMPT = [
    chunk(
        "a",
        1,
        log_probs=(TokenLogProb(97, -3.0, top=((98, -0.25),)),),
        prompt_log_probs=(
            TokenLogProb(0, 0.0),
            TokenLogProb(97, -0.5, top=((97, -0.5), (98, -1.5))),
            TokenLogProb(98, -2.0),
        ),
    ),
    chunk("", 1, finish_reason="length"),
]


# Chats and texts


def usage(completion_tokens: int) -> Json:
    return {
        "prompt_tokens": 3,
        "completion_tokens": completion_tokens,
        "total_tokens": 3 + completion_tokens,
    }


def chat_answer(*choices: Json, **fields: Any) -> Json:
    return {
        "id": "chatcmpl-2",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": None,
        "choices": list(choices),
        **fields,
    }


def chat_event(*choices: Json, **fields: Any) -> Json:
    return chat_answer(*choices, object="chat.completion.chunk", **fields)


def text_answer(*choices: Json, **fields: Any) -> Json:
    """The answer, or one of its events."""
    return chat_answer(*choices, id="cmpl-2", object="text_completion", **fields)


def choice(**fields: Any) -> Json:
    return {"index": 0, "logprobs": None, "finish_reason": None, **fields}


def chat_message(content: str, **fields: Any) -> Json:
    return {"role": "assistant", "content": content, "refusal": None, "annotations": [], **fields}


# Log probabilities of the tokens of WITH_LOG_PROBS.
TOKEN_X = {"token": "x", "logprob": -0.1, "bytes": [120], "top_logprobs": []}
TOKEN_A = {
    "token": "a",
    "logprob": -0.5,
    "bytes": [97],
    "top_logprobs": [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "b", "logprob": -1.5, "bytes": [98]},
    ],
}
TOKEN_B = {"token": "b", "logprob": -2.0, "bytes": [98], "top_logprobs": []}


# Responses


RESPONSE_TOOL = {
    "type": "function",
    "name": "f",
    "description": None,
    "parameters": {"type": "object"},
    "strict": None,
}


def response(**fields: Any) -> Json:
    unset = (
        "error",
        "incomplete_details",
        "max_tool_calls",
        "previous_response_id",
        "instructions",
        "max_output_tokens",
        "user",
    )
    return {
        **dict.fromkeys(unset),
        "object": "response",
        "status": "completed",
        "service_tier": "default",
        "truncation": "disabled",
        "background": False,
        "store": False,
        "model": "m",
        "id": "resp_2",
        "created_at": 1,
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "metadata": {},
        **fields,
    }


def response_usage(output_tokens: int, *, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": 3 + output_tokens,
    }


def reasoning_item(identifier: str, text: str) -> Json:
    return {
        "id": identifier,
        "status": "completed",
        "type": "reasoning",
        "summary": [],
        "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": text}],
    }


def message_item(
    identifier: str, text: str, *, logprobs: Sequence[Json] = (), status: str = "completed"
) -> Json:
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {
        "id": identifier,
        "status": status,
        "type": "message",
        "role": "assistant",
        "content": [content],
    }


def call_item(identifier: str, *, call_id: str) -> Json:
    return {
        "id": identifier,
        "status": "completed",
        "type": "function_call",
        "arguments": '{"a": 1}',
        "call_id": call_id,
        "name": "f",
    }


# Messages


def message(**fields: Any) -> Json:
    return {
        "type": "message",
        "role": "assistant",
        "stop_reason": None,
        "stop_sequence": None,
        "id": "msg_2",
        "model": "m",
        **fields,
    }


def message_usage(output_tokens: int) -> Json:
    return {
        "input_tokens": 3,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


CASES = [
    AnswerCase(
        name="a chat, of which a chunk without text is no event",
        path=CHAT,
        stream_fields={"stream_options": {"include_usage": True}},
        chunks=[chunk("", 1), chunk("b", 2, finish_reason="length")],
        answer=chat_answer(
            choice(finish_reason="length", message=chat_message("b")), usage=usage(2)
        ),
        events=[
            chat_event(
                choice(delta={"role": "assistant", "content": "", "refusal": None}), usage=None
            ),
            chat_event(choice(delta={"content": "b"}), usage=None),
            chat_event(choice(finish_reason="length", delta={}), usage=None),
            chat_event(usage=usage(2)),
        ],
    ),
    AnswerCase(
        name="a chat that thinks and calls",
        path=CHAT,
        fields={"tools": [{"type": "function", "function": {"name": "f"}}]},
        chunks=THOUGHTS_TEXT_AND_CALL,
        answer=chat_answer(
            choice(
                finish_reason="tool_calls",
                message=chat_message(
                    "Well.",
                    reasoning_content="Let me see",
                    tool_calls=[
                        {
                            "id": "call_4",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"a": 1}'},
                        }
                    ],
                ),
            ),
            usage=usage(13),
        ),
        events=[
            chat_event(choice(delta={"role": "assistant", "content": "", "refusal": None})),
            chat_event(choice(delta={"reasoning_content": "Let me"})),
            chat_event(choice(delta={"reasoning_content": " see"})),
            chat_event(choice(delta={"content": "Well."})),
            chat_event(
                choice(
                    delta={
                        "tool_calls": [
                            {
                                "index": 0,
                                "id": "call_4",
                                "type": "function",
                                "function": {"name": "f", "arguments": ""},
                            }
                        ]
                    }
                )
            ),
            chat_event(
                choice(delta={"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]})
            ),
            chat_event(
                choice(delta={"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]})
            ),
            chat_event(choice(finish_reason="tool_calls", delta={})),
        ],
    ),
    AnswerCase(
        name="a chat whose calls are not read",
        path=CHAT,
        fields={"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        chunks=THOUGHTS_TEXT_AND_CALL,
        answer=chat_answer(
            choice(
                finish_reason="stop",
                message=chat_message(
                    ('Well.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
                    reasoning_content="Let me see",
                ),
            ),
            usage=usage(13),
        ),
    ),
    AnswerCase(
        name="a response that thinks and calls",
        path=RESPONSES,
        fields={
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "metadata": {"a": "b"},
            # Of no effect:
            "store": False,
            "previous_response_id": None,
            "reasoning": None,
            "truncation": "disabled",
            "service_tier": "auto",
        },
        chunks=THOUGHTS_TEXT_AND_CALL,
        answer=response(
            tools=[RESPONSE_TOOL],
            metadata={"a": "b"},
            usage=response_usage(13, reasoning_tokens=10),
            output=[
                reasoning_item("rs_5", "Let me see"),
                message_item("msg_6", "Well."),
                call_item("fc_7", call_id="call_4"),
            ],
        ),
        events=[
            {
                "type": "response.created",
                "response": response(
                    status="in_progress",
                    tools=[RESPONSE_TOOL],
                    metadata={"a": "b"},
                    usage=None,
                    output=[],
                ),
            },
            {
                "type": "response.in_progress",
                "response": response(
                    status="in_progress",
                    tools=[RESPONSE_TOOL],
                    metadata={"a": "b"},
                    usage=None,
                    output=[],
                ),
            },
            {
                "type": "response.output_item.added",
                "output_index": 0,
                "item": {
                    "id": "rs_4",
                    "status": "in_progress",
                    "type": "reasoning",
                    "summary": [],
                    "encrypted_content": None,
                    "content": [],
                },
            },
            {
                "type": "response.content_part.added",
                "item_id": "rs_4",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "reasoning_text", "text": ""},
            },
            {
                "type": "response.reasoning_text.delta",
                "item_id": "rs_4",
                "output_index": 0,
                "content_index": 0,
                "delta": "Let me",
            },
            {
                "type": "response.reasoning_text.delta",
                "item_id": "rs_4",
                "output_index": 0,
                "content_index": 0,
                "delta": " see",
            },
            {
                "type": "response.reasoning_text.done",
                "item_id": "rs_4",
                "output_index": 0,
                "content_index": 0,
                "text": "Let me see",
            },
            {
                "type": "response.content_part.done",
                "item_id": "rs_4",
                "output_index": 0,
                "content_index": 0,
                "part": {"type": "reasoning_text", "text": "Let me see"},
            },
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": reasoning_item("rs_4", "Let me see"),
            },
            {
                "type": "response.output_item.added",
                "output_index": 1,
                "item": {
                    "id": "msg_5",
                    "status": "in_progress",
                    "type": "message",
                    "role": "assistant",
                    "content": [],
                },
            },
            {
                "type": "response.content_part.added",
                "item_id": "msg_5",
                "output_index": 1,
                "content_index": 0,
                "part": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_text.delta",
                "item_id": "msg_5",
                "output_index": 1,
                "content_index": 0,
                "delta": "Well.",
                "logprobs": [],
            },
            {
                "type": "response.output_text.done",
                "item_id": "msg_5",
                "output_index": 1,
                "content_index": 0,
                "text": "Well.",
                "logprobs": [],
            },
            {
                "type": "response.content_part.done",
                "item_id": "msg_5",
                "output_index": 1,
                "content_index": 0,
                "part": {"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []},
            },
            {
                "type": "response.output_item.done",
                "output_index": 1,
                "item": message_item("msg_5", "Well."),
            },
            {
                "type": "response.output_item.added",
                "output_index": 2,
                "item": {
                    "id": "fc_7",
                    "status": "in_progress",
                    "type": "function_call",
                    "arguments": "",
                    "call_id": "call_6",
                    "name": "f",
                },
            },
            {
                "type": "response.function_call_arguments.delta",
                "item_id": "fc_7",
                "output_index": 2,
                "delta": '{"a"',
            },
            {
                "type": "response.function_call_arguments.delta",
                "item_id": "fc_7",
                "output_index": 2,
                "delta": ": 1}",
            },
            {
                "type": "response.function_call_arguments.done",
                "item_id": "fc_7",
                "output_index": 2,
                "arguments": '{"a": 1}',
                "name": "f",
            },
            {
                "type": "response.output_item.done",
                "output_index": 2,
                "item": call_item("fc_7", call_id="call_6"),
            },
            {
                "type": "response.completed",
                "response": response(
                    tools=[RESPONSE_TOOL],
                    metadata={"a": "b"},
                    usage=response_usage(13, reasoning_tokens=10),
                    output=[
                        reasoning_item("rs_4", "Let me see"),
                        message_item("msg_5", "Well."),
                        call_item("fc_7", call_id="call_6"),
                    ],
                ),
            },
        ],
    ),
    AnswerCase(
        name="a message that thinks and calls",
        path=ANTHROPIC,
        fields={
            "tools": [{"name": "f", "description": "does", "input_schema": {"type": "object"}}]
        },
        chunks=THOUGHTS_TEXT_AND_CALL,
        answer=message(
            stop_reason="tool_use",
            usage=message_usage(13),
            content=[
                {
                    "type": "thinking",
                    "thinking": "Let me see",
                    "signature": "108a88b6805581773b48a36a08e22206",
                },
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "input": {"a": 1}, "id": "toolu_4", "name": "f"},
            ],
        ),
        events=[
            {"type": "message_start", "message": message(usage=message_usage(2), content=[])},
            {"type": "ping"},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "thinking", "thinking": "", "signature": ""},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "thinking_delta", "thinking": "Let me"},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "thinking_delta", "thinking": " see"},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {
                    "type": "signature_delta",
                    "signature": "108a88b6805581773b48a36a08e22206",
                },
            },
            {"type": "content_block_stop", "index": 0},
            {
                "type": "content_block_start",
                "index": 1,
                "content_block": {"type": "text", "text": ""},
            },
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "text_delta", "text": "Well."},
            },
            {"type": "content_block_stop", "index": 1},
            {
                "type": "content_block_start",
                "index": 2,
                "content_block": {"type": "tool_use", "input": {}, "id": "toolu_4", "name": "f"},
            },
            {
                "type": "content_block_delta",
                "index": 2,
                "delta": {"type": "input_json_delta", "partial_json": '{"a"'},
            },
            {
                "type": "content_block_delta",
                "index": 2,
                "delta": {"type": "input_json_delta", "partial_json": ": 1}"},
            },
            {"type": "content_block_stop", "index": 2},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "tool_use", "stop_sequence": None},
                "usage": message_usage(13),
            },
            {"type": "message_stop"},
        ],
    ),
    AnswerCase(
        name="a chat with token ids",
        path=CHAT,
        fields={"return_token_ids": True, "stop_token_ids": [0]},
        stream_fields={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        chunks=WITH_IDS,
        answer=chat_answer(
            choice(
                finish_reason="stop",
                message=chat_message("ab"),
                token_ids=[97, 98, 0],
                stop_reason=0,
            ),
            usage=usage(3),
            prompt_token_ids=[60, 117, 115, 101, 114, 62, 72, 101, 108, 108, 111],
        ),
        events=[
            chat_event(
                choice(delta={"role": "assistant", "content": "", "refusal": None}),
                prompt_token_ids=[60, 117, 115, 101, 114, 62, 72, 101, 108, 108, 111],
                usage=usage(0),
            ),
            chat_event(choice(delta={"content": "a"}, token_ids=[97]), usage=usage(1)),
            chat_event(choice(delta={"content": "b"}, token_ids=[98]), usage=usage(2)),
            chat_event(choice(delta={"content": ""}, token_ids=[0]), usage=usage(3)),
            chat_event(choice(finish_reason="stop", delta={}, stop_reason=0), usage=usage(3)),
            chat_event(usage=usage(3)),
        ],
    ),
    AnswerCase(
        name="a text with token ids",
        path=TEXT,
        fields={"return_token_ids": True, "stop_token_ids": [0]},
        stream_fields={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        chunks=WITH_IDS,
        answer=text_answer(
            choice(
                finish_reason="stop",
                text="ab",
                stop_reason=0,
                token_ids=[97, 98, 0],
                prompt_token_ids=[0, 120, 121],
            ),
            usage=usage(3),
        ),
        events=[
            text_answer(
                choice(text="a", token_ids=[97], prompt_token_ids=[0, 120, 121]), usage=usage(1)
            ),
            text_answer(choice(text="b", token_ids=[98]), usage=usage(2)),
            text_answer(
                choice(finish_reason="stop", text="", stop_reason=0, token_ids=[0]), usage=usage(3)
            ),
            text_answer(usage=usage(3)),
        ],
    ),
    AnswerCase(
        name="a chat with log probabilities",
        path=CHAT,
        fields={"logprobs": True, "top_logprobs": 2},
        chunks=WITH_LOG_PROBS,
        answer=chat_answer(
            choice(
                message=chat_message("ab", reasoning_content="x"),
                logprobs={"content": [TOKEN_X, TOKEN_A, TOKEN_B], "refusal": None},
                finish_reason="length",
            ),
            usage=usage(3),
        ),
        events=[
            chat_event(choice(delta={"role": "assistant", "content": "", "refusal": None})),
            chat_event(
                choice(
                    logprobs={"content": [TOKEN_X], "refusal": None},
                    delta={"reasoning_content": "x"},
                )
            ),
            chat_event(
                choice(logprobs={"content": [TOKEN_A], "refusal": None}, delta={"content": "a"})
            ),
            chat_event(
                choice(logprobs={"content": [TOKEN_B], "refusal": None}, delta={"content": ""})
            ),
            chat_event(choice(delta={"content": "b"})),
            chat_event(choice(finish_reason="length", delta={})),
        ],
    ),
    AnswerCase(
        name="a text with log probabilities",
        path=TEXT,
        fields={"logprobs": 2},
        chunks=WITH_LOG_PROBS,
        answer=text_answer(
            choice(
                text="<think>x</think>ab",
                logprobs={
                    "tokens": ["x", "a", "b"],
                    "token_logprobs": [-0.1, -0.5, -2.0],
                    "top_logprobs": [{"x": -0.1}, {"a": -0.5, "b": -1.5}, {"b": -2.0}],
                    "text_offset": [0, 1, 2],
                },
                finish_reason="length",
            ),
            usage=usage(3),
        ),
    ),
    AnswerCase(
        name="a response with log probabilities, which is cut",
        path=RESPONSES,
        fields={"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        chunks=WITH_LOG_PROBS,
        answer=response(
            status="incomplete",
            incomplete_details={"reason": "max_output_tokens"},
            top_logprobs=2,
            usage=response_usage(3, reasoning_tokens=1),
            output=[
                reasoning_item("rs_4", "x"),
                message_item("msg_5", "ab", logprobs=[TOKEN_A, TOKEN_B], status="incomplete"),
            ],
        ),
    ),
    AnswerCase(
        name="a chat with the prompt's log probabilities",
        path=CHAT,
        fields={"prompt_logprobs": 0},
        chunks=WITH_PROMPT,
        answer=chat_answer(
            choice(finish_reason="length", message=chat_message("a")),
            usage=usage(1),
            prompt_logprobs=[
                None,
                {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
                {"98": {"logprob": -2.0, "rank": None, "decoded_token": "b"}},
            ],
        ),
    ),
    AnswerCase(
        name="a chat with the prompt's log probabilities and its own",
        path=CHAT,
        fields={"prompt_logprobs": 2, "logprobs": True, "top_logprobs": 0},
        chunks=WITH_PROMPT,
        answer=chat_answer(
            choice(
                message=chat_message("a"),
                logprobs={
                    "content": [{"token": "a", "logprob": -3.0, "bytes": [97], "top_logprobs": []}],
                    "refusal": None,
                },
                finish_reason="length",
            ),
            usage=usage(1),
            prompt_logprobs=[
                None,
                {
                    "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
                    "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
                },
                {"98": {"logprob": -2.0, "rank": None, "decoded_token": "b"}},
            ],
        ),
    ),
    AnswerCase(
        name="a text with the prompt's log probabilities",
        path=TEXT,
        fields={"prompt_logprobs": 0},
        chunks=WITH_PROMPT,
        answer=text_answer(
            choice(
                finish_reason="length",
                text="a",
                prompt_logprobs=[
                    None,
                    {"97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}},
                    {"98": {"logprob": -2.0, "rank": None, "decoded_token": "b"}},
                ],
            ),
            usage=usage(1),
        ),
    ),
    AnswerCase(
        name="a message that ends by itself",
        path=ANTHROPIC,
        chunks=[chunk("a", 2, finish_reason="stop")],
        answer=message(
            stop_reason="end_turn", usage=message_usage(2), content=[{"type": "text", "text": "a"}]
        ),
    ),
    AnswerCase(
        name="a message that is cut",
        path=ANTHROPIC,
        chunks=[chunk("a", 2, finish_reason="length")],
        answer=message(
            stop_reason="max_tokens",
            usage=message_usage(2),
            content=[{"type": "text", "text": "a"}],
        ),
    ),
    AnswerCase(
        name="a message that a stop sequence ends",
        path=ANTHROPIC,
        chunks=[chunk("a", 2, finish_reason="stop", stop_sequence="x")],
        answer=message(
            stop_reason="stop_sequence",
            stop_sequence="x",
            usage=message_usage(2),
            content=[{"type": "text", "text": "a"}],
        ),
        events=[
            {"type": "message_start", "message": message(usage=message_usage(2), content=[])},
            {"type": "ping"},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": "a"},
            },
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "stop_sequence", "stop_sequence": "x"},
                "usage": message_usage(2),
            },
            {"type": "message_stop"},
        ],
    ),
]
