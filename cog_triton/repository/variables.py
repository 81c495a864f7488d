"""The one table of template variables: what may stand as ``${name}`` in a model's config.pbtxt.

The names are those of NVIDIA's ``inflight_batcher_llm`` templates, so that commands and files
written for those keep working, plus a few for the embedded engines. ``scripts/make_docs.py`` turns
this table into the one in docs/configuration.md.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal[
    "integer",
    "float",
    "boolean",
    "switch",
    "text",
    "path",
    "data type",
    "integer list",
    "choice",
    "choice list",
]

REQUIRED: Final = object()
"""Default of a variable that must be given."""


@dataclass(frozen=True)
class Variable:
    """One template variable of one model.

    Attributes:
        default: the value when none is given. ``None`` means unset: the lines that use the
            variable are dropped. ``REQUIRED`` means that a value must be given.
        kind: what values look like. A switch is a boolean whose false means unset.
    """

    name: str
    kind: Kind
    default: object
    description: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    def render(self, value: object = None) -> str | None:
        """The value as config.pbtxt spells it, unescaped; None leaves the variable unset.

        An empty value counts as none given.

        Raises:
            ValueError: saying what was expected, without the variable's name.
        """
        value = self.default if value is None or value == "" else value
        if value is REQUIRED:
            raise ValueError(f"required, {self.expected}")
        if value is None:
            return None
        if value == "":
            return ""
        # What a shell variable that nobody expanded, or a template filled halfway, leaves.
        if "${" in str(value):
            raise ValueError(f"still to be expanded, {value!r}")
        try:
            return _RENDER[self.kind](self, value)
        except ValueError:
            raise ValueError(f"expected {self.expected}, got {value!r}") from None

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "choice list":
            return f"some of {', '.join(self.choices)}, separated by commas"
        return _EXPECTED[self.kind] + self._range

    @property
    def _range(self) -> str:
        if self.maximum is not None:
            return f" from {self.minimum:g} to {self.maximum:g}"
        return "" if self.minimum is None else f" of at least {self.minimum:g}"

    def check_range(self, number: float) -> None:
        """Raises ValueError for a number outside of minimum and maximum."""
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        if not low <= number <= high:
            raise ValueError


_EXPECTED: dict[Kind, str] = {
    "integer": "an integer",
    "float": "a number",
    "boolean": "true or false",
    "switch": "true or false",
    "text": "text, in quotes",
    "path": "a path",
    "data type": "a Triton data type such as TYPE_FP32",
    "integer list": "integers separated by commas",
}
_BOOLEANS = {
    "true": "true",
    "1": "true",
    "yes": "true",
    "false": "false",
    "0": "false",
    "no": "false",
}
_DATA_TYPES = {"BOOL", "STRING", "BF16", "FP16", "FP32", "FP64"} | {
    f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)
}


def _integer(variable: Variable, value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    variable.check_range(value)
    return str(value)


def _float(variable: Variable, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    variable.check_range(number)
    return repr(number)


def _boolean(_variable: Variable, value: object) -> str:
    try:
        return _BOOLEANS[str(value).strip().lower()]
    except KeyError:
        raise ValueError from None


def _switch(variable: Variable, value: object) -> str | None:
    return "true" if _boolean(variable, value) == "true" else None


def _text(_variable: Variable, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    value.encode()  # raises for half a surrogate pair, which cannot be written to a file
    return value


def _path(variable: Variable, value: object) -> str:
    return _text(variable, os.fspath(value) if isinstance(value, os.PathLike) else value)


def _data_type(_variable: Variable, value: object) -> str:
    name = str(value).strip().removeprefix("TYPE_")
    if name not in _DATA_TYPES:
        raise ValueError
    return f"TYPE_{name}"


def _integer_list(_variable: Variable, value: object) -> str:
    items = value if isinstance(value, (list, tuple)) else [value]
    text = ",".join("".join(str(item).split()) for item in items)
    # Semicolons separate the lists of several model instances in gpu_device_ids.
    if not re.fullmatch(r"[0-9]+([,;][0-9]+)*", text):
        raise ValueError
    return text


def _choice(variable: Variable, value: object) -> str:
    if str(value).strip() not in variable.choices:
        raise ValueError
    return str(value).strip()


def _choice_list(variable: Variable, value: object) -> str:
    items = value if isinstance(value, (list, tuple)) else str(value).split(",")
    if not items:
        raise ValueError
    return ",".join(_choice(variable, item) for item in items)


_RENDER: dict[Kind, Callable[[Variable, object], str | None]] = {
    "integer": _integer,
    "float": _float,
    "boolean": _boolean,
    "switch": _switch,
    "text": _text,
    "path": _path,
    "data type": _data_type,
    "integer list": _integer_list,
    "choice": _choice,
    "choice list": _choice_list,
}


def _table(*variables: Variable) -> dict[str, Variable]:
    return {variable.name: variable for variable in variables}


_MAX_BATCH_SIZE = Variable(
    "triton_max_batch_size",
    "integer",
    64,
    "Most requests that Triton hands over at once. No step of the ensemble may have less than the "
    "ensemble itself.",
    minimum=1,
)
_LOGITS = Variable(
    "logits_datatype", "data type", "TYPE_FP32", "Data type of the context and generation logits."
)
_QUEUE_DELAY = Variable(
    "max_queue_delay_microseconds",
    "integer",
    0,
    "How long Triton may hold a request back to hand it over together with later ones.",
    minimum=0,
)
_QUEUE_SIZE = Variable(
    "max_queue_size",
    "integer",
    0,
    "Requests that may wait before further ones are refused; 0 sets no limit.",
    minimum=0,
)
_DECODING_CONTEXT = Variable(
    "decoding_context",
    "switch",
    None,
    "Hand postprocessing the tokens before each response, so that text split over responses "
    "decodes correctly. The embedded engines can, the C++ backend cannot. Set by `triton_backend` "
    "where that is known, otherwise off; the ensemble and tensorrt_llm must agree.",
)
_RETURN_SEQUENCES = Variable(
    "num_return_sequences",
    "switch",
    True,
    "Have the input num_return_sequences. TensorRT-LLM's C++ backend takes it for no_repeat_ngram_size "
    "in 1.2.0 and 1.2.1; without it Triton refuses gRPC and infer requests that name it, and generate "
    "ignores it. The predictor sets it; the ensemble and tensorrt_llm must agree.",
)
_DECOUPLED = Variable(
    "decoupled_mode", "boolean", True, "Several responses to one request; streaming needs it."
)
_TOKENIZER = Variable(
    "tokenizer_dir", "path", REQUIRED, "Directory or Hugging Face id of the tokenizer."
)

_TRUST_REMOTE_CODE = Variable(
    "trust_remote_code",
    "switch",
    None,
    "Run the Python code that a tokenizer or model brings; set by `TRUST_REMOTE_CODE`, otherwise off.",
)

VARIABLES: Final[Mapping[str, Mapping[str, Variable]]] = {
    "ensemble": _table(_MAX_BATCH_SIZE, _LOGITS, _DECODING_CONTEXT, _RETURN_SEQUENCES),
    "preprocessing": _table(
        _MAX_BATCH_SIZE,
        _TOKENIZER,
        _TRUST_REMOTE_CODE,
        Variable(
            "add_special_tokens",
            "boolean",
            True,
            "Let the tokenizer add special tokens to the prompt, the beginning of sequence say.",
        ),
        Variable(
            "words_after_space",
            "boolean",
            True,
            "Let bad words and stop words match behind a space as well, where most vocabularies have other "
            "tokens for them; NVIDIA's preprocessing matches the word alone.",
        ),
        Variable(
            "max_seq_len",
            "integer",
            None,
            "Most tokens of a prompt and its answer. A prompt of more characters than so many tokens can "
            "have is refused before it is tokenized.",
            minimum=1,
        ),
        _QUEUE_DELAY,
        _QUEUE_SIZE,
        Variable(
            "preprocessing_instance_count", "integer", 1, "Instances of this model.", minimum=1
        ),
        Variable("engine_dir", "path", None, "Multimodal; NVIDIA's own template only."),
        Variable("multimodal_model_path", "path", None, "Multimodal; NVIDIA's own template only."),
        Variable("max_num_images", "integer", None, "Multimodal; NVIDIA's own template only."),
    ),
    "postprocessing": _table(
        _MAX_BATCH_SIZE,
        _TOKENIZER,
        _TRUST_REMOTE_CODE,
        Variable(
            "skip_special_tokens", "boolean", True, "Leave special tokens out of the text returned."
        ),
        Variable(
            "postprocessing_instance_count", "integer", 1, "Instances of this model.", minimum=1
        ),
    ),
    "tensorrt_llm": _table(
        Variable(
            "triton_backend",
            "choice",
            "python",
            "`tensorrtllm` for TensorRT-LLM's C++ backend, `python` for the embedded engine.",
            choices=("python", "tensorrtllm"),
        ),
        _MAX_BATCH_SIZE,
        _DECOUPLED,
        _QUEUE_DELAY,
        _QUEUE_SIZE,
        _DECODING_CONTEXT,
        _RETURN_SEQUENCES,
        _LOGITS,
        Variable(
            "encoder_input_features_data_type",
            "data type",
            "TYPE_FP32",
            "Data type of the input encoder_input_features, of encoder-decoder engines.",
        ),
        Variable(
            "prompt_embedding_table_data_type",
            "data type",
            "TYPE_FP16",
            "Data type of the input prompt_embedding_table; NVIDIA's newer templates only.",
        ),
        Variable(
            "engine_dir",
            "path",
            None,
            "TensorRT-LLM engine. With `triton_backend` tensorrtllm this or `encoder_engine_dir` "
            "is required.",
        ),
        Variable("encoder_engine_dir", "path", None, "Engine of the encoder."),
        Variable(
            "batching_strategy",
            "choice",
            "inflight_fused_batching",
            "`V1` switches in-flight batching off.",
            choices=("V1", "inflight_batching", "inflight_fused_batching"),
        ),
        Variable(
            "batch_scheduler_policy",
            "choice",
            "guaranteed_no_evict",
            "`max_utilization` packs more requests and may pause some when the KV cache runs full; "
            "`guaranteed_no_evict` never pauses one that has started.",
            choices=("guaranteed_no_evict", "max_utilization"),
        ),
        Variable("max_beam_width", "integer", 1, "Widest beam a request may ask for.", minimum=1),
        Variable(
            "exclude_input_in_output",
            "boolean",
            False,
            "Leave the prompt's tokens out of the output, where a request does not say. As at NVIDIA; the "
            "predictor sets it to true.",
        ),
        Variable(
            "max_tokens_in_paged_kv_cache",
            "integer",
            None,
            "Size of the KV cache in tokens; no limit but the memory's when unset.",
            minimum=1,
        ),
        Variable(
            "kv_cache_free_gpu_mem_fraction",
            "float",
            None,
            "Share, for the KV cache, of the GPU memory that is free after the engine is "
            "loaded; TensorRT-LLM takes 0.9 when unset.",
            minimum=0,
            maximum=1,
        ),
        Variable(
            "cross_kv_cache_fraction",
            "float",
            None,
            "Share of the KV cache for cross attention; for encoder-decoder engines only.",
            minimum=0,
            maximum=1,
        ),
        Variable(
            "kv_cache_host_memory_bytes",
            "integer",
            None,
            "Host memory that KV cache blocks may be moved to; none when unset.",
            minimum=0,
        ),
        Variable("kv_cache_onboard_blocks", "boolean", None, "Internal to the backend."),
        Variable(
            "enable_kv_cache_reuse",
            "boolean",
            None,
            "Share the KV cache of equal beginnings of prompts; the backend decides when unset.",
        ),
        Variable(
            "max_attention_window_size",
            "integer list",
            None,
            "Tokens that attention looks back on: one number, or one for each layer in turn; all "
            "of the sequence when unset.",
        ),
        Variable(
            "sink_token_length",
            "integer",
            None,
            "First tokens of a sequence that always stay in the attention window.",
            minimum=0,
        ),
        Variable(
            "enable_chunked_context",
            "boolean",
            None,
            "Process long prompts in chunks, between the other requests' tokens; off when unset.",
        ),
        Variable(
            "normalize_log_probs",
            "boolean",
            None,
            "Normalize output_log_probs; on when unset.",
        ),
        Variable(
            "cancellation_check_period_ms",
            "integer",
            None,
            "Pause between two looks for cancelled requests; 100 when unset.",
            minimum=1,
        ),
        Variable(
            "stats_check_period_ms",
            "integer",
            None,
            "Pause between two reports of statistics; 100 when unset.",
            minimum=1,
        ),
        Variable(
            "iter_stats_max_iterations",
            "integer",
            None,
            "Iterations for which statistics are kept.",
            minimum=0,
        ),
        Variable(
            "request_stats_max_iterations",
            "integer",
            None,
            "Iterations for which statistics of single requests are kept.",
            minimum=0,
        ),
        Variable(
            "gpu_device_ids",
            "integer list",
            None,
            "GPUs to use, all visible ones when unset. Semicolons separate model instances.",
        ),
        Variable(
            "participant_ids",
            "integer list",
            None,
            "MPI ranks to use, in orchestrator mode without spawned processes.",
        ),
        Variable("num_nodes", "integer", None, "MPI nodes to use; 1 when unset.", minimum=1),
        Variable(
            "gpu_weights_percent",
            "float",
            None,
            "Share (0 to 1, whatever the name) of the weights that stays on the GPU; the rest is "
            "streamed, which the engine must be built for. 1 when unset.",
            minimum=0,
            maximum=1,
        ),
        Variable(
            "lora_cache_optimal_adapter_size",
            "integer",
            None,
            "Adapter size that one page of the LoRA cache is made for; 8 when unset.",
            minimum=1,
        ),
        Variable(
            "lora_cache_max_adapter_size",
            "integer",
            None,
            "Largest adapter size that the LoRA cache must hold; 64 when unset.",
            minimum=1,
        ),
        Variable(
            "lora_cache_gpu_memory_fraction",
            "float",
            None,
            "Share, for the LoRA cache, of the GPU memory left after engine and KV cache; 0.05 "
            "when unset.",
            minimum=0,
            maximum=1,
        ),
        Variable(
            "lora_cache_host_memory_bytes",
            "integer",
            None,
            "Size of the LoRA cache in host memory; 1 GB when unset.",
            minimum=0,
        ),
        Variable(
            "lora_prefetch_dir", "path", None, "Directory of LoRA weights to load at the start."
        ),
        Variable(
            "decoding_mode",
            "choice",
            None,
            "top_k_top_p when unset, or beam_search with a `max_beam_width` above 1.",
            choices=(
                "top_k",
                "top_p",
                "top_k_top_p",
                "beam_search",
                "medusa",
                "redrafter",
                "lookahead",
                "eagle",
            ),
        ),
        Variable("lookahead_window_size", "integer", None, "Lookahead decoding.", minimum=1),
        Variable("lookahead_ngram_size", "integer", None, "Lookahead decoding.", minimum=1),
        Variable(
            "lookahead_verification_set_size", "integer", None, "Lookahead decoding.", minimum=1
        ),
        Variable("medusa_choices", "text", None, "Medusa's choice tree, such as `{0, 0}, {0, 1}`."),
        Variable("eagle_choices", "text", None, "Eagle's choice tree, such as `{0, 0}, {0, 1}`."),
        Variable(
            "speculative_decoding_fast_logits",
            "boolean",
            None,
            "Send logits from the draft to the target model directly, in orchestrator mode "
            "without spawned processes.",
        ),
        Variable(
            "enable_context_fmha_fp32_acc",
            "boolean",
            None,
            "Accumulate the prompt's attention in FP32; off when unset.",
        ),
        Variable(
            "multi_block_mode",
            "boolean",
            None,
            "Spread the attention of one sequence over several GPU blocks; on when unset.",
        ),
        Variable("cuda_graph_mode", "boolean", None, "Use CUDA graphs; off when unset."),
        Variable(
            "cuda_graph_cache_size",
            "integer",
            None,
            "CUDA graphs to keep; 0 when unset.",
            minimum=0,
        ),
        # The C++ backend reads the next three without a fallback and fails to load when the key is
        # missing, so unset is the empty string and not a dropped line.
        Variable(
            "tokenizer_dir",
            "path",
            "",
            "Tokenizer. The simulated engine needs it, TensorRT-LLM only for guided decoding.",
        ),
        Variable("guided_decoding_backend", "text", "", "`xgrammar` switches guided decoding on."),
        Variable(
            "xgrammar_tokenizer_info_path",
            "path",
            "",
            "JSON file about the tokenizer, for guided decoding in the C++ backend.",
        ),
        Variable(
            "engine",
            "choice",
            "transformers",
            "Embedded engine: `transformers` runs the model, so does `llmapi` by TensorRT-LLM's LLM "
            "API, `simulated` makes tokens up.",
            choices=("transformers", "llmapi", "simulated"),
        ),
        Variable(
            "model", "path", None, "Embedded engine: directory or Hugging Face id of the model."
        ),
        _TRUST_REMOTE_CODE,
        Variable(
            "max_seq_len",
            "integer",
            None,
            "Embedded engine: upper bound on prompt plus output tokens; its own when unset.",
            minimum=1,
        ),
        Variable("device", "text", "auto", "Embedded engine: auto, cpu, cuda or cuda:N."),
        Variable(
            "dtype",
            "choice",
            "auto",
            "Embedded engine: data type of the weights; auto keeps the one they were saved in.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
        Variable(
            "attn_implementation",
            "text",
            None,
            "Embedded engine: transformers' attention; sdpa when unset, torch_flash is faster on NVIDIA "
            "GPUs in half precision.",
        ),
        Variable(
            "use_cuda_graph",
            "boolean",
            None,
            "Embedded engine: replay the model's forward pass as a CUDA graph.",
        ),
        Variable(
            "tensor_parallel_size",
            "integer",
            None,
            "LLM API: GPUs that each layer is split over; 1 when unset.",
            minimum=1,
        ),
        Variable(
            "pipeline_parallel_size",
            "integer",
            None,
            "LLM API: groups of GPUs that the layers are dealt out to; 1 when unset.",
            minimum=1,
        ),
        Variable(
            "max_batch_size",
            "integer",
            None,
            "LLM API: most sequences that are computed together; 2048 when unset.",
            minimum=1,
        ),
        Variable(
            "max_num_tokens",
            "integer",
            None,
            "LLM API: most tokens of one step, and of a prompt unless `enable_chunked_context` is "
            "on; 8192 when unset.",
            minimum=1,
        ),
        Variable(
            "stream_interval",
            "integer",
            None,
            "LLM API: tokens of a sequence that are handed over at once; 1 when unset.",
            minimum=1,
        ),
        Variable(
            "llm_api_config",
            "path",
            None,
            "LLM API: YAML file of further arguments of TensorRT-LLM's `LLM`, which win over those "
            "set here.",
        ),
        Variable(
            "simulated_prefill_ms",
            "float",
            0,
            "Simulated engine: milliseconds until a request's first token, whatever else runs.",
            minimum=0,
        ),
        Variable(
            "simulated_inter_token_ms",
            "float",
            0,
            "Simulated engine: milliseconds between two tokens of a request.",
            minimum=0,
        ),
        Variable(
            "simulated_prefill_tokens_per_s",
            "float",
            None,
            "Simulated engine: prompt tokens that it prefills a second, one prompt after another, "
            "before those milliseconds; 0 or unset is no limit.",
            minimum=0,
        ),
        Variable(
            "max_tokens_per_response",
            "integer",
            None,
            "Embedded engines: most tokens in one response of a stream; 0 or unset is all that are ready.",
            minimum=0,
        ),
        Variable(
            "max_responses_per_second",
            "float",
            None,
            "Embedded engines: most responses a second, of all streams together; above it a response "
            "has several tokens. 0 or unset is no limit.",
            minimum=0,
        ),
        Variable(
            "simulated_max_batch",
            "integer",
            None,
            "Simulated engine: requests that run at once, others wait for a slot; 0 or unset is no "
            "limit.",
            minimum=0,
        ),
        Variable(
            "simulated_failure_rate",
            "float",
            None,
            "Simulated engine: share of the requests that fail; none when unset.",
            minimum=0,
            maximum=1,
        ),
        Variable(
            "simulated_failures",
            "choice list",
            None,
            "Simulated engine: how requests fail, each in one of the ways named here, with commas "
            "between; `error` when unset.",
            choices=("error", "stall", "refuse"),
        ),
        Variable(
            "simulated_text",
            "text",
            None,
            "Simulated engine: the text whose tokens it makes, again and again; its own when unset.",
        ),
    ),
    "tensorrt_llm_bls": _table(
        _MAX_BATCH_SIZE,
        _DECOUPLED,
        _LOGITS,
        Variable(
            "accumulate_tokens",
            "boolean",
            None,
            "Return the whole text so far in every response, instead of what the response adds; off "
            "when unset.",
        ),
        Variable(
            "bls_instance_count",
            "integer",
            1,
            "Instances of this model. In each, 24 requests may wait for their first response at a "
            "time, which is the only one of a request that does not stream.",
            minimum=1,
        ),
        Variable("tensorrt_llm_model_name", "text", "tensorrt_llm", "Model that generates."),
        Variable(
            "tensorrt_llm_draft_model_name",
            "text",
            None,
            "Model that drafts. Not supported: with one, this model does not load.",
        ),
        Variable(
            "multimodal_encoders_name",
            "text",
            None,
            "Model that encodes images. Not supported: with one, this model does not load.",
        ),
    ),
}
"""By model, then by name. A template may use any of its model's variables and need not use all."""

OPTIONAL_MODELS: Final = frozenset({"tensorrt_llm_bls"})
"""Models that are part of a filled repository only if a configuration has values for them, or names
them without any. It may do so without the templates' directory having the model."""

_TOKENIZER_TYPE = Variable(
    "tokenizer_type", "text", None, "the tokenizer's own files say what it is"
)

IGNORED: Final[Mapping[str, Mapping[str, Variable]]] = {
    "preprocessing": _table(_TOKENIZER_TYPE),
    "postprocessing": _table(_TOKENIZER_TYPE),
    "tensorrt_llm": _table(
        Variable("max_num_sequences", "integer", None, "the backend no longer reads it"),
        Variable("enable_trt_overlap", "boolean", None, "the backend no longer reads it"),
    ),
}
"""Names of older templates that have no effect in today's. The description says why.

They are known rather than unknown, so that a template of that age can still be filled.
"""

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "tensorrt_llm": {
        "decoupled": "decoupled_mode",
        "gpt_model_type": "batching_strategy",
        "gpt_model_path": "engine_dir",
        "encoder_model_path": "encoder_engine_dir",
    },
    "tensorrt_llm_bls": {"decoupled": "decoupled_mode"},
}
"""Old name to new name, by model."""

RENAMED_VALUES: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "tensorrt_llm": {"batch_scheduler_policy": {"guaranteed_completion": "guaranteed_no_evict"}},
}
"""Old value to new value, by model and variable."""


def known(model: str) -> dict[str, Variable]:
    """Every variable that a template of ``model`` may use, those of older templates included."""
    return {**VARIABLES.get(model, {}), **IGNORED.get(model, {})}
