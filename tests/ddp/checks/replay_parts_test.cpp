// The parts of replay_every that need no other rank.
#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "ddp/replay/repeat_scope.h"
#include "ddp/replay/replay_verdict.h"
#include "ddp/replay/tensor_message.h"
#include "support/error_of.h"

#include "support/catch.h"

namespace ddp {
namespace replaying {
namespace {

using namespace testing;

ReplayedBatch batch(uint64_t own, uint64_t next, uint64_t third = 0) {
  return {{own, 1}, {next, 1}, {third, 1}};
}

}  // namespace

TEST_CASE("a third rank decides a disputed batch", "[ddp][vote]") {
  using Ranks = std::vector<int>;
  const std::vector<std::string> hosts{"a", "b", "c", "d"};
  const auto wrong = [&](const std::vector<ReplayedBatch>& batches, int stride = 1) {
    std::vector<int> job_ranks;
    for (size_t rank = 0; rank < batches.size(); ++rank) {
      job_ranks.push_back(stride * static_cast<int>(rank));
    }
    return judge(
        batches, {hosts.begin(), hosts.begin() + static_cast<int>(batches.size())}, job_ranks);
  };
  const auto right = batch(5, 5, 5);
  CHECK(wrong({right, right, right}).text.empty());
  CHECK(wrong({right, batch(4, 5, 5), right}).wrong == Ranks{1});
  CHECK(wrong({right, batch(5, 4, 5), right}).wrong == Ranks{2});
  CHECK(wrong({right, right, batch(5, 4, 5)}).wrong == Ranks{0});
  CHECK(wrong({batch(3, 4, 5), right, right, right}).wrong == Ranks{0, 1, 2});
  // A rank that is always wrong, of both batches that it computes.
  CHECK(wrong({batch(5, 4, 5), batch(4, 5, 5), right}).wrong == Ranks{1});
  CHECK_THAT(
      wrong({right, batch(4, 5, 5), right}).text,
      ContainsText("forward's outputs of rank 1's batch. By a third rank wrong: rank 1 (host b)."));
  const auto part = wrong({right, batch(4, 5, 5), right}, 4);
  CHECK(part.wrong == Ranks{1});
  CHECK_THAT(
      part.text,
      ContainsText("forward's outputs of the batch of rank 1 (rank 4 of the job). By a third "
                   "rank wrong: rank 1 (rank 4 of the job, host b)."));
  const auto both = wrong({right, batch(4, 5)});
  CHECK(both.wrong == Ranks{0, 1});
  CHECK(both.text.find("does not repeat itself") == std::string::npos);
  // The program may be the cause, too, where there are two ranks.
  const auto two = wrong({batch(4, 5), batch(4, 5)});
  CHECK(two.wrong == Ranks{0, 1});
  CHECK_THAT(
      two.text, ContainsText("Any of these may be wrong: rank 0 (host a), rank 1 (host b).") &&
                    ContainsText("Else the module or the loss does not repeat itself"));
  const auto all = wrong({batch(1, 2, 3), batch(1, 2, 3), batch(1, 2, 3)});
  CHECK(all.wrong.empty());
  CHECK_THAT(all.text, ContainsText("does not repeat itself"));
}

TEST_CASE("a repeated call finds the other rank's numbers and buffers", "[ddp][vote]") {
  const auto buffer = torch::arange(3.0F);
  const std::vector<at::Tensor> buffers{buffer};
  torch::manual_seed(3);
  std::vector<at::Tensor> others;
  for (const auto& t : surroundings_of(buffers, at::kCPU)) others.push_back(t.clone());
  const auto drawn = torch::rand({4});
  torch::manual_seed(5);
  buffer.fill_(9);
  const auto version = buffer._version();
  const auto expected = [] {
    torch::manual_seed(5);
    return torch::rand({4});
  }();
  torch::manual_seed(5);
  {
    const RepeatScope scope(others, AutocastState::current(), buffers, at::kCPU);
    CHECK(torch::rand({4}).equal(drawn));
    CHECK(buffer.equal(torch::arange(3.0F)));
    buffer.mul_(2);
  }
  CHECK(buffer.equal(torch::full({3}, 9.0F)));
  CHECK(buffer._version() == version);
  CHECK(torch::rand({4}).equal(expected));
}

TEST_CASE("a call that cannot be repeated leaves no trace", "[ddp][vote]") {
  const auto buffer = torch::zeros({3}), other = torch::zeros({2});
  const auto overlapping = torch::full({1}, 7.0F).expand({4});
  const std::vector<at::Tensor> buffers{buffer, overlapping, other};
  auto others = surroundings_of({torch::ones({3}), torch::ones({4}), torch::ones({5})}, at::kCPU);
  torch::manual_seed(5);
  const auto expected = torch::rand({4});
  torch::manual_seed(5);
  CHECK(!error_of([&] {
           const RepeatScope scope(others, AutocastState::current(), buffers, at::kCPU);
         }).empty());
  CHECK(buffer.equal(torch::zeros({3})));
  CHECK(torch::rand({4}).equal(expected));
  others.back() = torch::ones({2});
  {
    const RepeatScope scope(others, AutocastState::current(), buffers, at::kCPU);
    CHECK(buffer.equal(torch::ones({3})));
    CHECK(overlapping.equal(torch::full({4}, 7.0F)));
  }
  CHECK(buffer.equal(torch::zeros({3})));
}

TEST_CASE("a message keeps strides and places in a line", "[ddp][vote]") {
  const auto whole = torch::arange(60.0F).view({3, 4, 5});
  const std::vector<at::Tensor> tensors{
      whole.transpose(0, 2),
      whole.select(2, 1),
      torch::ones({1}).expand({4, 7}),
      torch::zeros({0, 3}),
      torch::tensor(2.5, at::kDouble).requires_grad_(),
      {},
      whole.slice(0, 1, 3)};
  TensorMessage message;
  for (const auto& tensor : tensors) message.add(tensor);
  const auto bytes = message.bytes();
  CHECK(TensorMessage::size_of(message.layout()) == bytes.numel());
  const auto read = TensorMessage::read(message.layout(), bytes, at::kCPU);
  REQUIRE(read.size() == tensors.size());
  for (size_t i = 0; i < read.size(); ++i) {
    CAPTURE(i);
    REQUIRE(read[i].defined() == tensors[i].defined());
    if (!read[i].defined()) continue;
    CHECK(read[i].equal(tensors[i]));
    CHECK(read[i].strides() == tensors[i].strides());
    CHECK(read[i].requires_grad() == tensors[i].requires_grad());
    if (read[i].numel() == 0) continue;
    const auto place = [](const at::Tensor& t) {
      return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 512;
    };
    CHECK(place(read[i]) == place(tensors[i]));
  }
  CHECK_THAT(
      error_of([&] {
        message.add(torch::ones({2, 2}).to_sparse());
      }),
      ContainsText("replay_every: expected tensors that have memory of their own"));
}

}  // namespace replaying
}  // namespace ddp
