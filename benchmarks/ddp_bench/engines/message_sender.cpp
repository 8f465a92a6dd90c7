#include "message_sender.h"

#include <numeric>
#include <utility>

#include <ATen/ops/zeros.h>
#include <ddp/collectives.h>
#include <torch/cuda.h>

namespace ddp_bench {

MessageSender::MessageSender(ddp::ProcessGroup group, c10::Device device)
    : group_(std::move(group)),
      memory_(at::zeros({0}, at::dtype(at::kFloat).device(device))),
      backend_memory_(memory_) {}

at::Tensor& MessageSender::memory_for(const Messages& messages) {
  const auto& sizes = messages.elements;
  const auto elements = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const auto backend = group_->getBackend(memory_.device().type());
  const bool from_backend = messages.in_backend_memory && memory_.is_cpu() &&
                            backend->supportsTensorAlloc(memory_.device().index());
  auto& memory = from_backend ? backend_memory_ : memory_;
  if (memory.numel() < elements) {
    memory = from_backend ? backend->allocateTensor(elements, memory_.options()).zero_()
                          : at::zeros({elements}, memory_.options());
  }
  return memory;
}

double MessageSender::send(const Messages& messages) {
  const auto& sizes = messages.elements;
  const auto& memory = memory_for(messages);
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    parts.push_back(memory.narrow(0, begin, size));
    begin += size;
  }

  const auto start = Clock::now();
  std::vector<c10::intrusive_ptr<c10d::Work>> under_way;
  for (auto& part : parts) {
    under_way.push_back(ddp::all_reduce_async(part, c10d::ReduceOp::SUM, group_));
    if (messages.one_by_one) under_way.back()->wait();
  }
  if (!messages.one_by_one) {
    for (const auto& work : under_way) work->wait();
  }
  if (memory.is_cuda()) torch::cuda::synchronize();
  return milliseconds(start, Clock::now());
}

}  // namespace ddp_bench
