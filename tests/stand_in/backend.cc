// A stand-in for TensorRT-LLM's backend for Triton. README.md says what it does and what that follows.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "generation.h"
#include "lora.h"
#include "metrics.h"
#include "parameters.h"
#include "ranks.h"
#include "requests.h"
#include "responses.h"
#include "triton.h"

namespace {

using Clock = std::chrono::steady_clock;

int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

// How the stand-in behaves where the real one depends on the engine and the GPU.
struct Behaviour {
  std::chrono::duration<double, std::milli> inter_token{0};
  std::chrono::duration<double, std::milli> prefill{0};
  size_t lora_places = 8;  // adapters that the cache has room for

  // From the model's parameters, or else from environment variables with the same names in capitals.
  static Behaviour read(const Json& config)
  {
    const auto setting = [&](std::string name) {
      if (config["parameters"].has(name))
        return config["parameters"][name]["string_value"].as_text();
      std::transform(name.begin(), name.end(), name.begin(), [](char c) { return std::toupper(c); });
      const char* value = std::getenv(name.c_str());
      return std::string(value == nullptr ? "" : value);
    };
    const auto milliseconds = [&](const std::string& name) {
      const std::string value = setting(name);
      return std::chrono::duration<double, std::milli>(value.empty() ? 0 : std::stod(value));
    };
    Behaviour behaviour;
    behaviour.inter_token = milliseconds("stand_in_inter_token_ms");
    behaviour.prefill = milliseconds("stand_in_prefill_ms");
    const std::string places = setting("stand_in_lora_places");
    behaviour.lora_places = places.empty() ? 8 : std::stoul(places);
    return behaviour;
  }
};

// A Triton request, for as long as one of its prompts has an answer to come.
struct TritonRequest {
  TRITONBACKEND_Request* request = nullptr;
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  std::string id;
  std::set<std::string> outputs;
  bool perf_metrics = false, input_count = false, output_count = false;
  size_t batch = 1;
  size_t pending = 1;
  bool failed = false;
  int64_t arrived_ns = 0;

  bool wants(const char* output) const { return outputs.count(output) > 0; }
};

// One prompt of a request, on its way through the engine.
struct Running {
  Running(std::shared_ptr<TritonRequest> of, size_t index, uint64_t number, Generation wanted)
      : triton(std::move(of)), index(index), number(number), request(std::move(wanted))
  {
  }

  std::shared_ptr<TritonRequest> triton;
  size_t index;  // in the batch
  uint64_t number;  // TensorRT-LLM's own id
  Generation request;
  std::vector<Sequence> beams;
  std::atomic<size_t> sent{0};  // tokens of the longest beam that responses have had
  std::atomic<bool> cancelled{false};
  Clock::time_point first_token_at;
  int64_t scheduled_ns = 0, first_token_ns = 0, last_token_ns = 0;

  bool finished() const
  {
    return std::all_of(beams.begin(), beams.end(), [](const auto& beam) { return beam.finished(); });
  }

  size_t length() const
  {
    size_t longest = 0;
    for (const Sequence& beam : beams) longest = std::max(longest, beam.ids().size());
    return longest;
  }
};

using RunningPointer = std::shared_ptr<Running>;

// An instance of the model: the queue, the batch in flight, and the threads that serve them.
class Instance {
 public:
  Instance(TRITONBACKEND_ModelInstance* instance, const std::string& name, const Json& config)
      : instance_(instance),
        model_(ModelConfig::read(config)),
        behaviour_(Behaviour::read(config)),
        adapters_(behaviour_.lora_places),
        ranks_(model_.engine.world_size)
  {
    const std::string engine =
        model_.engine_dir + "/rank" + std::to_string(Ranks::rank()) + ".engine";
    check(std::filesystem::exists(engine), "Error opening engine file: " + engine);
    requests_ = std::make_unique<Gauges>(
        "nv_trt_llm_request_metrics", "request_type", name,
        std::vector<std::string>{"active", "max", "scheduled", "context", "waiting"});
    blocks_ = std::make_unique<Gauges>(
        "nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", name,
        std::vector<std::string>{"max", "free", "used", "tokens_per"});
    counts_ = std::make_unique<Gauges>(
        "stand_in", "count", name,
        std::vector<std::string>{"responses", "tokens", "finished", "cancelled", "failed"});
    report();
    engine_ = std::thread(&Instance::run, this);
    cancellations_ = std::thread(&Instance::watch_cancellations, this);
    statistics_ = std::thread(&Instance::report_statistics, this);
  }

  ~Instance()
  {
    {
      std::lock_guard lock(mutex_);
      shutdown_ = true;
    }
    changed_.notify_all();
    stopped_.notify_all();
    engine_.join();
    cancellations_.join();
    statistics_.join();
  }

  void enqueue(TRITONBACKEND_Request* request)
  {
    try {
      const std::string id = request_id(request);
      if (flag(request, "stop")) {
        stop(id);
        send_empty(request, "");
      } else {
        start(request, id);
      }
    } catch (const std::exception& error) {
      send_empty(request, error.what());
    }
  }

 private:
  void stop(const std::string& id)
  {
    if (id.empty())
      throw std::runtime_error("Trying to stop a request but request ID is not provided");
    std::lock_guard lock(mutex_);
    for (const auto* list : {&waiting_, &active_})
      for (const RunningPointer& running : *list)
        if (running->triton->id == id) running->cancelled = true;
  }

  void start(TRITONBACKEND_Request* request, const std::string& id)
  {
    std::vector<Generation> generations = read_generations(request, model_);
    auto triton = std::make_shared<TritonRequest>();
    triton->request = request;
    triton->id = id;
    triton->outputs = output_names(request);
    triton->perf_metrics = flag(request, "return_perf_metrics");
    triton->input_count = flag(request, "return_num_input_tokens");
    triton->output_count = flag(request, "return_num_output_tokens");
    triton->batch = triton->pending = generations.size();
    triton->arrived_ns = now_ns();
    std::lock_guard lock(mutex_);
    if (model_.max_queue_size > 0 &&
        waiting_.size() + generations.size() > size_t(model_.max_queue_size))
      throw std::runtime_error(format(
          "Maximum queue size of %ld has been reached, please try again later",
          model_.max_queue_size));
    require(TRITONBACKEND_ResponseFactoryNew(&triton->factory, request));
    for (size_t i = 0; i < generations.size(); ++i)
      waiting_.push_back(
          std::make_shared<Running>(triton, i, ++number_, std::move(generations[i])));
    changed_.notify_all();
  }

  // The engine's thread: each turn makes a token of every sequence in the batch.
  void run()
  {
    std::list<RunningPointer> batch;
    while (admit(batch)) {
      const auto begun = Clock::now();
      bool made = false;
      for (auto running = batch.begin(); running != batch.end();) {
        made |= begun >= (*running)->first_token_at;
        running = advance(**running, begun) ? std::next(running) : batch.erase(running);
      }
      const auto pause = made ? behaviour_.inter_token : std::chrono::duration<double, std::milli>(0.2);
      if (pause.count() > 0)
        std::this_thread::sleep_until(begun + std::chrono::duration_cast<Clock::duration>(pause));
    }
  }

  // Moves requests from the queue into the batch; waits while there is nothing to do. Returns whether
  // there is something, or may be.
  bool admit(std::list<RunningPointer>& batch)
  {
    for (const RunningPointer& running : next(batch))
      if (begin(*running)) batch.push_back(running);
    std::lock_guard lock(mutex_);
    active_.assign(batch.begin(), batch.end());
    return !batch.empty() || !shutdown_;
  }

  // What leaves the queue. In static batching, a whole batch ends before another begins.
  std::list<RunningPointer> next(const std::list<RunningPointer>& batch)
  {
    std::unique_lock lock(mutex_);
    active_.assign(batch.begin(), batch.end());
    changed_.wait(lock, [&] { return shutdown_ || !batch.empty() || !waiting_.empty(); });
    std::list<RunningPointer> next;
    const size_t places = size_t(model_.engine.max_batch_size);
    const bool open = !model_.static_batching || batch.empty();
    while (open && !waiting_.empty() && batch.size() + next.size() < places) {
      next.push_back(waiting_.front());
      waiting_.pop_front();
    }
    return next;
  }

  bool begin(Running& running)
  {
    try {
      if (model_.static_batching && running.request.streaming) {
        running.request.streaming = false;
        running.request.exclude_input = true;
      }
      validate(running.request, model_);
      // An engine without the plugin takes no notice of adapters.
      if (model_.engine.lora && running.request.lora.task_id)
        running.request.shift = adapters_.shift(running.request.lora, model_.engine);
      running.request.lora = {};
    } catch (const NotCached& error) {
      send_failure(running, error.what());
      return false;
    } catch (const std::exception& error) {
      send_failure(running, std::string("Encountered an error when fetching new request: ") + error.what());
      return false;
    }
    for (int beam = 0; beam < running.request.beam_width; ++beam)
      running.beams.emplace_back(running.request, beam, model_.engine.vocab_size);
    running.scheduled_ns = now_ns();
    running.first_token_at =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(behaviour_.prefill);
    return true;
  }

  // Makes the next token of a request and sends what there is to send. Returns whether it goes on.
  bool advance(Running& running, Clock::time_point now)
  {
    if (running.cancelled) {
      ++cancelled_;
      return send(running, true);
    }
    if (now < running.first_token_at) return true;
    const size_t before = running.length();
    for (Sequence& beam : running.beams)
      if (!beam.finished()) beam.advance();
    tokens_ += running.length() - before;
    running.last_token_ns = now_ns();
    if (before == 0) running.first_token_ns = running.last_token_ns;
    const bool finished = running.finished();
    finished_ += finished;
    if (finished || running.request.streaming) return send(running, finished);
    return true;
  }

  // Sends a response with what is new; returns whether the request goes on.
  bool send(Running& running, bool final)
  {
    TRITONBACKEND_Response* response = nullptr;
    std::string error;
    try {
      require(TRITONBACKEND_ResponseNewFromFactory(&response, running.triton->factory));
      fill(response, running);
    } catch (const std::exception& caught) {
      error = std::string("Error encountered while populating response: ") + caught.what();
      final = true;
    }
    send(running, response, final, error);
    return !final;
  }

  void send_failure(Running& running, const std::string& error)
  {
    send_error(running, format("Executor failed process requestId %llu due to the following error: ",
                               static_cast<unsigned long long>(running.number)) +
                            error);
  }

  void send_error(Running& running, const std::string& error)
  {
    TRITONBACKEND_Response* response = nullptr;
    ignore(TRITONBACKEND_ResponseNewFromFactory(&response, running.triton->factory));
    send(running, response, true, error);
  }

  void send(
      Running& running, TRITONBACKEND_Response* response, bool final, const std::string& error)
  {
    TritonRequest& triton = *running.triton;
    const bool last = final && triton.pending == 1;
    ++responses_;
    ignore(TRITONBACKEND_ResponseSend(
        response, last ? TRITONSERVER_RESPONSE_COMPLETE_FINAL : 0,
        error.empty() ? nullptr
                      : TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, error.c_str())));
    failed_ += !error.empty();
    triton.failed |= !error.empty();
    if (final && --triton.pending == 0) release(triton);
  }

  void release(TritonRequest& triton)
  {
    const uint64_t begun = uint64_t(triton.arrived_ns), ended = uint64_t(now_ns());
    ignore(TRITONBACKEND_ModelInstanceReportStatistics(
        instance_, triton.request, !triton.failed, begun, begun, ended, ended));
    ignore(TRITONBACKEND_ModelInstanceReportBatchStatistics(
        instance_, 1, begun, begun, ended, ended));
    ignore(TRITONBACKEND_RequestRelease(triton.request, TRITONSERVER_REQUEST_RELEASE_ALL));
    std::lock_guard lock(mutex_);  // another thread may be asking whether the client has gone
    ignore(TRITONBACKEND_ResponseFactoryDelete(triton.factory));
    triton.factory = nullptr;
  }

  void fill(TRITONBACKEND_Response* response, Running& running) const
  {
    const TritonRequest& triton = *running.triton;
    const std::vector<Ids> rows = new_rows(running);
    Ids lengths;
    for (const Ids& row : rows) lengths.push_back(int32_t(row.size()));
    for (const char* name : {"output_ids", "sequence_length"})
      if (!triton.wants(name))
        throw std::runtime_error(
            std::string(name) + " tensor must be present in list of output tensors");
    add_rows(response, "output_ids", rows);
    add_output(response, "sequence_length", {1, int64_t(rows.size())}, lengths);
    if (running.request.return_log_probs) fill_log_probs(response, running);
    if (triton.batch > 1 && triton.wants("batch_index"))
      add_output(response, "batch_index", int32_t(running.index));
    if (triton.input_count && triton.wants("num_input_tokens"))
      add_output(response, "num_input_tokens", int32_t(running.request.prompt.size()));
    if (triton.output_count && triton.wants("num_output_tokens"))
      add_output(response, "num_output_tokens", std::accumulate(lengths.begin(), lengths.end(), 0));
    if (triton.perf_metrics) fill_perf_metrics(response, running);
  }

  // What a response holds of each beam: with streaming the tokens since the last one, or with several
  // beams all so far; else the prompt, unless it is excluded, and all tokens.
  static std::vector<Ids> new_rows(Running& running)
  {
    const bool streaming = running.request.streaming;
    const size_t from = streaming && running.beams.size() == 1 ? running.sent.load() : 0;
    std::vector<Ids> rows;
    for (const Sequence& beam : running.beams) {
      Ids row;
      if (!streaming && !running.request.exclude_input) row = running.request.prompt;
      row.insert(row.end(), beam.ids().begin() + std::ptrdiff_t(std::min(from, beam.ids().size())),
                 beam.ids().end());
      rows.push_back(std::move(row));
    }
    running.sent = running.length();
    return rows;
  }

  // Every token has the same probability, e to the power of -1.
  static void fill_log_probs(TRITONBACKEND_Response* response, const Running& running)
  {
    std::vector<float> sums;
    std::vector<std::vector<float>> rows;
    for (const Sequence& beam : running.beams) {
      sums.push_back(-float(beam.ids().size()));
      rows.emplace_back(beam.ids().size(), -1.0f);
    }
    if (running.triton->wants("output_log_probs")) add_rows(response, "output_log_probs", rows);
    if (running.triton->wants("cum_log_probs"))
      add_output(response, "cum_log_probs", {1, int64_t(sums.size())}, sums);
  }

  // Made whether the request names them or not.
  void fill_perf_metrics(TRITONBACKEND_Response* response, const Running& running) const
  {
    const auto blocks = int32_t(blocks_of(running));
    add_output(response, "kv_cache_alloc_new_blocks", blocks);
    add_output(response, "kv_cache_reused_blocks", int32_t(0));
    add_output(response, "kv_cache_alloc_total_blocks", blocks);
    add_output(response, "arrival_time_ns", running.triton->arrived_ns);
    add_output(response, "first_scheduled_time_ns", running.scheduled_ns);
    add_output(response, "first_token_time_ns", running.first_token_ns);
    add_output(response, "last_token_time_ns", running.last_token_ns);
    add_output(response, "acceptance_rate", 0.0f);
    add_output(response, "total_accepted_draft_tokens", int32_t(0));
    add_output(response, "total_draft_tokens", int32_t(0));
  }

  static constexpr size_t tokens_per_block = 32;

  static size_t blocks_of(const Running& running)
  {
    const size_t tokens = running.request.prompt.size() + running.sent;
    return (tokens + tokens_per_block - 1) / tokens_per_block;
  }

  // A client that goes away cancels its request: Triton is asked from time to time.
  void watch_cancellations()
  {
    const std::chrono::milliseconds period(model_.cancellation_check_period_ms);
    std::unique_lock lock(mutex_);
    while (!stopped_.wait_for(lock, period, [this] { return shutdown_; })) {
      for (const auto* list : {&waiting_, &active_})
        for (const RunningPointer& running : *list) {
          bool cancelled = false;
          if (running->triton->factory != nullptr)
            ignore(TRITONBACKEND_ResponseFactoryIsCancelled(running->triton->factory, &cancelled));
          running->cancelled = running->cancelled || cancelled;
        }
    }
  }

  void report_statistics()
  {
    const std::chrono::milliseconds period(model_.stats_check_period_ms);
    std::unique_lock lock(mutex_);
    while (!stopped_.wait_for(lock, period, [this] { return shutdown_; })) report();
  }

  void report()
  {
    const double most = model_.max_tokens_in_paged_kv_cache > 0
                            ? double(model_.max_tokens_in_paged_kv_cache / int(tokens_per_block))
                            : 1000;
    double used = 0;
    for (const RunningPointer& running : active_) used += double(blocks_of(*running));
    blocks_->set("max", most);
    blocks_->set("used", used);
    blocks_->set("free", most - used);
    blocks_->set("tokens_per", double(tokens_per_block));
    requests_->set("active", double(active_.size()));
    requests_->set("scheduled", double(active_.size()));
    requests_->set("max", double(model_.engine.max_batch_size));
    requests_->set("waiting", double(waiting_.size()));
    counts_->set("responses", double(responses_));
    counts_->set("tokens", double(tokens_));
    counts_->set("finished", double(finished_));
    counts_->set("cancelled", double(cancelled_));
    counts_->set("failed", double(failed_));
  }

  TRITONBACKEND_ModelInstance* instance_;
  ModelConfig model_;
  Behaviour behaviour_;
  LoraCache adapters_;  // of the engine's thread
  Ranks ranks_;
  std::unique_ptr<Gauges> requests_, blocks_, counts_;
  std::mutex mutex_;
  std::condition_variable changed_, stopped_;
  bool shutdown_ = false;
  uint64_t number_ = 0;
  std::deque<RunningPointer> waiting_;
  std::deque<RunningPointer> active_;  // the batch, for other threads to look at
  std::atomic<uint64_t> responses_{0}, tokens_{0}, finished_{0}, cancelled_{0}, failed_{0};
  std::thread engine_, cancellations_, statistics_;
};

Json model_config(TRITONBACKEND_Model* model)
{
  TRITONSERVER_Message* message = nullptr;
  require(TRITONBACKEND_ModelConfig(model, 1, &message));
  const char* text = nullptr;
  size_t size = 0;
  require(TRITONSERVER_MessageSerializeToJson(message, &text, &size));
  Json config = Json::parse(std::string(text, size));
  require(TRITONSERVER_MessageDelete(message));
  return config;
}

TRITONSERVER_Error* failure(const std::string& text)
{
  return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, text.c_str());
}

}  // namespace

extern "C" {

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance)
{
  try {
    TRITONBACKEND_Model* model = nullptr;
    const char* name = nullptr;
    require(TRITONBACKEND_ModelInstanceModel(instance, &model));
    require(TRITONBACKEND_ModelName(model, &name));
    auto state = std::make_unique<Instance>(instance, name, model_config(model));
    require(TRITONBACKEND_ModelInstanceSetState(instance, state.get()));
    state.release();
  } catch (const std::exception& error) {
    return failure(
        std::string("unexpected error when creating modelInstanceState: ") + error.what());
  }
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance)
{
  void* state = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state)) return error;
  delete static_cast<Instance*>(state);
  return nullptr;
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count)
{
  void* state = nullptr;
  if (TRITONSERVER_Error* error = TRITONBACKEND_ModelInstanceState(instance, &state)) return error;
  for (uint32_t i = 0; i < count; ++i) static_cast<Instance*>(state)->enqueue(requests[i]);
  return nullptr;
}

}  // extern "C"
