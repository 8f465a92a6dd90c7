// The order of a stream, the ranks' parts of it, and its workers.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "stream/order.h"
#include "streams.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "tar_files.h"
#include "threads.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::make_sharded_stream;
using ddp::StreamEnds;
using Texts = std::vector<std::string>;

auto numbers_to(int count) {
  return ddp::from_generator([count] {
    return [count, i = 0]() mutable {
      return i < count ? std::optional<int>(i++) : std::optional<int>();
    };
  });
}

Texts texts_to(int count) {
  Texts texts;
  for (int i = 0; i < count; ++i) texts.push_back(std::to_string(i));
  return texts;
}

template <typename Values>
Values sorted_copy(Values values) {
  std::sort(values.begin(), values.end());
  return values;
}

TEST_CASE("a stream gives the lines of all files in their order") {
  const TemporaryFolder folder;
  const auto files =
      Texts{folder.write("a", "one\n\ntwo"), folder.write("b", ""), folder.write("c", "three\r\n")};
  const auto workers = GENERATE(0, 1, 3);
  CHECK(
      all_of(ddp::lines(files), StreamOptions().workers(workers)) ==
      Texts{"one", "", "two", "three\r"});
}

TEST_CASE("a shuffled stream gives each sample once, in an order of its seed and epoch") {
  const TemporaryFolder folder;
  const auto source = ddp::lines(files_of_lines(folder, {20, 0, 13, 30}));
  const auto options = StreamOptions().shuffle_buffer(GENERATE(2, 10, 100)).seed(4);
  auto stream = make_sharded_stream(source, options);
  const auto first = rest_of(stream);
  CHECK(sorted_copy(first) == sorted_copy(texts_to(63)));
  CHECK(first != texts_to(63));
  CHECK(first == all_of(source, StreamOptions(options).workers(3).depth(2)));
  CHECK(first != all_of(source, StreamOptions(options).seed(5)));
  CHECK_FALSE(stream.next());
  stream.set_epoch(1);
  const auto second = rest_of(stream);
  CHECK(sorted_copy(second) == sorted_copy(first));
  CHECK(second != first);
  stream.set_epoch(0);
  CHECK(rest_of(stream) == first);
  stream.set_epoch(0);  // over: once more
  CHECK(rest_of(stream) == first);
}

// The order is part of what a position means: another one would read other samples.
TEST_CASE("the order of a seed stays what it is") {
  const auto options = StreamOptions().shuffle_buffer(5).seed(1);
  CHECK(all_of(numbers_to(8), options) == std::vector<int>{1, 3, 2, 0, 4, 5, 7, 6});
}

TEST_CASE("every order comes as often") {
  std::map<std::vector<size_t>, int> seen;
  constexpr int kSeeds = 24'000;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) ++seen[ddp::shuffled_numbers(4, seed * 1000)];
  CHECK(seen.size() == 24);
  for (const auto& [order, count] : seen) CHECK(std::abs(count - kSeeds / 24) < 160);  // 5 sigma
}

TEST_CASE("ranks take turns in the order of one process") {
  const TemporaryFolder folder;
  const auto source = ddp::lines(files_of_lines(folder, {7, 12, 4}));
  const auto options = StreamOptions().shuffle_buffer(GENERATE(0, 1, 6)).seed(2);
  const int64_t ranks = GENERATE(1, 2, 3, 5);
  const bool drops = GENERATE(false, true);
  CAPTURE(ranks, drops);
  auto streams = streams_of_ranks(
      source, StreamOptions(options).ends(drops ? StreamEnds::Common : StreamEnds::Join), ranks);
  Texts all;
  size_t rounds = 0;
  for (auto round = next_round(streams); !round.empty(); round = next_round(streams)) {
    if (drops) CHECK(round.size() == static_cast<size_t>(ranks));
    all.insert(all.end(), round.begin(), round.end());
    ++rounds;
  }
  auto expected = all_of(source, options);
  if (drops)
    expected.resize(expected.size() / static_cast<size_t>(ranks) * static_cast<size_t>(ranks));
  CHECK(all == expected);
}

TEST_CASE("by_shard gives each rank whole files") {
  const TemporaryFolder folder;
  const auto source = ddp::lines(files_of_lines(folder, {5, 3, 4, 1}));
  const auto whole_files = StreamOptions().by_shard(true).ends(StreamEnds::Join);
  auto plain = streams_of_ranks(source, whole_files, 2);
  CHECK(rest_of(plain[0]) == Texts{"0", "1", "2", "3", "4", "8", "9", "10", "11"});
  CHECK(rest_of(plain[1]) == Texts{"5", "6", "7", "12"});

  auto shuffled = streams_of_ranks(source, StreamOptions(whole_files).shuffle_buffer(4), 2);
  Texts all;
  for (auto& stream : shuffled) {
    for (auto& text : rest_of(stream)) all.push_back(std::move(text));
  }
  CHECK(sorted_copy(all) == sorted_copy(texts_to(13)));
  CHECK_THAT(
      error_of<c10::ValueError>(
          [&] { streams_of_ranks(source, StreamOptions().by_shard(true), 5); }),
      ContainsText("a file or more for each rank with by_shard(true), got 4 for 5 ranks"));
}

TEST_CASE("transforms run in the workers, for a rank's own samples alone") {
  std::atomic<int> calls{0};
  std::atomic<bool> on_this_thread{false};
  const auto here = std::this_thread::get_id();
  const auto source = ddp::transform(
      ddp::transform(numbers_to(20), [](int i) { return std::to_string(i); }),
      [&](const std::string& text) {
        ++calls;
        if (std::this_thread::get_id() == here) on_this_thread = true;
        return std::make_pair(text, text.size());
      });
  auto streams = streams_of_ranks(source, StreamOptions().workers(2), 4);
  const auto own = rest_of(streams[1]);
  REQUIRE(own.size() == 5);
  CHECK(own[4] == std::make_pair(std::string("17"), size_t{2}));
  CHECK(calls == 5);
  CHECK_FALSE(on_this_thread);
}

// The first worker stays in its transform until the second one has begun another.
TEST_CASE("workers transform at the same time, and keep the order") {
  const auto begun = std::make_shared<Count>();
  const auto source = ddp::transform(numbers_to(6), [begun](int i) {
    begun->raise();
    if (i == 0 && !begun->wait_for(2)) return -1;
    return i;
  });
  CHECK(all_of(source, StreamOptions().workers(2)) == std::vector<int>{0, 1, 2, 3, 4, 5});
}

TEST_CASE("a stream draws at most depth samples ahead, and ends its threads") {
  const auto threads = thread_count();
  const auto made = std::make_shared<Count>();
  {
    auto stream = make_sharded_stream(
        ddp::transform(numbers_to(100), [made](int i) { return made->raise(), i; }),
        StreamOptions().workers(2).depth(5));
    REQUIRE(stream.next());
    CHECK(made->wait_for(6));
  }
  CHECK(made->value() == 6);
  CHECK(threads_left(threads));
}

TEST_CASE("an error comes in the place of its sample, which it names, and the stream goes on") {
  const TemporaryFolder folder;
  const auto source =
      ddp::transform(ddp::lines(files_of_lines(folder, {2, 3})), [](std::string text) {
        if (text == "3") throw std::runtime_error("no number");
        return text;
      });
  auto stream = make_sharded_stream(source, StreamOptions().workers(GENERATE(0, 2)));
  Texts texts;
  for (int i = 0; i < 3; ++i) texts.push_back(*stream.next());
  CHECK(
      error_of<c10::Error>([&] { stream.next(); }) ==
      "ShardedStream: expected to load sample 3 of epoch 0, of \"" + folder.file("1.txt") +
          "\" at byte 2, got an error: no number. next() goes on after it.");
  for (auto& text : rest_of(stream)) texts.push_back(std::move(text));
  CHECK(texts == Texts{"0", "1", "2", "4"});
}

TEST_CASE("an error names the file of its sample, also of the first one in it") {
  const TemporaryFolder folder;
  const auto fails = [](const auto& /*sample*/) -> int { throw std::runtime_error("no number"); };
  const auto error = [&](const auto& source, const StreamOptions& options) {
    auto stream = make_sharded_stream(source, options);
    std::string text;
    for (int i = 0; i < 3; ++i) text = error_of<c10::Error>([&] { stream.next(); });
    return text;
  };
  const auto options = StreamOptions().workers(0);
  CHECK_THAT(
      error(ddp::transform(ddp::lines(files_of_lines(folder, {2, 0, 1})), fails), options),
      ContainsText("sample 2 of epoch 0, of \"" + folder.file("2.txt") + "\" at byte 0,"));
  const TemporaryFolder other;
  const auto tar = tar_files(other, {2, 2});
  CHECK_THAT(
      error(ddp::transform(ddp::tar_shards(tar), fails), options),
      ContainsText("of \"" + tar[1] + "\" at byte 0,"));
  const auto packed = ddp::packed(
      ddp::transform(
          ddp::lines({folder.write("a", "abc\nd\n"), folder.write("b", "ef\n")}),
          [](const std::string& line) { return std::vector<int>(line.begin(), line.end()); }),
      2);
  CHECK_THAT(
      error(ddp::transform(packed, fails), options),
      ContainsText("of \"" + folder.file("b") + "\" at byte 0,"));
}

TEST_CASE("a document at the begin of a later file is named where it fails") {
  const TemporaryFolder folder;
  const auto lines = ddp::lines({folder.write("a", "1\n"), folder.write("b", "x\n")});
  auto stream = make_sharded_stream(
      ddp::packed(
          ddp::transform(
              lines, [](const std::string& line) { return std::vector<int>{std::stoi(line)}; }),
          1),
      StreamOptions().workers(0));
  CHECK(stream.next());
  const auto error = error_of<c10::Error>([&] { stream.next(); });
  CHECK_THAT(error, ContainsText("in \"" + folder.file("b") + "\" at byte 0, got an error: stoi"));
  CHECK_THAT(error, ContainsText("return an empty document to leave it out"));
}

TEST_CASE("a file that is gone throws at each call, until it is there") {
  const TemporaryFolder folder;
  const auto files = files_of_lines(folder, {2, 2});
  auto stream = make_sharded_stream(ddp::lines(files), StreamOptions().workers(GENERATE(0, 1)));
  const auto bytes = read_bytes(files[1]);
  std::filesystem::remove(files[1]);
  CHECK(stream.next() == "0");
  CHECK(stream.next() == "1");
  for (int i = 0; i < 2; ++i) {
    CHECK_THAT(
        error_of<c10::Error>([&] { stream.next(); }),
        ContainsText("expected to read \"" + files[1] + "\", got: No such file"));
  }
  folder.write("1.txt", bytes + "4\n");
  CHECK_THAT(
      error_of<c10::Error>([&] { stream.next(); }),
      ContainsText("to have 4 bytes, as when the source was made, got 6"));
  folder.write("1.txt", bytes);
  CHECK(rest_of(stream) == Texts{"2", "3"});
}

TEST_CASE("sources refuse files that are none, and twice the same") {
  const TemporaryFolder folder;
  const auto error = [](Texts files) {
    return error_of<c10::ValueError>([&] { ddp::lines(std::move(files)); });
  };
  CHECK_THAT(error({}), ContainsText("lines: expected at least one file, got none"));
  CHECK_THAT(error({folder.file("x")}), ContainsText("No such file or directory"));
  CHECK_THAT(error({folder.path()}), ContainsText("a folder, a pipe or another thing"));
  const auto file = folder.write("a", "1");
  CHECK_THAT(error({file, file}), ContainsText("expected each file once"));
}

TEST_CASE("a stream refuses options outside their ranges") {
  const auto error = [](const StreamOptions& options) {
    return error_of<c10::ValueError>([&] { make_sharded_stream(numbers_to(1), options); });
  };
  CHECK_THAT(
      error(StreamOptions().shuffle_buffer(-1)), ContainsText("expected shuffle_buffer from 0"));
  CHECK_THAT(error(StreamOptions().workers(-1)), ContainsText("expected workers from 0"));
  CHECK_THAT(error(StreamOptions().depth(0)), ContainsText("expected depth from 1"));
  CHECK_THAT(error(StreamOptions().rank(0)), ContainsText("both num_replicas and rank"));
  CHECK_THAT(
      error(StreamOptions().num_replicas(2).rank(2)), ContainsText("a rank in [0, 2), got 2"));
  CHECK_THAT(error(StreamOptions().num_replicas(0).rank(0)), ContainsText("num_replicas >= 1"));
  CHECK_THAT(
      error(StreamOptions().num_replicas(1).rank(0).by_shard(true).ends(StreamEnds::Common)),
      Catch::Equals(""));
}

TEST_CASE("batched collates a rank's samples, and drops a last batch where it is to") {
  const bool drop_last = GENERATE(false, true);
  auto batches = ddp::batched(
      make_sharded_stream(numbers_to(8)), 3, [](std::vector<int> samples) { return samples; },
      drop_last);
  const auto all = rest_of(batches);
  auto expected = std::vector<std::vector<int>>{{0, 1, 2}, {3, 4, 5}, {6, 7}};
  if (drop_last) expected.pop_back();
  CHECK(all == expected);
  CHECK_FALSE(batches.next());
  CHECK_THAT(
      error_of<c10::ValueError>([] {
        ddp::batched(make_sharded_stream(numbers_to(8)), 0, [](std::vector<int> s) { return s; });
      }),
      ContainsText("expected a batch_size >= 1"));
}

TEST_CASE("BatchStream refuses ranks that would begin epochs in different steps") {
  const auto error = [](const StreamOptions& options) {
    return error_of<c10::ValueError>([&] {
      auto stream = make_sharded_stream(numbers_to(5), options);
      ddp::BatchStream(stream, 2);
    });
  };
  const auto joined = StreamOptions().ends(StreamEnds::Join);
  CHECK_THAT(
      error(StreamOptions(joined).num_replicas(2).rank(0)),
      ContainsText("with StreamEnds::Common on more than one rank, got StreamEnds::Join on 2"));
  CHECK(error(joined).empty());
  CHECK(error(StreamOptions().num_replicas(2).rank(0)).empty());
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    auto stream = make_sharded_stream(numbers_to(5), joined);
    ddp::BatchStream(stream, 2).rebind(self.group);
  });
  for (const auto& text : errors) CHECK_THAT(text, ContainsText("got StreamEnds::Join on 2 ranks"));
}

TEST_CASE("BatchStream gives the epochs of a stream") {
  const auto source = numbers_to(5);
  const auto options = StreamOptions().shuffle_buffer(5);
  auto stream = make_sharded_stream(source, options);
  ddp::BatchStream epochs(stream, 2);
  const auto all = rest_of(epochs);
  REQUIRE(all.size() == 10);
  CHECK(epochs.epoch() == 1);
  CHECK(std::vector<int>(all.begin(), all.begin() + 5) == all_of(source, options));
  CHECK(std::set<int>(all.begin() + 5, all.end()).size() == 5);

  auto batches = ddp::batched(
      make_sharded_stream(source), 2, [](std::vector<int> samples) { return samples; });
  ddp::BatchStream batch_epochs(batches, 2);
  CHECK(rest_of(batch_epochs).size() == 6);
}

}  // namespace
