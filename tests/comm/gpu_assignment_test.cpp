#include "comm/backends/gpu_assignment.h"

#include <future>

#include <c10/util/Exception.h>
#include <ddp/process_group.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "support/ranks.h"
#include "support/warnings.h"

#include "support/catch.h"

using ddp::choose_gpu;
using ddp::GpuAssignment;
using ddp::Setting;

namespace {

/// The answer that each rank of a world gets: "yes", "no" or its error.
std::vector<std::string> ask_all(
    const std::vector<GpuAssignment>& gpus, const std::string& required_by) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = static_cast<int>(gpus.size());
  std::vector<std::future<std::string>> futures;
  for (int rank = 0; rank < size; ++rank) {
    futures.push_back(std::async(std::launch::async, [=] {
      const ddp::StartupBarrier barrier{
          store, rank, size, ddp::Deadline(std::chrono::seconds(20)), "test"};
      c10d::PrefixStore votes("votes", store);
      try {
        return std::string(
            ddp::all_have_gpus(barrier, votes, gpus[rank], required_by) ? "yes" : "no");
      } catch (const c10::Error& error) {
        return std::string(error.what_without_backtrace());
      }
    }));
  }
  std::vector<std::string> answers;
  for (auto& future : futures) answers.push_back(future.get());
  return answers;
}

/// The warnings of rank 0, on its thread.
std::vector<std::string> warnings_of_first(const std::vector<GpuAssignment>& gpus) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = static_cast<int>(gpus.size());
  std::vector<std::future<std::vector<std::string>>> futures;
  for (int rank = 0; rank < size; ++rank) {
    futures.push_back(std::async(std::launch::async, [=] {
      const ddp::testing::Warnings warnings;
      const ddp::StartupBarrier barrier{
          store, rank, size, ddp::Deadline(std::chrono::seconds(20)), "test"};
      c10d::PrefixStore votes("votes", store);
      ddp::all_have_gpus(barrier, votes, gpus[rank], "");
      return warnings.texts;
    }));
  }
  std::vector<std::string> texts;
  for (auto& future : futures) {
    for (auto& text : future.get()) texts.push_back(std::move(text));
  }
  return texts;
}

const GpuAssignment kFirst{"", 0, "GPU 1 of host a"};
const GpuAssignment kSecond{"", 1, "GPU 2 of host a"};
const GpuAssignment kElsewhere{"", 0, "GPU 1 of host b"};
const GpuAssignment kUnknown{"", {}, ""};
const GpuAssignment kNone{"expected a GPU, but there is none. Buy one", {}, ""};

using Answers = std::vector<std::string>;

}  // namespace

TEST_CASE("the local rank selects the GPU, unless there is only one", "[comm][pure][once]") {
  CHECK(choose_gpu(Setting{"LOCAL_RANK", "1"}, 4).device == 1);
  CHECK(choose_gpu(Setting{"SLURM_LOCALID", "3"}, 1).device == 0);
  CHECK(choose_gpu({}, 1).device == 0);
  CHECK_FALSE(choose_gpu({}, 2).device);
  CHECK(choose_gpu({}, 2).why_not.empty());
  // The local rank is not needed, so its value does not matter.
  CHECK(choose_gpu(Setting{"LOCAL_RANK", "x"}, 1).why_not.empty());
  CHECK_FALSE(choose_gpu(Setting{"LOCAL_RANK", "x"}, 0).device);
}

TEST_CASE("without a GPU for the local rank the reason names both", "[comm][pure][errors][once]") {
  CHECK_THAT(choose_gpu({}, 0).why_not, ContainsText("sees none. Check nvidia-smi"));
  const auto gpu = choose_gpu(Setting{"LOCAL_RANK", "2"}, 2);
  CHECK_FALSE(gpu.device);
  CHECK_THAT(
      gpu.why_not, ContainsText("expected LOCAL_RANK from 0 to 1, for this process sees 2 GPUs, "
                                "got \"2\"") &&
                       ContainsText("CUDA_VISIBLE_DEVICES") && ContainsText("backend(\"gloo\")"));
  CHECK_THROWS_AS(choose_gpu(Setting{"LOCAL_RANK", "x"}, 2), c10::ValueError);
}

TEST_CASE("all ranks agree on whether each has a GPU of its own", "[comm][ranks][once]") {
  CHECK(ask_all({kFirst}, "") == Answers{"yes"});
  CHECK(ask_all({kFirst, kSecond, kElsewhere}, "") == Answers(3, "yes"));
  CHECK(ask_all({kUnknown, kUnknown}, "") == Answers(2, "yes"));
  CHECK(ask_all({kFirst, kNone, kSecond}, "") == Answers(3, "no"));
  CHECK(ask_all({kFirst, kFirst}, "") == Answers(2, "no"));
  CHECK(ask_all({kFirst, kSecond}, "nccl") == Answers(2, "yes"));
}

TEST_CASE("where only some ranks have a GPU, a warning names one without", "[comm][pure][once]") {
  CHECK(ddp::describe_gpus_for_some(0, 4, "").empty());
  CHECK(ddp::describe_gpus_for_some(4, 4, "rank 0 on a has none").empty());
  CHECK(ddp::describe_gpus_for_some(1, 1, "rank 0 on a has none").empty());
  CHECK_THAT(
      ddp::describe_gpus_for_some(1, 64, "rank 7 on node3: it sees none"),
      ContainsText("1 of 64 ranks has no GPU of its own") &&
          ContainsText("rank 7 on node3: it sees none. ") && ContainsText("backend(\"nccl\")"));
}

TEST_CASE("rank 0 warns of a rank without a GPU", "[comm][ranks][once]") {
  CHECK(warnings_of_first({kFirst, kSecond}).empty());
  CHECK(warnings_of_first({kNone, kNone}).empty());
  const auto warnings = warnings_of_first({kFirst, kNone, kSecond});
  REQUIRE(warnings.size() == 1);
  CHECK_THAT(
      warnings[0], ContainsText("test: 1 of 3 ranks has no GPU") && ContainsText("rank 1 on ") &&
                       ContainsText(kNone.why_not));
  CHECK_THAT(warnings_of_first({kFirst, kFirst}).at(0), ContainsText("ranks 0 and 1"));
}

TEST_CASE(
    "if NCCL is required, all ranks name the rank that has no GPU", "[comm][ranks][errors][once]") {
  auto answers = ask_all({kFirst, kNone, kSecond}, "nccl");
  CHECK(answers == Answers(3, answers[0]));
  CHECK(answers[0] == "test on rank 1 of 3: backend nccl: " + kNone.why_not + ".");

  answers = ask_all({kFirst, kFirst}, "nccl");
  CHECK(answers == Answers(2, answers[0]));
  CHECK_THAT(
      answers[0], ContainsText("backend nccl: expected a GPU for each rank, got the same one") &&
                      ContainsText("GPU 1 of host a. Start one process per GPU"));
  CHECK_THAT(answers[0], ContainsText("ranks 0 and 1") || ContainsText("ranks 1 and 0"));
}

TEST_CASE("a rank takes the GPU of its device_id", "[comm]") {
  const auto first = choose_gpu(Setting{"LOCAL_RANK", "0"}, 4, c10::Device(at::kCUDA, 3));
  CHECK(first.device == 3);
  const auto missing = choose_gpu(std::nullopt, 2, c10::Device(at::kCUDA, 2));
  CHECK_FALSE(missing.device);
  CHECK_THAT(
      missing.why_not, ContainsText("expected a device_id from cuda:0 to cuda:1, got cuda:2"));
}

TEST_CASE("options that choose NCCL's algorithms are the same on all ranks", "[comm][errors]") {
  using namespace ddp::testing;
  const bool agree = GENERATE(false, true);
  const auto texts = errors_of_ranks(2, [&](const Rank& self) {
    ddp::NcclOptions nccl;
    // These need not be the same.
    nccl.max_ctas(self.rank + 1).comm_name("of " + std::to_string(self.rank));
    nccl.nvls_ctas(8);
    if (agree || self.rank == 0) nccl.collnet(true);
    const auto options = ddp::ProcessGroupOptions().backend("gloo").nccl(nccl);
    make_process_group(ddp::ProcessGroupOptions(options)
                           .store(c10::make_intrusive<c10d::PrefixStore>("options", self.store))
                           .rank(self.rank)
                           .world_size(self.size));
  });
  if (agree) {
    CHECK(texts == std::vector<std::string>(2));
  } else {
    CHECK_THAT(texts, Each(ContainsText("NcclOptions of nvls_ctas 8 and collnet 1")));
  }
}

TEST_CASE("options of GPUs are checked before ranks meet", "[comm][errors]") {
  const auto error_of = [](const ddp::ProcessGroupOptions& options) {
    try {
      ddp::make_process_group(options);
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
    return std::string();
  };
  using Options = ddp::ProcessGroupOptions;
  using Nccl = ddp::NcclOptions;
  CHECK_THAT(
      error_of(Options().device_id(c10::Device(at::kCPU))),
      ContainsText("device_id(): expected cuda:N, got cpu"));
  CHECK_THAT(
      error_of(Options().backend("gloo").device_id(c10::Device(at::kCUDA, 0))),
      ContainsText("device_id(): expected backend nccl, got cpu:gloo,cuda:gloo"));
  CHECK_THAT(
      error_of(Options().nccl(Nccl().max_ctas(0))),
      ContainsText("NcclOptions: expected max_ctas from 1 to 64, got 0"));
  CHECK_THAT(
      error_of(Options().nccl(Nccl().min_ctas(8).max_ctas(4))),
      ContainsText("expected min_ctas of at most max_ctas, got 8 and 4"));
  CHECK_THAT(
      error_of(Options().nccl(Nccl().cta_policy(3))),
      ContainsText("NcclOptions: expected cta_policy from 0 to 2, got 3"));
  CHECK_THAT(
      error_of(Options().nccl(Nccl().nvls_ctas(0))),
      ContainsText("NcclOptions: expected nvls_ctas from 1 to 64, got 0"));
  CHECK_THAT(
      error_of(Options().nccl(Nccl().traffic_class(256))),
      ContainsText("NcclOptions: expected traffic_class from 0 to 255, got 256"));
  CHECK_THAT(
      error_of(Options().nccl(Nccl().comm_name(std::string(65, 'x')))),
      ContainsText(
          "expected a comm_name of at most 64 printable characters of ASCII, got 65 bytes."));
  for (const auto* name : {"a\nb", "\x7f", "\xc3\xa4"}) {
    CHECK_THAT(
        error_of(Options().nccl(Nccl().comm_name(name))),
        ContainsText("bytes with others among them. Choose another."));
  }
}
