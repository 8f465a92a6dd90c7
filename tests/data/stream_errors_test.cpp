// Streams whose transforms throw, and ranks whose streams differ: no rank gets out of step.
#include <chrono>
#include <cstdint>
#include <future>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/internal/gather_strings.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "stream/position.h"
#include "streams.h"
#include "support/error_of.h"
#include "support/ranks.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::make_sharded_stream;
using ddp::StreamEnds;
using Numbers = std::vector<int>;
using Batches = std::vector<Numbers>;

/// 0 to count - 1, of which some throw.
auto numbers_without(int count, const std::set<int>& failing) {
  const auto numbers = ddp::from_generator([count](int64_t first) {
    return [count, i = static_cast<int>(first)]() mutable {
      return i < count ? std::optional<int>(i++) : std::optional<int>();
    };
  });
  return ddp::transform(numbers, [failing](int i) {
    if (failing.count(i) > 0) throw std::runtime_error("no number");
    return i;
  });
}

template <typename Source>
auto batches_of(const Source& source, size_t size, const StreamOptions& options, bool drops) {
  return ddp::batched(
      make_sharded_stream(source, options), size, [](Numbers samples) { return samples; }, drops);
}

/// Takes at most `count` batches, as a loop that catches errors does.
template <typename Stream>
Batches taken(Stream& stream, size_t count, int& errors) {
  Batches all;
  while (all.size() < count) {
    try {
      auto batch = stream.next();
      if (!batch) break;
      all.push_back(*batch);
    } catch (const c10::Error&) {
      ++errors;
    }
  }
  return all;
}

TEST_CASE("a loop that catches a sample's error gets as many batches as the other ranks") {
  const auto source = numbers_without(17, {2, 8});
  const int workers = GENERATE(0, 2);
  const auto of_rank = [&](int rank) {
    return batches_of(
        source, 2, StreamOptions().num_replicas(2).rank(rank).workers(workers),
        /*drops=*/true);
  };
  int errors = 0;
  auto first = of_rank(0), second = of_rank(1);
  CHECK(taken(second, 9, errors) == Batches{{1, 3}, {5, 7}, {9, 11}, {13, 15}});
  CHECK(errors == 0);
  CHECK(taken(first, 2, errors) == Batches{{0}, {4, 6}});
  CHECK(errors == 1);
  const auto state = bytes_of_archive(first);
  CHECK(taken(first, 9, errors) == Batches{{10}, {12, 14}});
  CHECK(errors == 2);

  auto resumed = of_rank(1);  // rank 0's position serves it
  load_bytes(resumed, state);
  CHECK(taken(resumed, 9, errors) == Batches{{9, 11}, {13, 15}});
}

TEST_CASE("a batch whose samples all threw is an error of its own") {
  auto batches = batches_of(numbers_without(5, {1, 2, 3, 4}), 2, {}, /*drops=*/false);
  int errors = 0;
  CHECK(taken(batches, 1, errors).size() == 1);
  CHECK(errors == 1);
  const auto next_error = [&] { return error_of<c10::Error>([&] { batches.next(); }); };
  CHECK_THAT(next_error(), ContainsText("sample 2 of epoch 0"));
  CHECK_THAT(next_error(), ContainsText("sample 3 of epoch 0"));
  CHECK_THAT(
      next_error(), ContainsText("BatchedStream::next: expected a sample or more in a batch, got "
                                 "errors for all 2"));
  CHECK_THAT(next_error(), ContainsText("sample 4 of epoch 0"));
  CHECK_THAT(next_error(), ContainsText("got errors for all 1, "));
  CHECK_FALSE(batches.next());
}

TEST_CASE("samples of a batch in which next() threw are not lost") {
  auto batches = batches_of(numbers_without(6, {1}), 3, {}, /*drops=*/false);
  const auto begin = batches.bookmark();
  CHECK_THAT(error_of([&] { batches.next(); }), ContainsText("no number"));
  CHECK_THAT(
      error_of([&] { bytes_of_archive(batches); }),
      ContainsText("BatchedStream::save: expected a position between batches, got 2 samples"));
  CHECK_THAT(
      error_of([&] { batches.bookmark(); }),
      ContainsText("BatchedStream::bookmark: expected a position between batches"));
  batches.set_epoch(0);
  CHECK(*batches.next() == Numbers{0, 2});
  CHECK(!bytes_of_archive(batches).empty());
  begin();
  CHECK_THAT(error_of([&] { batches.next(); }), ContainsText("no number"));
  batches.set_epoch(1);
  CHECK_THAT(error_of([&] { batches.next(); }), ContainsText("no number"));
  CHECK(*batches.next() == Numbers{0, 2});
}

TEST_CASE("rebind throws on every rank where one is within a batch") {
  const auto error = error_of_all(2, [](const Rank& self) {
    auto batches = batches_of(
        numbers_without(8, {2}), 2, StreamOptions().num_replicas(2).rank(self.rank),
        /*drops=*/false);
    if (self.rank == 0) error_of([&] { batches.next(); });
    batches.rebind(self.group);
  });
  CHECK_THAT(
      error, ContainsText("ShardedStream::rebind: expected a position between batches on every "
                          "rank, got 2 samples of a batch in which next() threw on rank 0 of 2"));
}

TEST_CASE("ranks have a common end without an option") {
  auto streams = streams_of_ranks(numbers_without(5, {}), {}, 2);
  CHECK(rest_of(streams[0]) == Numbers{0, 2});
  CHECK(rest_of(streams[1]) == Numbers{1, 3});
}

/// This thread's stream is rank 1's of the default group; another rank compares its own fields.
template <typename Body>
void beside_fields(const ddp::StreamFields& fields, const Body& body) {
  const auto options = ddp::ProcessGroupOptions()
                           .backend("gloo")
                           .store(c10::make_intrusive<c10d::HashStore>())
                           .world_size(2)
                           .timeout(std::chrono::seconds(20));
  auto peer = std::async(std::launch::async, [&] {
    const auto group = ddp::make_process_group(ddp::ProcessGroupOptions(options).rank(0));
    return error_of([&] {
      ddp::agree(
          ddp::text_of(fields), group, "comparing the sources of streams", ddp::problem_of_fields);
    });
  });
  ddp::init_process_group(ddp::ProcessGroupOptions(options).rank(1));
  const auto own = error_of(body);
  ddp::destroy_process_group();
  CHECK(own == peer.get());
}

TEST_CASE("the first next() compares the files of the default group's ranks") {
  const TemporaryFolder folder;
  const auto files = files_of_lines(folder, {3, 3});
  const auto fields_of = [](const std::vector<std::string>& names) {
    auto fields = ddp::lines(names).impl()->fields();
    const ddp::StreamFields given{
        {"shuffle_buffer", "0"}, {"seed", "0"}, {"by_shard", "false"}, {"ends", "Common"}};
    fields.insert(fields.end(), given.begin(), given.end());
    return fields;
  };
  beside_fields(fields_of(files), [&] {
    auto stream = make_sharded_stream(ddp::lines(files));
    CHECK(rest_of(stream) == std::vector<std::string>{"1", "3", "5"});
  });
  std::string error;
  beside_fields(fields_of({files[1], files[0]}), [&] {
    auto stream = make_sharded_stream(ddp::lines(files));
    error = error_of<c10::Error>([&] { stream.next(); });
    TORCH_CHECK(false, error);
  });
  CHECK_THAT(
      error, ContainsText("ShardedStream::next: expected the same source and options on every "
                          "rank, got hash of file names="));
  CHECK_THAT(
      error, ContainsText("on rank 1 of 2. Make the stream alike on every rank, with the "
                          "files in the same order."));
}

}  // namespace
