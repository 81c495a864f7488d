"""Token ids to text, one response at a time."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from cog_triton.models import stub
from cog_triton.models.postprocessing import Postprocessor
from cog_triton.processes import end_with_parent
from cog_triton.text.tokenizer import load_tokenizer, without_torch


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        end_with_parent()
        without_torch()
        parameters = stub.parameters(json.loads(args["model_config"]))
        self._postprocessor = Postprocessor(
            load_tokenizer(
                parameters["tokenizer_dir"],
                trust_remote_code=parameters.get("trust_remote_code") == "true",
            ),
            skip_special_tokens=parameters.get("skip_special_tokens", "true") == "true",
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        inputs = stub.arrays(request.inputs())
        try:
            text = self._postprocessor(inputs)
        except ValueError as error:
            return stub.refusal(pb_utils, str(error))
        except Exception as error:
            return stub.failure(pb_utils, "postprocessing", error)
        passed_on = {f"OUT_{name}": value for name, value in inputs.items()}
        return stub.response(
            pb_utils, {"OUTPUT": text, **passed_on}, request.requested_output_names()
        )
