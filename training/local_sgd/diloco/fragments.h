#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The elements of all parameters in order, cut into nearly equal runs.
class Fragments {
 public:
  /// \param parameters  floating; at least one element.
  Fragments(std::vector<at::Tensor> parameters, int64_t fragments);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t elements() const { return elements_; }
  int64_t count() const { return count_; }
  /// Elements of fragment `f`: [begin(f), begin(f + 1)).
  int64_t begin(int64_t f) const { return elements_ * f / count_; }
  int64_t size(int64_t f) const { return begin(f + 1) - begin(f); }

  /// The part of a tensor of all elements that belongs to fragment `f`, not a copy.
  at::Tensor part_of(const at::Tensor& all, int64_t f) const;

  /// In which a value of every parameter is exact: double where one of them is, else float32.
  at::ScalarType dtype() const { return dtype_; }
  /// The fragment's values now: 1-D, in dtype(), in host memory of its own.
  at::Tensor read(int64_t f) const;
  /// Makes each parameter `keep` times itself plus (1 - keep) times its element of `values`.
  void write(int64_t f, const at::Tensor& values, double keep) const;

 private:
  const std::vector<at::Tensor> parameters_;
  const int64_t count_;
  const at::ScalarType dtype_;
  int64_t elements_ = 0;
};

}  // namespace ddp
