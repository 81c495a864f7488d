"""Triton's protobuf messages, without the client around them in their package.

Importing ``tritonclient.grpc`` imports gRPC's library, which takes a tenth of a second of a processor and
20 MB in each process. This project speaks gRPC itself (``cog_triton.client.connection``).
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

PACKAGE = "tritonclient.grpc"


def messages_of(*names: str) -> list[ModuleType]:
    """Import modules of ``PACKAGE`` without running its ``__init__.py``, unless that has run."""
    if PACKAGE in sys.modules:
        return [import_module(f"{PACKAGE}.{name}") for name in names]
    spec = find_spec("tritonclient")
    if spec is None:
        raise ModuleNotFoundError("No module named 'tritonclient'", name="tritonclient")
    package = ModuleType(PACKAGE)
    package.__path__ = [str(Path(place, "grpc")) for place in spec.submodule_search_locations or ()]
    sys.modules[PACKAGE] = package
    try:
        return [import_module(f"{PACKAGE}.{name}") for name in names]
    finally:
        # Who imports the package later gets the whole of it, with the same messages.
        del sys.modules[PACKAGE]


if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as model_config_pb2
    from tritonclient.grpc import service_pb2 as service_pb2
else:
    model_config_pb2, service_pb2 = messages_of("model_config_pb2", "service_pb2")

DataType = model_config_pb2.DataType
ModelConfig = model_config_pb2.ModelConfig
ModelInstanceGroup = model_config_pb2.ModelInstanceGroup
