#include "c10d_engine.h"

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

namespace ddp_bench {
namespace {

constexpr double kMebibyte = 1 << 20;
constexpr int64_t kFirstBucketBytes = int64_t{1} << 20;
constexpr int64_t kBucketBytes = int64_t{25} << 20;
constexpr size_t kBroadcastBytes = size_t{250} << 20;

int64_t to_bytes(double mebibytes) { return static_cast<int64_t>(mebibytes * kMebibyte); }

class C10dEngine : public Engine {
 public:
  C10dEngine(Task given, const ddp::DistributedDataParallelOptions& options)
      : Engine(std::move(given)),
        group_(options.process_group()),
        broadcasts_buffers_(options.broadcast_buffers()) {
    const auto all = parameters();
    std::unordered_map<size_t, std::string> names;
    for (const auto& parameter : task().net->named_parameters()) {
      names.emplace(names.size(), parameter.key());
    }
    std::vector<int64_t> caps;
    for (const double cap : options.bucket_cap_mb_list()) caps.push_back(to_bytes(cap));
    const auto cap = options.bucket_cap_mb();
    const std::vector<bool> sparse(all.size(), false);
    reducer_ = std::make_shared<c10d::Reducer>(
        all, first_buckets(all, caps), group_, sparse, cap ? to_bytes(*cap) : kBucketBytes,
        /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false, names,
        cap ? to_bytes(*cap) : kFirstBucketBytes, /*skip_all_reduce_unused_params=*/false,
        /*use_python_reducer=*/false, caps);
    logger_ = std::make_shared<c10d::Logger>(reducer_);
    reducer_->set_logger(logger_);
    logger_->set_construction_data_and_log("ddp_bench", {}, -1, broadcasts_buffers_, false, false);
  }

  Messages messages() const override {
    Messages messages;
    for (const int64_t bytes : logger_->get_bucket_sizes()) {
      messages.elements.push_back(bytes / static_cast<int64_t>(sizeof(float)));
    }
    return messages;
  }

 protected:
  at::Tensor forward(const at::Tensor& x) override {
    reducer_->prepare_for_forward();
    reducer_->rebuild_buckets();
    const auto buffers = task().net->buffers();
    if (broadcasts_buffers_ && !buffers.empty()) {
      const at::NoGradGuard no_grad;
      c10d::broadcast_coalesced(group_, buffers, kBroadcastBytes);
    }
    auto y = task().net->forward(x);
    reducer_->prepare_for_backward({y});
    return y;
  }

 private:
  // The buckets until the rebuild: one for all gradients, unless there is a list of caps.
  static std::vector<std::vector<size_t>> first_buckets(
      const std::vector<at::Tensor>& parameters, const std::vector<int64_t>& caps) {
    std::vector<size_t> limits(caps.begin(), caps.end());
    if (limits.empty()) limits = {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
        parameters, limits, std::vector<bool>(parameters.size(), false), {}));
    std::reverse(buckets.begin(), buckets.end());
    return buckets;
  }

  ddp::ProcessGroup group_;
  bool broadcasts_buffers_;
  std::shared_ptr<c10d::Reducer> reducer_;
  std::shared_ptr<c10d::Logger> logger_;
};

}  // namespace

std::unique_ptr<Engine> make_c10d(Task task, const ddp::DistributedDataParallelOptions& options) {
  return std::make_unique<C10dEngine>(std::move(task), options);
}

}  // namespace ddp_bench
