"""OPENAI_PORT: OpenAI's API in Cog's predictor, on the same Triton.

That they end together is tested as the server ends that these tests share: ``check_common_end``.
"""

import contextlib

import httpx
import psutil  # type: ignore[import-untyped, unused-ignore]

from tests.openai_server import streamed_chat
from tests.support import CogServer, children, limit, started_by, wait_until

STREAMS = 6


def test_both_apis_have_one_triton(paced_cog_server: CogServer) -> None:
    """Also where OpenAI's has processes of its own, whose figures are added up."""
    server = paced_cog_server
    assert len(started_by(server.process.pid, "openai.workers")) == 2
    names = [psutil.Process(pid).name() for pid in children(server.process.pid)]
    assert names.count("tritonserver") == 1
    url = f"http://127.0.0.1:{server.environment['OPENAI_PORT']}"

    def requests_running() -> int:
        (load,) = httpx.get(f"{url}/v1/loads", trust_env=False, timeout=limit(60)).json()["loads"]
        return int(load["num_running_reqs"])

    with contextlib.ExitStack() as streams:
        for _ in range(STREAMS):  # whichever process gets them
            streams.enter_context(streamed_chat(url, max_tokens=5000, min_tokens=5000))
        wait_until(lambda: requests_running() == STREAMS, 60, "the sum of the processes")
        assert server.predict(prompt="Hi", max_tokens=2)["status"] == "succeeded"
    wait_until(lambda: requests_running() == 0, 60, "the end of what nobody reads")
