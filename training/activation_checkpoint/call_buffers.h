#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp {

/// The buffers of a call's modules: what it found in those that it wrote, so that a repetition
/// finds the same.
class CallBuffers {
 public:
  /// Before the call.
  /// \param statistics  what the call writes and does not read.
  CallBuffers(
      const std::vector<at::Tensor>& buffers, const std::vector<std::string>& names,
      std::vector<at::Tensor> statistics);
  /// After the call: forgets the values of buffers that it did not write.
  void end_call();

  /// Whether the tensor is among the statistics.
  bool has_statistics(const at::Tensor& tensor) const;
  const std::vector<at::Tensor>& statistics() const { return statistics_; }

  /// For its scope, buffers have the values that the call found, and afterwards those of before.
  /// The version numbers as well: operations outside that saved them do not notice.
  class Restored {
   public:
    /// \throws c10::Error  a buffer that the call did not write was changed since.
    explicit Restored(const CallBuffers& call);
    ~Restored();
    Restored(const Restored&) = delete;
    Restored& operator=(const Restored&) = delete;

   private:
    struct Before {
      at::Tensor buffer;
      int64_t version;
      at::Tensor value;
    };
    std::vector<Before> before_;
  };

 private:
  struct Found {
    at::Tensor buffer;
    std::string name;
    int64_t version;
    at::Tensor value;  // undefined after a call that did not write it
  };
  std::vector<Found> found_;
  std::vector<at::Tensor> statistics_;
};

}  // namespace ddp
