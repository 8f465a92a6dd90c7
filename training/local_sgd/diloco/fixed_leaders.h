#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>

#include <ddp/diloco.h>
#include <ddp/process_group.h>

#include "local_sgd/diloco/leaders.h"

namespace ddp {

/// Leaders whose group stays the same; a failure ends it.
class FixedLeaders final : public Leaders {
 public:
  /// \param group  empty: there is one region.
  FixedLeaders(Wire wire, ProcessGroup group) : wire_(wire), group_(std::move(group)) {}

  std::shared_future<at::Tensor> exchange(Difference difference) override;
  void drop(const std::shared_future<at::Tensor>& mean) noexcept override;
  int64_t bytes_sent() const override { return bytes_sent_; }
  double seconds_sent() const override { return *seconds_sent_; }

 private:
  int64_t count() const { return group_ ? group_->getSize() : 1; }

  const Wire wire_;
  const ProcessGroup group_;
  int64_t round_ = 0;
  int64_t bytes_sent_ = 0;
  // Written by an exchange's thread, which may outlive this.
  const std::shared_ptr<std::atomic<double>> seconds_sent_ =
      std::make_shared<std::atomic<double>>(0);
};

}  // namespace ddp
