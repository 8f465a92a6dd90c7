#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>

#include <ATen/core/Tensor.h>
#include <ddp/diloco.h>
#include <ddp/process_group.h>

namespace ddp {

/// How far a region has come from the outer parameters of a fragment.
struct Difference {
  int64_t round = 0;  // how many exchanges this region has applied
  int64_t step = 0;   // how many inner steps it has taken
  int64_t fragment = 0;
  at::Tensor values;  // 1-D, float32, on the CPU; not changed any more
};

/// The ranks that use the slow link, one of each region, as one of them sees them.
class Leaders {
 public:
  virtual ~Leaders() = default;

  /// Begins an exchange. One at a time.
  ///
  /// \return  the mean of all regions' values, with the same bits in all regions.
  virtual std::shared_future<at::Tensor> exchange(Difference difference) = 0;
  virtual void drop(const std::shared_future<at::Tensor>& mean) noexcept = 0;

  virtual int64_t bytes_sent() const = 0;
  virtual double seconds_sent() const = 0;
};

/// Leaders whose group stays the same; a failure ends it.
class FixedLeaders final : public Leaders {
 public:
  /// \param group  empty: there is one region.
  FixedLeaders(DiLoCoWire wire, ProcessGroup group) : wire_(wire), group_(std::move(group)) {}

  std::shared_future<at::Tensor> exchange(Difference difference) override;
  void drop(const std::shared_future<at::Tensor>& mean) noexcept override;
  int64_t bytes_sent() const override { return bytes_sent_; }
  double seconds_sent() const override { return *seconds_sent_; }

 private:
  int64_t count() const { return group_ ? group_->getSize() : 1; }

  const DiLoCoWire wire_;
  const ProcessGroup group_;
  int64_t round_ = 0;
  int64_t bytes_sent_ = 0;
  // Written by an exchange's thread, which may outlive this.
  const std::shared_ptr<std::atomic<double>> seconds_sent_ =
      std::make_shared<std::atomic<double>>(0);
};

}  // namespace ddp
