"""The commands that cog-triton has in a checkout beside those of the package."""

from cog_triton.cli.registry import Command

COMMANDS = (
    Command(
        name="run",
        module="tools.accuracy.run_command",
        summary="Complete prompts with an engine or a checkpoint",
    ),
    Command(
        name="client",
        module="tools.token_clients.client",
        summary="Complete a text with a running Triton",
    ),
    Command(
        name="identity-test",
        module="tools.token_clients.identity_test",
        summary="Time a batch of random prompts on a running Triton",
    ),
    Command(
        name="gen-input-data",
        module="tools.token_clients.gen_input_data",
        summary="Write input_data.json for perf_analyzer",
    ),
    Command(
        name="build-engine",
        module="tools.engine_builder.command",
        summary="Build a TensorRT-LLM engine from a YAML file, and pack it with its tokenizer",
        failure_status=2,
    ),
    Command(
        name="summarize",
        module="tools.accuracy.summarize_command",
        summary="Compare an engine with Hugging Face's generate()",
        failure_status=2,
    ),
    Command(
        name="bench",
        module="tools.benchmark.bench_command",
        summary="Benchmark the server or any layer of it",
        failure_status=2,
    ),
    Command(
        name="bench-engine",
        module="tools.benchmark.engines_command",
        summary="Compare an embedded engine with its library and with vllm serve",
        failure_status=2,
    ),
    Command(
        name="soak",
        module="tools.soak.command",
        summary="Put load on real servers, kill parts of them, and check every answer",
        failure_status=2,
    ),
    Command(
        name="demo-model",
        module="tools.demo_model.command",
        summary="Retrain the demo model in cog_triton/demo",
    ),
    Command(
        name="make-schema",
        module="tools.schema.command",
        summary="Write .cog/openapi_schema.json from predict.py and train.py, like cog build",
    ),
)
