"""DSPy's modules, by LiteLLM."""

from typing import Any

import common
import dspy


def language_model() -> dspy.LM:
    return dspy.LM(
        f"openai/{common.MODEL}",
        api_base=common.OPENAI_URL,
        api_key=common.KEY,
        cache=False,
        num_retries=0,
    )


class Ask(dspy.Signature):
    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    degrees: int = dspy.OutputField()


def structured(_: str) -> dict[str, Any]:
    with dspy.context(lm=language_model(), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Ask)(question=common.QUESTION)
    return {"parsed": {"city": found.city, "degrees": found.degrees}}


common.serve(["chat"], {"structured": structured})
