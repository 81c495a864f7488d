// A model's parameters and an engine's configuration, read as strictly as TensorRT-LLM 1.2 reads them.

#pragma once

#include <climits>
#include <cstdarg>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "json.h"

inline std::string format(const char* text, ...)
{
  char buffer[1024];
  va_list values;
  va_start(values, text);
  std::vsnprintf(buffer, sizeof buffer, text, values);
  va_end(values);
  return buffer;
}

// TensorRT-LLM has a log of its own, beside Triton's.
inline void log_line(const char* level, const std::string& text)
{
  std::fprintf(stderr, "[TensorRT-LLM][%s] %s\n", level, text.c_str());
}

inline void log_warning(const std::string& text) { log_line("WARNING", text); }

// What TLLM_CHECK throws: its text begins the same.
inline void check(bool holds, const std::string& text)
{
  if (!holds) throw std::runtime_error("[TensorRT-LLM][ERROR] Assertion failed: " + text);
}

// The parameters of a model's config.pbtxt.
class Parameters {
 public:
  explicit Parameters(const Json& config) : config_(config) {}

  // A value; one without string_value is empty. Throws if there is no such key.
  std::string text(const std::string& name) const
  {
    if (!config_["parameters"].has(name))
      throw std::runtime_error("Cannot find parameter with name: " + name);
    return config_["parameters"][name]["string_value"].as_text();
  }

  int integer(const std::string& name) const { return std::stoi(text(name)); }
  unsigned natural(const std::string& name) const { return unsigned(std::stoul(text(name))); }
  unsigned long long size(const std::string& name) const { return std::stoull(text(name)); }
  float number(const std::string& name) const { return std::stof(text(name)); }

  bool boolean(const std::string& name) const
  {
    const std::string value = text(name);
    for (const char* yes : {"True", "true", "TRUE", "1"})
      if (value == yes) return true;
    for (const char* no : {"False", "false", "FALSE", "0"})
      if (value == no) return false;
    throw std::runtime_error("Cannot convert " + value + " to a boolean.");
  }

  std::vector<int> integers(const std::string& name) const { return split_integers(text(name)); }

  // "{0},{0,1}" as lists of integers.
  std::vector<std::vector<int>> choices(const std::string& name) const
  {
    std::stringstream rest(text(name));
    std::vector<std::vector<int>> lists;
    for (std::string list; std::getline(rest, list, '}') && !list.empty() && !rest.eof();) {
      lists.push_back(split_integers(list[0] == '{' ? list.substr(1) : list));
      rest >> std::ws;
      rest.ignore(std::numeric_limits<std::streamsize>::max(), ',');
      rest >> std::ws;
    }
    check(!lists.empty(), "Empty vector of vector");
    return lists;
  }

  static std::vector<int> split_integers(const std::string& text)
  {
    check(!text.empty(), "Cannot convert empty string to vector of vector of ints");
    std::stringstream rest(text);
    std::vector<int> numbers;
    for (std::string number; rest.good();) {
      rest >> std::ws;
      std::getline(rest, number, ',');
      if (number.empty()) break;
      numbers.push_back(std::stoi(number));
    }
    check(!numbers.empty(), "Empty vector");
    return numbers;
  }

 private:
  const Json& config_;
};

// What a parameter gives, or the default with a warning when it cannot be had.
template <typename Value>
Value or_default(std::function<Value()> read, Value otherwise, const std::string& warning)
{
  try {
    return read();
  } catch (const std::exception&) {
    log_warning(warning);
    return otherwise;
  }
}

// An engine's config.json, and which of its files this rank needs.
struct EngineConfig {
  int vocab_size = 0;
  int max_input_len = 0;
  int max_seq_len = 0;
  int max_batch_size = 1;
  int max_num_tokens = 0;
  int max_beam_width = 1;
  int world_size = 1;
  bool context_fmha = true;
  bool packed_input = true;
  bool context_logits = false;
  bool generation_logits = false;
  bool lora = false;
  std::string data_type;
  int layers = 0;
  int max_lora_rank = 0;
  std::set<std::string> lora_modules;

  static EngineConfig read(const std::filesystem::path& directory)
  {
    const auto file = directory / "config.json";
    check(std::filesystem::exists(file), "File does not exist: " + file.string());
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    const Json config = Json::parse(text.str());
    const Json &model = config["pretrained_config"], &build = config["build_config"];
    const Json &plugins = build["plugin_config"], &mapping = model["mapping"];
    EngineConfig engine;
    engine.vocab_size = required(model, "vocab_size");
    engine.max_seq_len = required(build, "max_seq_len");
    engine.max_input_len = required(build, "max_input_len");
    engine.max_batch_size = required(build, "max_batch_size");
    engine.max_num_tokens = int(build["max_num_tokens"].as_integer(engine.max_seq_len));
    engine.max_beam_width = int(build["max_beam_width"].as_integer(1));
    engine.world_size = int(mapping["world_size"].as_integer(1));
    engine.context_fmha = plugins["context_fmha"].as_bool(true);
    engine.packed_input = plugins["remove_input_padding"].as_bool(true);
    engine.context_logits = build["gather_context_logits"].as_bool(false);
    engine.generation_logits = build["gather_generation_logits"].as_bool(false);
    engine.lora = !plugins["lora_plugin"].is_null();
    engine.data_type = model["dtype"].as_text();
    engine.layers = int(model["num_hidden_layers"].as_integer(0));
    engine.max_lora_rank = int(build["lora_config"]["max_lora_rank"].as_integer(64));
    for (const Json& module : build["lora_config"]["lora_target_modules"].items())
      engine.lora_modules.insert(module.as_text());
    return engine;
  }

  // How long a prompt may be; trtGptModel.h takes it from elsewhere than the build's max_input_len.
  int longest_prompt(bool chunked_context) const
  {
    if (chunked_context) return max_seq_len - 1;
    return context_fmha && packed_input ? std::min(max_seq_len - 1, max_num_tokens) : max_input_len;
  }

 private:
  static int required(const Json& object, const char* name)
  {
    if (object[name].is_null())
      throw std::runtime_error(format("[json.exception.out_of_range.403] key '%s' not found", name));
    return int(object[name].as_integer(0));
  }
};

// Everything of a model's configuration that has an effect on the stand-in.
struct ModelConfig {
  bool decoupled = false;
  bool static_batching = false;
  int max_beam_width = 1;
  long max_queue_size = 0;  // 0: unlimited
  int max_tokens_in_paged_kv_cache = 0;  // 0: no limit
  bool chunked_context = false;
  bool max_utilization = false;
  bool exclude_input_in_output = false;
  int cancellation_check_period_ms = 100;
  int stats_check_period_ms = 100;
  std::string engine_dir;
  EngineConfig engine;

  static ModelConfig read(const Json& config)
  {
    ModelConfig model;
    const Parameters parameters(config);
    model.decoupled = config["model_transaction_policy"]["decoupled"].as_bool(false);
    read_device_lists(parameters);
    model.static_batching = is_static(parameters.text("gpt_model_type"));
    model.read_executor_parameters(parameters);
    const Json& queue = config["dynamic_batching"]["default_queue_policy"];
    model.max_queue_size = queue["max_queue_size"].as_integer(0);
    check_guided_decoding(parameters);
    model.read_engine(parameters);
    model.read_instance_parameters(parameters);
    return model;
  }

 private:
  static bool is_static(const std::string& type)
  {
    if (type == "V1" || type == "v1") return true;
    if (type == "inflight_batching" || type == "inflight_fused_batching") return false;
    throw std::runtime_error(
        "Invalid gpt_model_type. Must be v1/inflight_batching/inflight_fused_batching.");
  }

  static void read_device_lists(const Parameters& parameters)
  {
    for (const std::string name : {"gpu_device_ids", "participant_ids"}) {
      or_default<bool>(
          [&] {
            std::stringstream lists(parameters.text(name));
            for (std::string list; std::getline(lists, list, ';');)
              Parameters::split_integers(list);
            return true;
          },
          false, name + " is not specified, will be automatically set");
    }
  }

  void read_executor_parameters(const Parameters& from)
  {
    const auto integer = [&](const char* name, int otherwise, const char* warning) {
      return or_default<int>([&] { return from.integer(name); }, otherwise, warning);
    };
    const auto number = [&](const char* name, const char* warning) {
      or_default<float>([&] { return from.number(name); }, 0, warning);
    };
    const auto size = [&](const char* name, const char* warning) {
      or_default<unsigned long long>([&] { return from.size(name); }, 0, warning);
    };
    const auto boolean = [&](const char* name, bool otherwise, const char* warning) {
      return or_default<bool>([&] { return from.boolean(name); }, otherwise, warning);
    };
    max_beam_width = integer(
        "max_beam_width", 1, "max_beam_width is not specified, will use default value of 1");
    integer("iter_stats_max_iterations", 1000,
            "iter_stats_max_iterations is not specified, will use default value of 1000");
    integer("request_stats_max_iterations", 0,
            "request_stats_max_iterations is not specified, will use default value of 0");
    boolean("normalize_log_probs", true, "normalize_log_probs is not specified, will be set to true");
    max_tokens_in_paged_kv_cache =
        integer("max_tokens_in_paged_kv_cache", 0,
                "max_tokens_in_paged_kv_cache is not specified, will use default value");
    number("kv_cache_free_gpu_mem_fraction",
           "kv_cache_free_gpu_mem_fraction is not specified, will use default value of 0.9 or "
           "max_tokens_in_paged_kv_cache");
    number("cross_kv_cache_fraction",
           "cross_kv_cache_fraction is not specified, error if it's encoder-decoder model, "
           "otherwise ok");
    size("kv_cache_host_memory_bytes", "kv_cache_host_memory_bytes not set, defaulting to 0");
    boolean("kv_cache_onboard_blocks", true, "kv_cache_onboard_blocks not set, defaulting to true");
    or_default<bool>(
        [&] { return !from.integers("max_attention_window_size").empty(); }, false,
        "max_attention_window_size is not specified, will use default value (i.e. "
        "max_sequence_length)");
    integer("sink_token_length", 0, "sink_token_length is not specified, will use default value");
    boolean("enable_kv_cache_reuse", true,
            "enable_kv_cache_reuse is not specified, will be set to true");
    chunked_context = boolean("enable_chunked_context", false,
                              "enable_chunked_context is not specified, will be set to false.");
    max_utilization = or_default<bool>(
        [&] { return is_max_utilization(from.text("batch_scheduler_policy")); }, false,
        "batch_scheduler_policy parameter was not found or is invalid (must be max_utilization or "
        "guaranteed_no_evict)");
    integer("lora_cache_max_adapter_size", 64,
            "lora_cache_max_adapter_size not set, defaulting to 64");
    integer("lora_cache_optimal_adapter_size", 8,
            "lora_cache_optimal_adapter_size not set, defaulting to 8");
    number("lora_cache_gpu_memory_fraction",
           "lora_cache_gpu_memory_fraction not set, defaulting to 0.05");
    size("lora_cache_host_memory_bytes", "lora_cache_host_memory_bytes not set, defaulting to 1GB");
    boolean("multi_block_mode", true, "multi_block_mode is not specified, will be set to true");
    boolean("enable_context_fmha_fp32_acc", false,
            "enable_context_fmha_fp32_acc is not specified, will be set to false");
    boolean("cuda_graph_mode", false, "cuda_graph_mode is not specified, will be set to false");
    integer("cuda_graph_cache_size", 0, "cuda_graph_cache_size is not specified, will be set to 0");
    number("gpu_weights_percent",
           "gpu_weights_percent parameter is not specified, will use default value of 1.0");
    read_decoding(from);
  }

  static bool is_max_utilization(const std::string& policy)
  {
    if (policy == "max_utilization") return true;
    if (policy == "guaranteed_no_evict") return false;
    throw std::runtime_error("no such policy");
  }

  static void read_decoding(const Parameters& from)
  {
    const auto mode = or_default<std::string>(
        [&] {
          const std::string name = from.text("decoding_mode");
          for (const char* known : {"top_k", "top_p", "top_k_top_p", "beam_search", "medusa",
                                    "redrafter", "lookahead", "eagle"})
            if (name == known) return name;
          throw std::runtime_error("no such mode");
        },
        "",
        "decoding_mode parameter is invalid or not specified(must be one of the {top_k, top_p, "
        "top_k_top_p, beam_search, medusa, redrafter, lookahead, eagle}).Using default: "
        "top_k_top_p if max_beam_width == 1, beam_search otherwise");
    for (const std::string kind : {"medusa", "eagle"}) {
      if (mode != kind) continue;
      or_default<bool>(
          [&] { return !from.choices(kind + "_choices").empty(); }, false,
          kind + "_choices parameter is not specified. Will be using default mc_sim_7b_63 choices "
                 "instead");
    }
    if (mode == "lookahead") check_lookahead(from);
  }

  static void check_lookahead(const Parameters& from)
  {
    try {
      for (const char* name :
           {"lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"})
        from.natural(name);
    } catch (const std::exception&) {
      throw std::runtime_error(
          "Decoding mode is set to lookahead but lookahead parameters are not specified. Please "
          "set parameters lookahead_window_size, lookahead_ngram_size, and "
          "lookahead_verification_set_size.");
    }
  }

  // The three keys must be there, whatever they say.
  static void check_guided_decoding(const Parameters& from)
  {
    from.text("tokenizer_dir");
    const std::string info = from.text("xgrammar_tokenizer_info_path");
    const std::string backend = from.text("guided_decoding_backend");
    if (backend.empty() || backend == "${guided_decoding_backend}" || info.empty() ||
        info == "${xgrammar_tokenizer_info_path}")
      return;
    check(std::filesystem::exists(info),
          "Xgrammar's tokenizer info path at " + info + " does not exist.");
    if (backend != "xgrammar")
      throw std::runtime_error(
          "Guided decoding is currently supported with 'xgrammar' backend. Invalid "
          "guided_decoding_backend parameter provided.");
  }

  void read_engine(const Parameters& from)
  {
    engine_dir = existing_path(from, "gpt_model_path", "Decoder (GPT) model path at ");
    const std::string encoder = existing_path(from, "encoder_model_path", "Encoder model path at ");
    check(!engine_dir.empty() || !encoder.empty(), "Both encoder and decoder model paths are empty");
    if (engine_dir.empty() || !encoder.empty())
      throw std::runtime_error("the stand-in has no encoders");
    engine = EngineConfig::read(engine_dir);
    check(max_beam_width <= engine.max_beam_width,
          format("Runtime configured max beam width (%d) must not exceed engine max beam width (%d)",
                 max_beam_width, engine.max_beam_width));
    if (engine.lora) read_lora_directory(from);
  }

  // Any value is a path, an empty one and a placeholder too. Engines without LoRA do not look.
  static void read_lora_directory(const Parameters& from)
  {
    std::string directory;
    try {
      directory = from.text("lora_prefetch_dir");
    } catch (const std::exception&) {
      log_warning("lora_prefetch_dir not set, defaulting to 1GB");
      return;
    }
    std::filesystem::directory_iterator files(directory);
  }

  static std::string existing_path(
      const Parameters& from, const std::string& name, const std::string& what)
  {
    return or_default<std::string>(
        [&] {
          const std::string path = from.text(name);
          check(std::filesystem::exists(path), what + path + " does not exist.");
          return path;
        },
        "", name + " is not specified, will be left empty");
  }

  void read_instance_parameters(const Parameters& from)
  {
    exclude_input_in_output =
        or_default<bool>([&] { return from.boolean("exclude_input_in_output"); }, false,
                         "exclude_input_in_output is not specified, will be set to false");
    cancellation_check_period_ms =
        or_default<int>([&] { return from.integer("cancellation_check_period_ms"); }, 100,
                        "cancellation_check_period_ms is not specified, will be set to 100 (ms)");
    stats_check_period_ms =
        or_default<int>([&] { return from.integer("stats_check_period_ms"); }, 100,
                        "stats_check_period_ms is not specified, will be set to 100 (ms)");
  }
};
