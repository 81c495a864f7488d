"""Triton's messages are those of its package, whichever is imported first."""

import subprocess
import sys

from cog_triton.protocol import triton_messages

BEFORE_THE_PACKAGE = """
from cog_triton.protocol import triton_messages
import tritonclient.grpc

assert tritonclient.grpc.service_pb2 is triton_messages.service_pb2
assert tritonclient.grpc.model_config_pb2.ModelConfig is triton_messages.ModelConfig
assert tritonclient.grpc.InferenceServerClient
"""


def test_the_whole_package_can_be_imported_later() -> None:
    subprocess.run([sys.executable, "-c", BEFORE_THE_PACKAGE], check=True)


def test_a_package_that_was_imported_stays() -> None:
    import tritonclient.grpc

    (found,) = triton_messages.messages_of("service_pb2")
    assert found is tritonclient.grpc.service_pb2 is triton_messages.service_pb2
    assert sys.modules[triton_messages.PACKAGE] is tritonclient.grpc
