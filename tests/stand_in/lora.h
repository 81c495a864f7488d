// The LoRA adapters that the stand-in has been given: what TensorRT-LLM keeps of them in host memory.

#pragma once

#include <algorithm>
#include <list>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "parameters.h"
#include "tensor.h"

// What a request says of its adapter.
struct LoraTensors {
  std::optional<uint64_t> task_id;
  std::optional<Tensor> weights, config;
};

// An id that is not here: TensorRT-LLM answers with this text alone, without what it says of other errors.
struct NotCached : std::runtime_error {
  using std::runtime_error::runtime_error;
};

const char* const LORA_MODULES[] = {"attn_qkv",    "attn_q",      "attn_k",      "attn_v",
                                    "attn_dense",  "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"};

// What changes the answer of a request with an adapter: by how much its ids are shifted.
inline int lora_shift(const Tensor& weights)
{
  const auto words = weights.values<uint16_t>();
  return 1 + int(std::accumulate(words.begin(), words.end(), uint64_t(0)) % 97);
}

inline std::string lora_type(TRITONSERVER_DataType type)
{
  if (type == TRITONSERVER_TYPE_FP16) return "float16";
  return type == TRITONSERVER_TYPE_BF16 ? "bfloat16" : "float32";
}

// What loraUtils.cpp refuses of the two tensors. They have a batch dimension of 1.
inline void check_lora(const LoraTensors& given, const EngineConfig& engine)
{
  const auto &weights = given.weights->shape, &keys = given.config->shape;
  check(weights.size() == 3, "Invalid shape for lora_weights tensor");
  check(keys.size() == 3, "Invalid shape for lora_keys tensor");
  check(weights[0] == 1 && keys[0] == 1, "Expected batch dimension to be 1 for each lora request");
  check(lora_type(given.weights->type) == engine.data_type,
        "Expected lora weights to be the same data type as base model");
  check(keys[1] == weights[1], "Expected dim1 lora_weights and lora_keys to have the same size");
  const auto rows = given.config->values<int32_t>();
  for (size_t row = 0; row + 2 < rows.size(); row += size_t(keys[2])) {
    const int module = rows[row], layer = rows[row + 1], rank = rows[row + 2];
    check(layer >= 0 && layer < engine.layers,
          "Expected layerId to be in the range [0, numModelLayers)");
    check(rank > 0, "Expected adapterSize to be > 0");
    const std::string name = module >= 0 && module < 8 ? LORA_MODULES[module] : "unknown";
    check(engine.lora_modules.count(name) > 0, "lora module " + name + " not enabled for this model");
    check(rank <= engine.max_lora_rank,
          format("Invalid low_rank (%d). low_rank must be smaller than mMaxLowRank (%d)", rank,
                 engine.max_lora_rank));
  }
}

// The adapters, the one that was asked for last at the front.
class LoraCache {
 public:
  explicit LoraCache(size_t places) : places_(places) {}

  // The shift that a request's adapter makes, which is taken in if its tensors are there.
  int shift(const LoraTensors& given, const EngineConfig& engine)
  {
    const unsigned long long id = *given.task_id;
    if (given.weights || given.config) {
      check(given.weights && given.config,
            "Request for LoRA inference must have both lora_weights and lora_keys");
      check_lora(given, engine);
    }
    const auto known =
        std::find_if(adapters_.begin(), adapters_.end(), [&](auto& a) { return a.first == id; });
    if (known != adapters_.end()) {
      adapters_.splice(adapters_.begin(), adapters_, known);
    } else if (given.weights) {
      adapters_.emplace_front(id, lora_shift(*given.weights));
      if (adapters_.size() > places_) adapters_.pop_back();
    } else {
      throw NotCached(format(
          "LoRA task %llu not found in cache. Please send LoRA weights with request", id));
    }
    return adapters_.front().second;
  }

 private:
  size_t places_;
  std::list<std::pair<uint64_t, int>> adapters_;
};
