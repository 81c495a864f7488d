"""The context of a model by its config.json."""

from typing import Any

import pytest

from cog_triton.engines.model_config import context_length, position_limit

YARN = {"rope_type": "yarn", "factor": 4.0}


def scaled(length: int, **rope: Any) -> dict[str, Any]:
    return {"max_position_embeddings": length, "rope_parameters": rope}


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"n_positions": 1024}, 1024, id="gpt2"),
        pytest.param({"max_position_embeddings": 2048}, 2048, id="plain"),
        pytest.param({"text_config": {"max_position_embeddings": 64}}, 64, id="text part"),
        pytest.param(scaled(2048, rope_type="default"), 2048, id="default"),
        pytest.param(scaled(2048, rope_type="linear", factor=2), 4096, id="linear"),
        pytest.param(scaled(2048, rope_type="dynamic", factor=2.5), 5120, id="dynamic"),
        pytest.param(
            scaled(40960, **YARN, original_max_position_embeddings=32768), 131072, id="yarn"
        ),
        pytest.param(
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
            id="yarn, the form of transformers 4",
        ),
        pytest.param(scaled(128, **YARN), 512, id="yarn without the original length"),
        pytest.param(
            scaled(163840, rope_type="yarn", factor=40, original_max_position_embeddings=4096),
            163840,
            id="yarn, already stretched",
        ),
        pytest.param(
            scaled(131072, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192),
            131072,
            id="llama3",
        ),
        pytest.param(
            scaled(131072, rope_type="longrope", factor=32, original_max_position_embeddings=4096),
            131072,
            id="longrope",
        ),
        pytest.param(
            scaled(131072, full_attention={"rope_type": "linear", "factor": 8.0}),
            131072,
            id="by kinds of layers, as Gemma 3",
        ),
    ],
)
def test_the_positions_of_a_model(config: dict[str, Any], limit: int | None) -> None:
    assert position_limit(config) == limit
    assert context_length(config, None, default=7) == (limit or 7)
    if limit is not None:
        assert context_length(config, limit, default=7) == limit
        with pytest.raises(ValueError, match=f"MAX_SEQUENCE_LENGTH={limit + 1} .*{limit} tokens"):
            context_length(config, limit + 1, default=7)


def test_a_length_is_honoured_where_the_model_names_none() -> None:
    assert context_length({}, 8192, default=2048) == 8192
