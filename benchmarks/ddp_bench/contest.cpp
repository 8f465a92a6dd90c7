#include "contest.h"

#include <algorithm>
#include <cstdint>
#include <sstream>

#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>
#include <ddp/collectives.h>

#include "benchmarks/ddp_bench/engines/message_sender.h"
#include "fingerprint.h"
#include "statistics.h"

namespace ddp_bench {
namespace {

// The number of times that a turn sends its messages alone: enough for a median over all rounds.
int sends_of(int iters) { return std::max(2, iters / 4); }

void time_steps(Contestant& contestant, int iters) {
  std::vector<double> step_ms;
  const double cpu_before = cpu_ms();
  for (int step = 0; step < iters; ++step) {
    step_ms.push_back(contestant.engine->step().total_ms());
  }
  contestant.round_cpu_ms.push_back((cpu_ms() - cpu_before) / iters);
  contestant.round_step_ms.push_back(quantile(step_ms, 0.5));
  contestant.step_ms.insert(contestant.step_ms.end(), step_ms.begin(), step_ms.end());
}

void take_turn(
    Contestant& contestant, int iters, MessageSender& sender, const ddp::ProcessGroup& group) {
  contestant.engine->step();  // not timed: the caches hold another contestant's data
  ddp::barrier(group);
  time_steps(contestant, iters);
  contestant.engine->rest();
  if (!contestant.communicates) return;
  const auto messages = contestant.engine->messages();
  ddp::barrier(group);
  for (int send = 0; send < sends_of(iters); ++send) {
    contestant.comm_ms.push_back(sender.send(messages));
  }
}

void average_over_ranks(
    std::vector<double>& values, const ddp::ProcessGroup& group, c10::Device device) {
  auto mean = at::tensor(values, at::kDouble).to(device);
  ddp::all_reduce(mean, c10d::ReduceOp::AVG, group);
  mean = mean.cpu();
  const auto* data = mean.const_data_ptr<double>();
  values.assign(data, data + values.size());
}

// The hashes of all ranks' modes, by rank.
std::vector<std::vector<uint64_t>> gather(
    const std::vector<Ending>& endings, const ddp::ProcessGroup& group) {
  std::string mine;
  for (const auto& ending : endings) mine += std::to_string(ending.fingerprint.hash) + " ";
  std::vector<std::vector<uint64_t>> hashes;
  for (const auto& text : ddp::all_gather_strings(mine, group)) {
    std::istringstream stream(text);
    auto& of_rank = hashes.emplace_back();
    for (uint64_t hash = 0; stream >> hash;) of_rank.push_back(hash);
  }
  return hashes;
}

}  // namespace

std::string Contestant::label() const {
  return bucket_cap_mb ? c10::str(mode, " at ", *bucket_cap_mb, " MiB") : mode;
}

void compete(
    std::vector<Contestant>& contestants, const ContestOptions& options,
    const ddp::ProcessGroup& group, c10::Device device) {
  for (auto& contestant : contestants) {
    for (int step = 0; step < options.warmup; ++step) contestant.engine->step();
    contestant.engine->rest();
  }
  MessageSender sender(group, device);
  for (const auto& contestant : contestants) sender.send(contestant.engine->messages());
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      const size_t turn = round % 2 == 0 ? i : contestants.size() - 1 - i;
      take_turn(contestants[turn], options.iters, sender, group);
    }
  }
  for (auto& contestant : contestants) {
    average_over_ranks(contestant.round_cpu_ms, group, device);
  }
}

std::string check_parameters(
    const std::vector<Contestant>& contestants, const std::vector<at::Tensor>& start,
    const ddp::ProcessGroup& group, Agreement agreement) {
  std::vector<Ending> endings;
  std::vector<std::string> labels;
  std::vector<at::Tensor> first;
  for (const auto& contestant : contestants) {
    if (!contestant.communicates) continue;
    const auto parameters = contestant.engine->parameters();
    if (endings.empty()) first = parameters;
    labels.push_back(contestant.label());
    endings.push_back({labels.back(), fingerprint(parameters), distance(parameters, first, start)});
  }
  const auto of_ranks = disagreement_of_ranks(labels, gather(endings, group));
  return of_ranks.empty() ? disagreement(endings, agreement) : of_ranks;
}

}  // namespace ddp_bench
