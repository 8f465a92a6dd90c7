#include "work/exchange_flat.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

namespace ddp {

StartedCall exchange_flat(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    c10::function_ref<
        WorkPtr(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&)>
        start) {
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  for (const auto& input : inputs) {
    pieces.push_back(input.reshape({-1}));
    sent.push_back(pieces.back().numel());
  }
  int64_t total = 0;
  for (const auto& output : outputs) {
    received.push_back(output.numel());
    total += received.back();
  }
  auto from = at::cat(pieces);
  auto to = at::empty({total}, from.options());
  auto to_each = received;  // a copy, because Gloo clears it
  const auto work = start(to, from, to_each, sent);
  const auto finish = [to, received, outputs] {
    const auto parts = to.split_with_sizes(received);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      at::Tensor(outputs[rank]).copy_(parts[rank].view(outputs[rank].sizes()));
    }
  };
  return {{work}, finish, outputs, {to, from}};
}

}  // namespace ddp
