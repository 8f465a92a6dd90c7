// Times an all-reduce of each size, beside memcpy: `ddprun -n 2 costs all_reduce`.
//
// Rank 0 prints a line of JSON for each size: the all-reduce of a tensor in ordinary memory, over
// shm also of one in memory of the backend, as buckets are, and memcpy on all ranks at the same
// time.
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ddp/collectives.h>
#include <ddp/process_group.h>

#include "costs.h"
#include "repetitions.h"

namespace {

struct SweepSettings {
  std::string backend;
  std::vector<int64_t> sizes = {4096, 65536, 1048576, 16777216};
  double seconds = 0.3;
  bool copies = true;
};

class Sweep {
 public:
  explicit Sweep(const SweepSettings& settings)
      : settings_(settings), group_(ddp::default_group()), rank_(group_->getRank()) {}

  void run(int64_t bytes) const {
    const int64_t elements = bytes / static_cast<int64_t>(sizeof(float));
    const auto backend = group_->getBackend(c10::DeviceType::CPU);
    const std::string name = backend->getBackendName();
    time_all_reduce(name, at::empty({elements}, at::kFloat));
    const c10::Device cpu(at::kCPU);
    if (backend->supportsTensorAlloc(cpu.index())) {
      time_all_reduce(name + ", its memory", backend->allocateTensor(elements, at::kFloat));
    }
    if (settings_.copies) time_memcpy(elements);
  }

 private:
  void time_all_reduce(const std::string& what, at::Tensor tensor) const {
    check_sum(tensor);
    tensor.zero_();  // sums of other values would grow with each repetition
    time(what, tensor.nbytes(), [&] { ddp::all_reduce(tensor, c10d::ReduceOp::SUM, group_); });
  }

  void time_memcpy(int64_t elements) const {
    const auto from = at::ones({elements}, at::kFloat);
    const auto to = at::zeros({elements}, at::kFloat).fill_(2);  // so that its pages exist
    time("memcpy", to.nbytes(), [&] {
      std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    });
  }

  // Ranks begin together and repeat the same number of times.
  void time(const std::string& what, size_t bytes, const std::function<void()>& operation) const {
    operation();
    ddp::barrier(group_);
    auto us = at::full({1}, costs::microseconds_of(operation), at::kDouble);
    ddp::broadcast(us, 0, group_);
    const int repetitions = costs::repetitions_for(settings_.seconds, us.item<double>());
    ddp::barrier(group_);
    const auto times = costs::repeat(repetitions, operation);
    if (rank_ == 0) {
      costs::print_line(what, group_->getSize(), static_cast<int64_t>(bytes), times);
    }
    ddp::barrier(group_);
  }

  void check_sum(at::Tensor& tensor) const {
    const int size = group_->getSize();
    tensor.fill_(rank_ + 1);
    ddp::all_reduce(tensor, c10d::ReduceOp::SUM, group_);
    const double expected = size * (size + 1) / 2.0;
    TORCH_CHECK(
        tensor.eq(expected).all().item<bool>(), "costs all_reduce: expected the sum ", expected,
        " in every element, got others on rank ", rank_, " of ", size, ".");
  }

  const SweepSettings& settings_;
  ddp::ProcessGroup group_;
  int rank_;
};

}  // namespace

void costs::add_all_reduce(CLI::App& app) {
  auto* command = app.add_subcommand("all_reduce", "An all-reduce of each size, beside memcpy.");
  static SweepSettings settings;
  command->add_option("--backend", settings.backend, "gloo, shm, ...; empty: the library's choice");
  command->add_option("--sizes", settings.sizes, "bytes, multiples of 4")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{4}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--seconds", settings.seconds, "about how long to repeat each")
      ->check(CLI::Range(0.0, 1000.0))
      ->capture_default_str();
  command->add_flag("!--no-copies", settings.copies, "leave memcpy out");
  command->callback([] {
    ddp::init_process_group(ddp::ProcessGroupOptions().backend(settings.backend));
    {
      const Sweep sweep(settings);
      for (const int64_t bytes : settings.sizes) sweep.run(bytes);
    }
    ddp::barrier();
    ddp::destroy_process_group();
  });
}
