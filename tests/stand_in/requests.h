// What a Triton request for the tensorrt_llm model says.

#pragma once

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "generation.h"
#include "parameters.h"
#include "tensor.h"
#include "triton.h"

// Turns an error of Triton's into an exception.
inline void require(TRITONSERVER_Error* error)
{
  if (error == nullptr) return;
  const std::string message = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  throw std::runtime_error(message);
}

// For what may fail without harm: the request it is about may be gone.
inline void ignore(TRITONSERVER_Error* error)
{
  if (error == nullptr) return;
  log_line("ERROR", TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
}

using Tensors = std::map<std::string, Tensor>;

inline std::string request_id(TRITONBACKEND_Request* request)
{
  const char* id = nullptr;
  require(TRITONBACKEND_RequestId(request, &id));
  return id == nullptr ? "" : id;
}

inline std::set<std::string> output_names(TRITONBACKEND_Request* request)
{
  std::set<std::string> names;
  uint32_t count = 0;
  require(TRITONBACKEND_RequestOutputCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    require(TRITONBACKEND_RequestOutputName(request, i, &name));
    names.insert(name);
  }
  return names;
}

inline std::string input_data(TRITONBACKEND_Input* input, uint32_t buffers)
{
  std::string data;
  for (uint32_t i = 0; i < buffers; ++i) {
    const void* buffer = nullptr;
    uint64_t bytes = 0;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t memory_id = 0;
    require(TRITONBACKEND_InputBuffer(input, i, &buffer, &bytes, &memory, &memory_id));
    data.append(static_cast<const char*>(buffer), bytes);
  }
  return data;
}

// A boolean input; one that is not there is false.
inline bool flag(TRITONBACKEND_Request* request, const char* name)
{
  TRITONBACKEND_Input* input = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_RequestInput(request, name, &input)) {
    TRITONSERVER_ErrorDelete(error);
    return false;
  }
  const std::string data = input_data(input, 1);
  return !data.empty() && data[0] != 0;
}

inline Tensors read_tensors(TRITONBACKEND_Request* request)
{
  Tensors tensors;
  uint32_t count = 0;
  require(TRITONBACKEND_RequestInputCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input = nullptr;
    require(TRITONBACKEND_RequestInputByIndex(request, i, &input));
    const char* name = nullptr;
    const int64_t* shape = nullptr;
    TRITONSERVER_DataType type = TRITONSERVER_TYPE_INVALID;
    uint32_t dims = 0, buffers = 0;
    require(TRITONBACKEND_InputProperties(input, &name, &type, &shape, &dims, nullptr, &buffers));
    tensors[name] = {{shape, shape + dims}, input_data(input, buffers), type};
  }
  return tensors;
}

// One set of tensors for each prompt of a batch. Only in a batch of several are prompts padded.
inline std::vector<Tensors> split(const Tensors& tensors)
{
  const auto prompts = tensors.find("input_ids");
  if (prompts == tensors.end())
    throw std::runtime_error("inputTokens or encoderInputFeatures tensor not provided");
  check(prompts->second.shape.size() == 2, "Expected inputTokens tensors to have 2 dimensions");
  const int64_t batch = prompts->second.shape[0];
  if (batch == 1) return {tensors};
  check(tensors.count("input_lengths") > 0, "input lengths tensor not provided");
  const auto lengths = tensors.at("input_lengths").values<int32_t>();
  std::vector<Tensors> rows(static_cast<size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    for (const auto& [name, tensor] : tensors) rows[size_t(b)][name] = tensor.row(b);
    Tensor& prompt = rows[size_t(b)]["input_ids"];
    prompt.data.resize(std::min(prompt.data.size(), size_t(lengths.at(size_t(b))) * 4));
  }
  return rows;
}

template <typename Value>
std::optional<Value> single(const Tensors& tensors, const std::string& name)
{
  const auto tensor = tensors.find(name);
  if (tensor == tensors.end()) return std::nullopt;
  int64_t size = 1;
  for (const int64_t dim : tensor->second.shape) size *= dim;
  check(size == 1 && tensor->second.data.size() >= sizeof(Value), "Invalid size for tensor " + name);
  Value value;
  std::memcpy(&value, tensor->second.data.data(), sizeof value);
  return value;
}

inline std::vector<Ids> words(const Tensors& tensors, const std::string& name)
{
  const auto tensor = tensors.find(name);
  return tensor == tensors.end() ? std::vector<Ids>()
                                 : read_words(tensor->second.values<int32_t>());
}

// What samplingConfig.cpp refuses. The values have no effect on the stand-in otherwise.
inline void check_sampling(const Tensors& tensors)
{
  const auto at_least = [&](const char* input, const char* text, bool above) {
    if (const auto value = single<float>(tensors, input))
      check(above ? *value > 0 : *value >= 0, text);
  };
  if (const auto top_k = single<int32_t>(tensors, "runtime_top_k"))
    check(*top_k >= 0, "topK.value() >= 0");
  if (const auto top_p = single<float>(tensors, "runtime_top_p"))  // 0 and below: none
    check(*top_p <= 1, "topP.value() <= 1.f");
  at_least("temperature", "temperature.value() >= 0.f", false);
  if (const auto tokens = single<int32_t>(tensors, "min_tokens"))
    check(*tokens >= 0, "minTokens.value() >= 0");
  at_least("beam_search_diversity_rate", "beamSearchDiversityRate.value() >= 0.f", false);
  at_least("repetition_penalty", "repetitionpenalty.value() > 0.f", true);
}

inline std::optional<Tensor> optional_tensor(const Tensors& tensors, const std::string& name)
{
  const auto tensor = tensors.find(name);
  return tensor == tensors.end() ? std::nullopt : std::optional<Tensor>(tensor->second);
}

inline Generation read_generation(const Tensors& tensors, bool streaming, bool exclude_input)
{
  Generation request;
  request.streaming = streaming;
  request.exclude_input =
      single<bool>(tensors, "exclude_input_in_output").value_or(exclude_input);
  request.prompt = tensors.at("input_ids").values<int32_t>();
  const auto max_tokens = single<int32_t>(tensors, "request_output_len");
  if (!max_tokens) throw std::runtime_error("request_output_len is not present in the request");
  request.max_tokens = *max_tokens;
  request.end_id = single<int32_t>(tensors, "end_id");
  request.beam_width = single<int32_t>(tensors, "beam_width").value_or(1);
  check(request.beam_width > 0, "beamWidth > 0");
  check_sampling(tensors);
  request.seed = single<uint64_t>(tensors, "seed").value_or(0);
  request.min_tokens = single<int32_t>(tensors, "min_tokens").value_or(0);
  request.bad_words = words(tensors, "bad_words_list");
  request.stop_words = words(tensors, "stop_words_list");
  const auto bias = tensors.find("embedding_bias");
  if (bias != tensors.end()) request.embedding_bias_length = bias->second.shape.back();
  request.return_log_probs = single<bool>(tensors, "return_log_probs").value_or(false);
  request.return_context_logits = single<bool>(tensors, "return_context_logits").value_or(false);
  request.return_generation_logits =
      single<bool>(tensors, "return_generation_logits").value_or(false);
  request.lora.task_id = single<uint64_t>(tensors, "lora_task_id");
  request.lora.weights = optional_tensor(tensors, "lora_weights");
  request.lora.config = optional_tensor(tensors, "lora_config");
  check(!request.prompt.empty(), "!mInputTokenIds.empty()");
  check(request.max_tokens > 0, "mMaxNewTokens > 0");
  return request;
}

// Every prompt of a Triton request.
inline std::vector<Generation> read_generations(
    TRITONBACKEND_Request* request, const ModelConfig& model)
{
  const std::vector<Tensors> rows = split(read_tensors(request));
  const bool streaming = flag(request, "streaming");
  if (!model.decoupled && rows.size() > 1)
    throw std::runtime_error(
        "Batch size > 1 requires the tensorrt_llm backend to be using decoupled transaction policy");
  if (!model.decoupled && streaming)
    throw std::runtime_error(
        "Streaming is only supported if model is deployed using decoupled mode.");
  std::vector<Generation> generations;
  for (const Tensors& row : rows)
    generations.push_back(read_generation(row, streaming, model.exclude_input_in_output));
  return generations;
}
