// An input of a request.

#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "triton.h"

struct Tensor {
  std::vector<int64_t> shape;
  std::string data;
  TRITONSERVER_DataType type = TRITONSERVER_TYPE_INVALID;

  // Row b of the batch, with a batch of one.
  Tensor row(int64_t b) const
  {
    const size_t bytes = data.size() / size_t(shape.at(0));
    Tensor part{shape, data.substr(size_t(b) * bytes, bytes), type};
    part.shape[0] = 1;
    return part;
  }

  template <typename Value>
  std::vector<Value> values() const
  {
    std::vector<Value> list(data.size() / sizeof(Value));
    std::memcpy(list.data(), data.data(), list.size() * sizeof(Value));
    return list;
  }
};
