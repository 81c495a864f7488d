"""Schemathesis checks that a real server keeps to the schema of OpenAI's API."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.openai_server import OpenAIServer

pytestmark = [
    pytest.mark.rare,
    pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis needs Python 3.11"),
]

EXAMPLES = 12
"""Of each operation."""
LEFT_OUT = ("/v1/embeddings",)  # 404 by design


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    """With the simulated engine."""
    log = tmp_path_factory.mktemp("schema") / "log"
    environment = {"MODEL": str(demo_model), "ENGINE": "simulated", "MAX_SEQUENCE_LENGTH": "64"}
    with OpenAIServer(environment, log) as server:
        yield server
    assert "Traceback" not in log.read_text()


def check(server: OpenAIServer, operation: Any) -> None:
    """Sends what the schema allows to one operation, and looks at what comes back."""
    # Inside, since they take seconds.
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as openapi

    chosen = [
        checks.not_a_server_error,
        openapi.status_code_conformance,
        openapi.content_type_conformance,
        openapi.response_schema_conformance,
    ]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy())
    def conforms(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "demo"  # what is behind the name is to be tried
        case.call_and_validate(base_url=server.url, checks=chosen)

    conforms()


def test_whatever_the_schema_allows_gets_what_it_promises(server: OpenAIServer) -> None:
    import schemathesis

    described: Any = server.get("/openapi.json").json()
    operations = [
        found.ok()  # type: ignore[union-attr, unused-ignore]
        for found in schemathesis.openapi.from_dict(described).get_all_operations()
    ]
    assert len(operations) > 5
    for operation in operations:
        if operation.path not in LEFT_OUT:
            check(server, operation)
