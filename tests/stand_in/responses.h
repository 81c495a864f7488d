// Triton responses, with the outputs of the tensorrt_llm model.

#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "requests.h"
#include "triton.h"

template <typename Value>
constexpr TRITONSERVER_DataType data_type();
template <>
constexpr TRITONSERVER_DataType data_type<int32_t>() { return TRITONSERVER_TYPE_INT32; }
template <>
constexpr TRITONSERVER_DataType data_type<int64_t>() { return TRITONSERVER_TYPE_INT64; }
template <>
constexpr TRITONSERVER_DataType data_type<float>() { return TRITONSERVER_TYPE_FP32; }

template <typename Value>
void add_output(
    TRITONBACKEND_Response* response, const char* name, const std::vector<int64_t>& shape,
    const std::vector<Value>& values)
{
  TRITONBACKEND_Output* output = nullptr;
  require(TRITONBACKEND_ResponseOutput(
      response, &output, name, data_type<Value>(), shape.data(), uint32_t(shape.size())));
  void* buffer = nullptr;
  TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
  int64_t memory_id = 0;
  const uint64_t bytes = values.size() * sizeof(Value);
  require(TRITONBACKEND_OutputBuffer(output, &buffer, bytes, &memory, &memory_id));
  if (bytes > 0) std::memcpy(buffer, values.data(), bytes);
}

// An output of one number, shape [1, 1].
template <typename Value>
void add_output(TRITONBACKEND_Response* response, const char* name, Value value)
{
  add_output(response, name, {1, 1}, std::vector<Value>{value});
}

// One row for each beam, shape [1, beams, n]; shorter ones are padded with -1.
template <typename Value>
void add_rows(
    TRITONBACKEND_Response* response, const char* name, const std::vector<std::vector<Value>>& rows)
{
  size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  std::vector<Value> flat;
  flat.reserve(rows.size() * longest);
  for (const auto& row : rows) {
    flat.insert(flat.end(), row.begin(), row.end());
    flat.resize(flat.size() + longest - row.size(), Value(-1));
  }
  add_output(response, name, {1, int64_t(rows.size()), int64_t(longest)}, flat);
}

// Answers a request at once, with nothing or an error, and gives it back.
inline void send_empty(TRITONBACKEND_Request* request, const std::string& error)
{
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  TRITONBACKEND_Response* response = nullptr;
  ignore(TRITONBACKEND_ResponseFactoryNew(&factory, request));
  ignore(TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  ignore(TRITONBACKEND_ResponseSend(
      response, TRITONSERVER_RESPONSE_COMPLETE_FINAL,
      error.empty() ? nullptr : TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INTERNAL, error.c_str())));
  ignore(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
  ignore(TRITONBACKEND_ResponseFactoryDelete(factory));
}
