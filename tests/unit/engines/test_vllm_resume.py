"""How answers are resumed in vLLM, on stand-ins of its classes; test_vllm_engine.py has vLLM itself."""

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cog_triton.engines import vllm_resume


def request(ids: list[int], delivered: list[int]) -> Any:
    return SimpleNamespace(
        request_id="7",
        sampling_params=SimpleNamespace(extra_args={"cog_triton_delivered": delivered}),
        prompt_token_ids=list(ids),
        num_prompt_tokens=len(ids),
        _output_token_ids=[],
        output_token_ids=[],
        prefill_stats="some",
        generator=None,
    )


class Request:
    @classmethod
    def from_engine_core_request(cls, core_request: Any, _: Any) -> Any:
        return core_request


class StructuredOutputManager:
    def _create_grammar(self, _request: Any) -> Any:
        return SimpleNamespace(accept_tokens=lambda _, ids: ids != [99])


class InputBatch:
    def add_request(self, added: Any) -> Any:
        return added.output_token_ids


MODULES: dict[str, dict[str, type]] = {
    "vllm.v1.request": {"Request": Request},
    "vllm.v1.structured_output": {"StructuredOutputManager": StructuredOutputManager},
    "vllm.v1.worker.gpu_input_batch": {"InputBatch": InputBatch},
    "vllm.v1.sample.ops.topk_topp_sampler": {"TopKTopPSampler": object},
}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of vLLM with fresh subclasses, which a test may change."""
    for name, classes in MODULES.items():
        module = ModuleType(name)
        for class_name, kind in classes.items():
            setattr(module, class_name, type(class_name, (kind,), {}))
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[0]))
        monkeypatch.setitem(sys.modules, name, module)


def found(module: str, name: str) -> Any:
    return getattr(sys.modules[module], name)


@pytest.mark.usefixtures("vllm")
def test_delivered_ids_are_output_in_every_process_that_gets_the_configuration() -> None:
    assert vllm_resume.problem() == ""
    pickle.loads(pickle.dumps(vllm_resume.Resuming()))
    vllm_resume.install()  # a second time, which changes nothing

    make = found("vllm.v1.request", "Request").from_engine_core_request
    made = make(request([1, 2, 3, 4], delivered=[3, 4]), None)
    assert (made.prompt_token_ids, made.num_prompt_tokens) == ([1, 2], 2)
    assert made._output_token_ids == [3, 4]
    assert make(request([1, 2], delivered=[]), None).prompt_token_ids == [1, 2]

    manager = found("vllm.v1.structured_output", "StructuredOutputManager")()
    manager._create_grammar(request([1], delivered=[3]))
    with pytest.raises(ValueError, match="does not allow the output that is continued"):
        manager._create_grammar(request([1], delivered=[99]))

    batch = found("vllm.v1.worker.gpu_input_batch", "InputBatch")()
    assert batch.add_request(request([1], delivered=[3, 4])) == [3, 4]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("module", "owner", "method"),
    [
        ("vllm.v1.request", "Request", "from_engine_core_request"),
        ("vllm.v1.structured_output", "StructuredOutputManager", "_create_grammar"),
        ("vllm.v1.worker.gpu_input_batch", "InputBatch", "add_request"),
    ],
)
@pytest.mark.parametrize("change", ["the class is gone", "the method is gone", "other arguments"])
def test_a_release_with_other_internals_is_noticed_at_the_start(
    module: str, owner: str, method: str, change: str
) -> None:
    if change == "the class is gone":
        delattr(sys.modules[module], owner)
    elif change == "the method is gone":
        setattr(sys.modules[module], owner, object)
    else:
        setattr(found(module, owner), method, lambda: None)
        if method == "from_engine_core_request":
            assert not vllm_resume.problem()  # it is called with whatever it gets
            return
    assert vllm_resume.problem()
