// Positions: what a stream saves, and how it goes on, on any number of ranks.
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ddp/collectives.h>

#include "streams.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/regroup.h"
#include "tar_files.h"

#include "support/catch.h"

namespace {

using namespace ddp::testing;
using ddp::make_sharded_stream;
using ddp::StreamEnds;
using ddp::StreamSource;
using Texts = std::vector<std::string>;

// The text of any sample.
std::string as_text(const std::string& line) { return line; }
std::string as_text(int number) { return std::to_string(number); }
std::string as_text(const at::Tensor& tokens) {
  std::string text;
  for (int64_t i = 0; i < tokens.numel(); ++i)
    text += std::to_string(tokens[i].item<int64_t>()) + ' ';
  return text;
}
std::string as_text(const std::map<std::string, std::string>& files) {
  std::string text;
  for (const auto& [name, bytes] : files) text += name + '=' + bytes + ' ';
  return text;
}

template <typename T>
Texts as_texts(const std::vector<T>& samples) {
  Texts texts;
  for (const auto& sample : samples) texts.push_back(as_text(sample));
  return texts;
}

auto counted_numbers(int count) {
  return ddp::from_generator([count](int64_t first) {
    return [count, i = static_cast<int>(first)]() mutable {
      return i < count ? std::optional<int>(i++) : std::optional<int>();
    };
  });
}

StreamSource<at::Tensor> documents(const TemporaryFolder& folder) {
  const auto tokens =
      ddp::transform(ddp::lines(files_of_lines(folder, {11, 1, 30})), [](const std::string& line) {
        return std::vector<int>(static_cast<size_t>(std::stoi(line)) % 5, std::stoi(line));
      });
  return ddp::packed(tokens, 4, -1);
}

struct Kills {
  size_t count = 0;
  std::string problem;  // the first thing that went wrong
};

/// Trains `epochs` epochs; after some rounds every rank is killed, and others go on at what a rank
/// saved.
template <typename T>
Kills kill_and_resume(const StreamSource<T>& source, const StreamOptions& options, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto below = [&](int count) {
    return static_cast<int>(random() % static_cast<unsigned>(count));
  };
  Kills kills;
  std::string state;
  for (size_t epoch = 0; epoch < 2; ++epoch) {
    Texts all;
    for (bool is_over = false; !is_over; ++kills.count) {
      auto streams = streams_of_ranks(
          source,
          StreamOptions(options).ends(StreamEnds::Join).workers(below(3)).depth(1 + below(9)),
          1 + below(5));
      for (auto& stream : streams) {
        if (!state.empty()) load_bytes(stream, state);
        stream.set_epoch(epoch);
      }
      for (int rounds = below(9); rounds > 0 && !is_over; --rounds) {
        const auto round = as_texts(next_round(streams));
        all.insert(all.end(), round.begin(), round.end());
        is_over = round.size() < streams.size();
      }
      state =
          bytes_of_archive(streams[static_cast<size_t>(below(static_cast<int>(streams.size())))]);
      for (const auto& stream : streams) {
        if (!is_over && bytes_of_archive(stream) != state)
          kills.problem = "ranks save other states";
      }
    }
    auto whole = make_sharded_stream(source, options);
    whole.set_epoch(epoch);
    if (all != as_texts(rest_of(whole)) && kills.problem.empty()) {
      kills.problem = "another order than that of one process";
    }
  }
  return kills;
}

TEST_CASE("200 kills, resumes and changes of ranks lose no sample and repeat none") {
  const TemporaryFolder folder;
  const auto lines = ddp::lines(files_of_lines(folder, {23, 0, 1, 40, 17}));
  const auto tar = ddp::tar_shards(tar_files(folder, {13, 1, 20}));
  const auto packed_file = ddp::packed_tokens(token_files(folder, {40, 7, 101}), 3);
  const TemporaryFolder texts;
  const auto packed = documents(texts);
  size_t count = 0;
  const auto run = [&](const auto& source, int64_t buffer, int seed) {
    CAPTURE(buffer, seed);
    const auto kills =
        kill_and_resume(source, StreamOptions().seed(3).shuffle_buffer(buffer), seed);
    CHECK(kills.problem.empty());
    CHECK_THAT(kills.problem, Catch::Equals(""));
    count += kills.count;
  };
  for (const int seed : seeds(2)) {
    for (const int64_t buffer : {0, 1, 7, 1000}) {
      run(lines, buffer, seed);
      run(counted_numbers(50), buffer, seed);
      run(tar, buffer, seed);
      run(packed_file, buffer, seed);
      run(packed, buffer, seed);
    }
  }
  CHECK(count >= 200);
}

TEST_CASE("a compressed tar file resumes, too") {
  const TemporaryFolder folder;
  const auto tar = ddp::tar_shards(tar_files(folder, {13, 20}, "z"));
  CHECK_THAT(
      kill_and_resume(tar, StreamOptions().shuffle_buffer(GENERATE(0, 5)), 1).problem,
      Catch::Equals(""));
}

TEST_CASE("a generator without a begin draws the samples before once more") {
  const auto source = ddp::from_generator(
      [] { return [i = 0]() mutable { return i < 30 ? std::optional<int>(i++) : std::nullopt; }; });
  CHECK_THAT(
      kill_and_resume(source, StreamOptions().shuffle_buffer(GENERATE(0, 4)), 2).problem,
      Catch::Equals(""));
}

// A stream of a million samples saves as many bytes as one of ten.
TEST_CASE("a position has one size, wherever it is") {
  const auto size_at = [](int64_t samples) {
    auto stream = make_sharded_stream(
        ddp::from_generator([](int64_t first) {
          return [i = first]() mutable { return std::optional<int64_t>(i++); };
        }),
        StreamOptions().workers(0));
    for (int64_t i = 0; i < samples; ++i) stream.next();
    return bytes_of_archive(stream).size();
  };
  CHECK(size_at(100'000) <= size_at(1) + 64);  // digits, and what ZIP files are padded with
}

// Reads at most a buffer and a round, however far the position is.
TEST_CASE("resuming reads no more than a buffer and a round") {
  const auto drawn = std::make_shared<int64_t>(0);
  const auto source = ddp::from_generator([drawn](int64_t first) {
    return [drawn, i = first]() mutable { return ++*drawn, std::optional<int64_t>(i++); };
  });
  const auto options = StreamOptions().workers(0).shuffle_buffer(10);
  std::string state;
  {
    auto streams = streams_of_ranks(source, options, 3);
    for (int i = 0; i < 1000; ++i) next_round(streams);
    state = bytes_of_archive(streams[2]);
  }
  *drawn = 0;
  auto stream = make_sharded_stream(source, options);
  load_bytes(stream, state);
  CHECK(stream.next() >= 3000 - 10);
  CHECK(*drawn <= 20);
}

TEST_CASE("load names what differs, and changes nothing") {
  const TemporaryFolder folder, other;
  const auto files = files_of_lines(folder, {5, 5});
  const auto options = StreamOptions().shuffle_buffer(3);
  auto stream = make_sharded_stream(ddp::lines(files), options);
  stream.next();
  const auto state = bytes_of_archive(stream);
  const auto error = [&](const StreamSource<std::string>& source, const StreamOptions& changed) {
    auto loading = make_sharded_stream(source, changed);
    const auto first = *loading.next();
    const auto text = error_of<c10::ValueError>([&] { load_bytes(loading, state); });
    loading.set_epoch(1);
    loading.set_epoch(0);
    CHECK(loading.next() == first);
    return text;
  };
  const auto same = ddp::lines(files);
  CHECK_THAT(
      error(same, StreamOptions(options).seed(2)),
      ContainsText("expected seed=0 as when it was saved, got seed=2"));
  CHECK_THAT(
      error(same, StreamOptions(options).shuffle_buffer(4)), ContainsText("shuffle_buffer=3"));
  CHECK_THAT(error(same, StreamOptions(options).by_shard(true)), ContainsText("by_shard=false"));
  CHECK_THAT(
      error(ddp::lines({files[0]}), options),
      ContainsText("files=2 as when it was saved, got files=1"));
  CHECK_THAT(error(ddp::lines({files[1], files[0]}), options), ContainsText("hash of file names"));
  CHECK_THAT(
      error(ddp::lines(files_of_lines(other, {4, 6})), options),
      ContainsText("hash of file sizes"));
  CHECK_THAT(
      error_of<c10::ValueError>([&] {
        auto numbers = make_sharded_stream(counted_numbers(3), options);
        load_bytes(numbers, state);
      }),
      ContainsText("source=lines as when it was saved, got source=generator"));
  const TemporaryFolder moved;  // the same files elsewhere are the same
  auto elsewhere = make_sharded_stream(ddp::lines(files_of_lines(moved, {5, 5})), options);
  load_bytes(elsewhere, state);
  CHECK(rest_of(elsewhere).size() == 9);

  torch::serialize::OutputArchive empty;
  std::ostringstream bytes;
  empty.save_to(bytes);
  CHECK_THAT(
      error_of<c10::ValueError>([&] { load_bytes(elsewhere, bytes.str()); }),
      ContainsText("expected a text named \"position\", got none"));
}

TEST_CASE("a common end stays the end for other ranks") {
  auto streams = streams_of_ranks(counted_numbers(7), StreamOptions().ends(StreamEnds::Common), 4);
  next_round(streams);
  CHECK(next_round(streams).empty());
  auto one = make_sharded_stream(counted_numbers(7), StreamOptions());
  load_bytes(one, bytes_of_archive(streams[0]));
  CHECK_FALSE(one.next());
  one.set_epoch(1);
  CHECK(one.next() == 0);
}

TEST_CASE("a rank of whole files resumes its own position, and other ranks at an epoch's begin") {
  const TemporaryFolder folder;
  const auto source = ddp::lines(files_of_lines(folder, {5, 3, 4}));
  const auto options = StreamOptions().by_shard(true).ends(StreamEnds::Join);
  auto streams = streams_of_ranks(source, options, 2);
  const auto begin = bytes_of_archive(streams[0]);
  auto three = streams_of_ranks(source, options, 3);
  load_bytes(three[2], begin);
  CHECK(rest_of(three[2]).size() == 4);

  streams[1].next();
  const auto state = bytes_of_archive(streams[1]);
  auto again = streams_of_ranks(source, options, 2);
  load_bytes(again[1], state);
  CHECK(rest_of(again[1]) == Texts{"6", "7"});
  const auto error = error_of<c10::ValueError>([&] { load_bytes(again[0], state); });
  CHECK_THAT(error, ContainsText("rank=1 as when it was saved, got rank=0"));
  CHECK_THAT(error, ContainsText("Checkpointer::add_per_rank instead of add"));
}

TEST_CASE("the common end of whole files loads on any number of ranks") {
  const TemporaryFolder folder;
  const auto source = ddp::lines(files_of_lines(folder, {5, 3, 4}));
  const auto options = StreamOptions().by_shard(true);
  const auto states = run_ranks<std::string>(2, [&](const Rank& self) {
    auto stream =
        make_sharded_stream(source, StreamOptions(options).num_replicas(2).rank(self.rank));
    stream.rebind(self.group);
    CHECK(rest_of(stream).size() == 3);
    return bytes_of_archive(stream);
  });
  auto three = streams_of_ranks(source, options, 3);
  load_bytes(three[2], states[0]);
  CHECK_FALSE(three[2].next());
  // The end of one rank alone says nothing of the others.
  auto joined = streams_of_ranks(source, StreamOptions(options).ends(StreamEnds::Join), 2);
  rest_of(joined[1]);
  const auto own_end = bytes_of_archive(joined[1]);
  CHECK_THAT(
      error_of<c10::ValueError>([&] { load_bytes(joined[0], own_end); }),
      ContainsText("rank=1 as when it was saved, got rank=0"));
}

TEST_CASE("bookmark takes a stream back") {
  auto stream = make_sharded_stream(
      counted_numbers(40), StreamOptions().shuffle_buffer(8).workers(GENERATE(0, 2)));
  for (int i = 0; i < 11; ++i) stream.next();
  const auto go_back = stream.bookmark();
  const auto rest = rest_of(stream);
  stream.set_epoch(3);
  go_back();
  CHECK(stream.epoch() == 0);
  CHECK(rest_of(stream) == rest);
}

TEST_CASE("rebind shares what is left with other ranks") {
  const auto taken = run_ranks<std::vector<int>>(3, [](const Rank& self) {
    auto stream = make_sharded_stream(
        counted_numbers(20), StreamOptions().num_replicas(3).rank(self.rank).shuffle_buffer(4));
    std::vector<int> own;
    for (int i = 0; i < 2; ++i) own.push_back(*stream.next());
    const auto two = self.rank < 2 ? regroup(self, "two", self.rank, 2) : nullptr;
    if (!two) return own;
    stream.rebind(two);
    for (const int number : rest_of(stream)) own.push_back(number);
    return own;
  });
  const auto order = all_of(counted_numbers(20), StreamOptions().shuffle_buffer(4));
  std::vector<int> merged;
  for (size_t i = 0; i < 2; ++i) {
    for (const auto& own : taken) merged.push_back(own[i]);
  }
  for (size_t i = 2; i < 9; ++i) {
    for (size_t rank = 0; rank < 2; ++rank) merged.push_back(taken[rank][i]);
  }
  CHECK(merged == order);
}

TEST_CASE("bookmark takes a stream back to the ranks before rebind") {
  const auto taken = run_ranks<std::vector<int>>(1, [](const Rank& self) {
    auto stream = make_sharded_stream(counted_numbers(7), StreamOptions().num_replicas(2).rank(1));
    const auto go_back = stream.bookmark();
    stream.rebind(self.group);
    go_back();
    return rest_of(stream);
  });
  CHECK(taken[0] == std::vector<int>{1, 3, 5});
}

TEST_CASE("rebind knows that a rank with a sample less is at the end") {
  const auto left = run_ranks<size_t>(2, [](const Rank& self) {
    auto stream = make_sharded_stream(
        counted_numbers(3), StreamOptions().num_replicas(2).rank(self.rank).ends(StreamEnds::Join));
    for (int i = 0; i < 2 - self.rank; ++i) stream.next();
    stream.rebind(self.group);
    const auto rest = rest_of(stream).size();
    stream.set_epoch(1);
    return rest * 10 + rest_of(stream).size();
  });
  CHECK(left == std::vector<size_t>{2, 1});
}

TEST_CASE("rebind throws on every rank where ranks cannot go on together") {
  const auto error = [](const StreamOptions& options, auto&& before) {
    return error_of_all(2, [&](const Rank& self) {
      auto stream = make_sharded_stream(
          counted_numbers(30), StreamOptions(options).num_replicas(1).rank(0).seed(before(self)));
      for (int i = 0; i < self.rank * 2; ++i) stream.next();
      stream.rebind(self.group);
    });
  };
  CHECK_THAT(
      error({}, [](const Rank&) { return 0; }),
      ContainsText("expected every rank to have used as many samples, got epoch 0, position 0 on "
                   "rank 0 of 2, and epoch 0, position 2 on another"));
  CHECK_THAT(
      error({}, [](const Rank& self) { return self.rank; }),
      ContainsText(
          "the same source and options on every rank, got seed=0 on rank 0 and seed=1 on rank 1"));
  CHECK_THAT(
      error(StreamOptions().by_shard(true), [](const Rank&) { return 0; }),
      ContainsText("the begin or the end of an epoch with by_shard(true), got epoch 0, position 2 "
                   "on rank 1"));
}

TEST_CASE("ranks of whole files end in common, where the option says so") {
  const TemporaryFolder folder;
  const auto source = ddp::lines(files_of_lines(folder, {50, 31, 40, 3}));
  const int64_t depth = GENERATE(1, 5, 100);
  const auto counts = run_ranks<std::vector<size_t>>(2, [&](const Rank& self) {
    auto stream = make_sharded_stream(
        source, StreamOptions()
                    .by_shard(true)
                    .ends(StreamEnds::Common)
                    .depth(depth)
                    .num_replicas(2)
                    .rank(self.rank));
    stream.rebind(self.group);
    std::vector<size_t> taken{0};
    for (; taken[0] < 20; ++taken[0]) stream.next();
    const auto go_back = stream.bookmark();
    taken.push_back(rest_of(stream).size());
    go_back();
    taken.push_back(rest_of(stream).size());
    stream.set_epoch(1);
    taken.push_back(rest_of(stream).size());
    return taken;
  });
  CHECK(counts[0] == std::vector<size_t>{20, 14, 14, 34});
  CHECK(counts[1] == counts[0]);
}

TEST_CASE("ranks of whole files all get the error of one that cannot read") {
  const TemporaryFolder folder;
  const auto files = files_of_lines(folder, {5, 5});
  const auto error = error_of_all(2, [&](const Rank& self) {
    auto stream = make_sharded_stream(
        ddp::lines(files),
        StreamOptions().by_shard(true).ends(StreamEnds::Common).num_replicas(2).rank(self.rank));
    stream.rebind(self.group);
    ddp::all_gather_strings("made", self.group);
    if (self.rank == 1) std::filesystem::remove(files[1]);
    stream.next();
  });
  CHECK_THAT(error, ContainsText("expected to read \"" + files[1] + "\""));
  CHECK_THAT(error, ContainsText("(on rank 1)"));
  auto stream = make_sharded_stream(
      counted_numbers(3), StreamOptions().num_replicas(1).rank(0).by_shard(true));
  CHECK(rest_of(stream).size() == 3);
  CHECK_THAT(
      error_of<c10::Error>([&] {
        auto alone = make_sharded_stream(
            ddp::lines(files_of_lines(folder, {1, 1})),
            StreamOptions().num_replicas(2).rank(0).by_shard(true).ends(StreamEnds::Common));
        alone.next();
      }),
      ContainsText("expected a group with by_shard(true)"));
}

}  // namespace
