#pragma once

#include <utility>

#include <ddp/distributed_data_parallel.h>

#include "engine.h"

namespace ddp_bench {

/// Trains with this library's wrapper.
class DdpEngine : public Engine {
 public:
  enum class Optimize { AfterBackward, InBackward };

  DdpEngine(
      Task task, const ddp::DistributedDataParallelOptions& options,
      Optimize optimize = Optimize::AfterBackward);

  Messages messages() const override;
  std::optional<double> chosen_cap_mb() const override;

  void register_comm_hook(ddp::CommHook hook) { model_->register_comm_hook(std::move(hook)); }

  ddp::ReductionStats stats() const { return model_->stats(); }

 protected:
  at::Tensor forward(const at::Tensor& x) override { return model_->forward(x); }
  void optimize() override;

 private:
  Optimize when_;
  ddp::DistributedDataParallel<std::shared_ptr<Net>> model_;
};

}  // namespace ddp_bench
