#pragma once

#include <ddp/distributed_data_parallel.h>

#include "engine.h"

namespace ddp_bench {

/// This library.
class DdpEngine : public Engine {
 public:
  DdpEngine(Task task, const ddp::DistributedDataParallelOptions& options);

  Messages messages() const override;

  /// Before the first step.
  void register_comm_hook(ddp::CommHook hook) { model_->register_comm_hook(std::move(hook)); }

 protected:
  at::Tensor forward(const at::Tensor& x) override { return model_->forward(x); }

 private:
  ddp::DistributedDataParallel<std::shared_ptr<Net>> model_;
};

}  // namespace ddp_bench
