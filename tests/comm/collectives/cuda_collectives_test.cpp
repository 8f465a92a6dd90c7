// Collectives on tensors of one GPU that several ranks share, over Gloo. The ranks can be threads
// because there is no backward pass: autograd has one thread per GPU and process, and a rank that
// waits for the others on it would block their backward passes.
#include <ddp/collectives.h>
#include <torch/torch.h>

#include "support/cuda.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {
namespace {

using namespace testing;

/// Makes {start, start + 1, ...} on the GPU that all ranks share.
at::Tensor on_gpu(double start, int64_t count = 1000, at::ScalarType dtype = at::kFloat) {
  return (torch::arange(count, torch::dtype(at::kDouble)) + start).to(dtype).to(at::kCUDA);
}

/// The result of `body` on each rank, copied to the CPU.
std::vector<at::Tensor> results(int size, const std::function<at::Tensor(const Rank&)>& body) {
  return run_ranks<at::Tensor>(
      size, testing::over("gloo"), [&](const Rank& self) { return body(self).cpu(); });
}

}  // namespace

TEST_CASE("ranks that share a GPU reduce its tensors", "[cuda][comm]") {
  if (lacks_cuda()) return;
  const int size = GENERATE(1, 2, 4);
  const auto dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kLong);
  CAPTURE(size, dtype);
  const auto sums = results(size, [&](const Rank& self) {
    auto tensor = on_gpu(self.rank, 1000, dtype);
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
    return tensor;
  });
  const auto expected =
      (torch::arange(1000, torch::dtype(at::kDouble)) * size + size * (size - 1) / 2.0).to(dtype);
  for (const auto& sum : sums) CHECK(torch::allclose(sum, expected, 1e-2, 0));
}

TEST_CASE("ranks that share a GPU average its tensors, and take the maximum", "[cuda][comm]") {
  if (lacks_cuda()) return;
  const int size = GENERATE(2, 4);
  const auto op = GENERATE(c10d::ReduceOp::AVG, c10d::ReduceOp::MAX);
  CAPTURE(size);
  const auto reduced = results(size, [&](const Rank& self) {
    auto tensor = on_gpu(self.rank);
    all_reduce(tensor, op, self.group);
    return tensor;
  });
  const auto offset = op == c10d::ReduceOp::AVG ? (size - 1) / 2.0 : size - 1.0;
  for (const auto& tensor : reduced) CHECK(torch::equal(tensor, on_gpu(offset).cpu()));
}

TEST_CASE("ranks that share a GPU broadcast and gather its tensors", "[cuda][comm]") {
  if (lacks_cuda()) return;
  const int size = GENERATE(2, 4);
  CAPTURE(size);
  const auto received = results(size, [&](const Rank& self) {
    auto tensor = on_gpu(self.rank);
    broadcast(tensor, size - 1, self.group);
    return tensor;
  });
  for (const auto& tensor : received) CHECK(torch::equal(tensor, on_gpu(size - 1).cpu()));

  const auto gathered = results(size, [&](const Rank& self) {
    std::vector<at::Tensor> outputs;
    for (int i = 0; i < size; ++i) outputs.push_back(torch::empty({1000}, at::kCUDA));
    all_gather(outputs, on_gpu(self.rank), self.group);
    return torch::stack(outputs);
  });
  for (const auto& rows : gathered) {
    for (int i = 0; i < size; ++i) CHECK(torch::equal(rows[i], on_gpu(i).cpu()));
  }
}

TEST_CASE("a collective runs after earlier work of its stream", "[cuda][comm]") {
  if (lacks_cuda()) return;
  const int size = GENERATE(2, 4);
  CAPTURE(size);
  const auto sums = results(size, [&](const Rank& self) {
    // Up to a second of work, so that the tensor is not computed yet when the host reduces it.
    auto slow = torch::ones({4096, 4096}, at::kCUDA);
    for (int i = 0; i < 20; ++i) slow = slow.mm(torch::eye(4096, at::kCUDA));
    auto tensor = slow[self.rank] * (self.rank + 1);
    all_reduce(tensor, c10d::ReduceOp::SUM, self.group);
    return tensor * 2;
  });
  for (const auto& sum : sums) CHECK(torch::equal(sum, torch::full({4096}, size * (size + 1.0))));
}

}  // namespace ddp
