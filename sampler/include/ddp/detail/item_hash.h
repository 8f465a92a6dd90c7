#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/export.h>
#include <torch/data/example.h>

namespace ddp::detail {

/// Hashes the items of a data set; equal items have the same hash in every process.
class DDP_API ItemHash {
 public:
  uint64_t value() const { return value_; }

  void add(const at::Tensor& tensor);  // its dtype, shape and bytes
  void add(const std::string& text);

  template <typename Data, typename Target>
  void add(const torch::data::Example<Data, Target>& example) {
    add(example.data);
    if constexpr (!std::is_void_v<Target>) add(example.target);
  }

  template <typename Item>
  void add(const std::vector<Item>& items) {
    for (const auto& item : items) add(item);
  }

  template <typename First, typename Second>
  void add(const std::pair<First, Second>& pair) {
    add(pair.first);
    add(pair.second);
  }

  template <typename... Parts>
  void add(const std::tuple<Parts...>& tuple) {
    std::apply([this](const Parts&... parts) { (add(parts), ...); }, tuple);
  }

  template <typename Number>
  void add(const Number& number) {
    constexpr bool is_number = std::is_arithmetic_v<Number> || std::is_enum_v<Number>;
    static_assert(
        is_number,
        "check_dataset() takes items of tensors, numbers and texts, in torch::data::Example, "
        "std::vector, std::pair or std::tuple: map the data set to these, a struct to "
        "std::make_tuple() of its members");
    if constexpr (is_number) add_bytes(&number, sizeof number);
  }

 private:
  void add_bytes(const void* data, size_t size);

  uint64_t value_ = 0;
};

}  // namespace ddp::detail
