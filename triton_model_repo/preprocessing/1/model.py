"""Text to token ids, with the tokenizer of the model that answers."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.engines.base import engine_parameters
from cog_triton.tokenizer import load_tokenizer, without_torch
from cog_triton.triton.preprocessing import Preprocessor


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        without_torch()
        parameters = engine_parameters(json.loads(args["model_config"]))
        self._preprocessor = Preprocessor(
            load_tokenizer(parameters["tokenizer_dir"]),
            add_special_tokens=parameters.get("add_special_tokens", "true") == "true",
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            outputs = self._preprocessor(inputs)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in outputs.items()])
