"""Text to token ids, with the tokenizer of the model that answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.models import stub
from cog_triton.models.preprocessing import Preprocessor, asked
from cog_triton.processes import end_with_parent
from cog_triton.text.tokenizer import load_tokenizer, without_torch

LONG_BYTES = 20_000  # about ten milliseconds; what is longer keeps nobody waiting


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        without_torch()
        parameters = stub.parameters(json.loads(args["model_config"]))
        context_length = parameters.get("max_seq_len")
        self._preprocessor = Preprocessor(
            load_tokenizer(
                parameters["tokenizer_dir"],
                trust_remote_code=parameters.get("trust_remote_code") == "true",
            ),
            add_special_tokens=parameters.get("add_special_tokens", "true") == "true",
            words_after_space=parameters.get("words_after_space", "true") == "true",
            context_length=None if context_length is None else int(context_length),
        )
        # Tokenizers let other threads run meanwhile.
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")

    def execute(self, requests: list[Any]) -> list[Any]:
        """The responses of a batch in one message, which costs less than a message each.

        None stands for a long prompt's, which is sent when it is ready.
        """
        return [self._response_now(request) for request in requests]

    def finalize(self) -> None:
        self._long.shutdown()
        stub.forget_requests()

    def _response_now(self, request: Any) -> Any:
        inputs = stub.arrays(request.inputs())
        if text_bytes(inputs) <= LONG_BYTES:
            return self._response(request, inputs)
        self._long.submit(self._send, request, inputs)
        return None

    def _send(self, request: Any, inputs: dict[str, stub.Array]) -> None:
        request.get_response_sender().send(
            self._response(request, inputs), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        )

    def _response(self, request: Any, inputs: dict[str, stub.Array]) -> Any:
        try:
            outputs = self._preprocessor(inputs, asked(stub.parameters_text(request)))
        except ValueError as error:
            return stub.refusal(pb_utils, str(error))
        except Exception as error:  # unanswered, the request would wait for good
            return stub.failure(pb_utils, "preprocessing", error)
        return stub.response(pb_utils, outputs, request.requested_output_names())


def text_bytes(inputs: dict[str, stub.Array]) -> int:
    """Return the number of bytes to tokenize."""
    return sum(
        len(text) for array in inputs.values() if array.dtype == object for text in array.flat
    )
