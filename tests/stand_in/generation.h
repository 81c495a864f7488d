// What the stand-in's engine makes: token ids that follow from the prompt and the seed alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "lora.h"
#include "parameters.h"

using Ids = std::vector<int32_t>;

// A request as the engine takes it: that of one prompt.
struct Generation {
  Ids prompt;
  int max_tokens = 0;
  int min_tokens = 0;
  int beam_width = 1;
  uint64_t seed = 0;
  std::optional<int32_t> end_id;
  std::vector<Ids> stop_words, bad_words;
  std::optional<int64_t> embedding_bias_length;
  LoraTensors lora;
  int shift = 0;  // by the adapter
  bool streaming = false;
  bool exclude_input = false;
  bool return_log_probs = false;
  bool return_context_logits = false;
  bool return_generation_logits = false;
};

// The sequence of one beam: the prompt's ids over and over, from the seed-th on; the b-th beam begins b
// further. An adapter adds its shift to each. An id that would end a bad word is left out, and so is the end id before min_tokens.
class Sequence {
 public:
  Sequence(const Generation& request, int beam, int vocab_size)
      : request_(request), position_(request.seed + uint64_t(beam)), vocab_size_(vocab_size)
  {
  }

  bool finished() const { return finished_; }
  const Ids& ids() const { return ids_; }

  // Makes the next id, or finishes: by the end id, which is not among the ids, a stop word, whose ids
  // stay, or the length.
  void advance()
  {
    const size_t cycle = request_.prompt.size();
    for (size_t tried = 0; tried < cycle && !finished_; ++tried) {
      const int32_t id = (request_.prompt[position_++ % cycle] + request_.shift) % vocab_size_;
      if (id == request_.end_id) {
        finished_ = int(ids_.size()) >= request_.min_tokens;
        continue;
      }
      ids_.push_back(id);
      if (!ends_with_any(request_.bad_words)) {
        finished_ =
            int(ids_.size()) >= request_.max_tokens || ends_with_any(request_.stop_words);
        return;
      }
      ids_.pop_back();
    }
    finished_ = true;
  }

 private:
  bool ends_with_any(const std::vector<Ids>& words) const
  {
    return std::any_of(words.begin(), words.end(), [this](const Ids& word) {
      return word.size() <= ids_.size() && std::equal(word.rbegin(), word.rend(), ids_.rbegin());
    });
  }

  const Generation& request_;
  uint64_t position_;
  int vocab_size_;
  Ids ids_;
  bool finished_ = false;
};

// The words in a list of shape [2, n]: flat ids, and the offset that each word ends at, padded with -1.
inline std::vector<Ids> read_words(const Ids& list)
{
  check(list.size() % 2 == 0, "Sparse list must not have odd length: ");
  const int32_t count = int32_t(list.size() / 2);
  std::vector<Ids> words;
  int32_t begin = 0;
  for (int32_t i = count; i < 2 * count; ++i) {
    if (list[i] == -1) {
      check(std::all_of(list.begin() + i, list.end(), [](int32_t end) { return end == -1; }),
            "Sparse list must not have additional -1s: ");
      break;
    }
    check(list[i] <= count, "Sparse list must not have out-of-bound offsets: ");
    check(i == count || list[i] > list[i - 1],
          "Sparse list must not have non-increasing offsets: ");
    words.emplace_back(list.begin() + begin, list.begin() + list[i]);
    begin = list[i];
  }
  return words;
}

// Refuses what TensorRT-LLM refuses once a request leaves the queue, and shortens what is too long.
inline void validate(Generation& request, const ModelConfig& model)
{
  const EngineConfig& engine = model.engine;
  const int prompt = int(request.prompt.size());
  const int longest = engine.longest_prompt(model.chunked_context);
  if (request.end_id)
    check(*request.end_id >= -1 && *request.end_id < engine.vocab_size,
          format("EndId (%d) is not within acceptable range [-1, %d).", *request.end_id,
                 engine.vocab_size));
  if (request.embedding_bias_length)
    check(*request.embedding_bias_length == engine.vocab_size,
          format("The embedding bias shape is not as expected. Expected last dimension to be same "
                 "as vocab size: %d.",
                 engine.vocab_size));
  if (prompt > longest)
    throw std::runtime_error(
        format("Prompt length (%d) exceeds maximum input length (%d). Set log level to info and "
               "check TRTGptModel logs for how maximum input length is set",
               prompt, longest));
  request.max_tokens = std::min(request.max_tokens, engine.max_seq_len - prompt);
  if (request.streaming && model.max_utilization && !model.chunked_context)
    check(prompt + request.max_tokens - 1 <= longest,
          "Request sequence length is potentially greater than max input length. This cannot be "
          "run unless streaming is disabled, context chunking is enabled or the "
          "GUARANTEED_NO_EVICT scheduling policy is used");
  check(!request.return_context_logits || engine.context_logits,
        "Return context logit need to build engine with gather_context_logits");
  check(!request.return_generation_logits || engine.generation_logits,
        "To return generation logits, gather_generation_logits must be enabled in ExecutorConfig");
  check(request.beam_width <= model.max_beam_width,
        format("Requested beam width %d is larger than configured max beam width %d",
               request.beam_width, model.max_beam_width));
}
