// Streams of several ranks in one thread, for tests.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ddp/sharded_stream.h>

#include "support/archives.h"
#include "support/temporary_folder.h"

namespace ddp::testing {

using StreamOptions = ShardedStreamOptions;

/// Files of the lines "0", "1", ...: as many in each as `sizes` says.
inline std::vector<std::string> files_of_lines(
    const TemporaryFolder& folder, const std::vector<int>& sizes) {
  std::vector<std::string> files;
  int next = 0;
  for (const int size : sizes) {
    std::string text;
    for (int i = 0; i < size; ++i) text += std::to_string(next++) + '\n';
    files.push_back(folder.write(std::to_string(files.size()) + ".txt", text));
  }
  return files;
}

template <typename Stream>
void load_bytes(Stream& stream, const std::string& bytes) {
  auto archive = archive_of(bytes);
  stream.load(archive);
}

/// The samples that are left of an epoch.
template <typename Stream>
auto rest_of(Stream& stream) {
  std::vector<typename decltype(stream.next())::value_type> samples;
  while (auto sample = stream.next()) samples.push_back(std::move(*sample));
  return samples;
}

template <typename T>
std::vector<T> all_of(const StreamSource<T>& source, const StreamOptions& options = {}) {
  auto stream = make_sharded_stream(source, options);
  return rest_of(stream);
}

template <typename T>
std::vector<ShardedStream<T>> streams_of_ranks(
    const StreamSource<T>& source, const StreamOptions& options, int64_t ranks) {
  std::vector<ShardedStream<T>> streams;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    streams.push_back(
        make_sharded_stream(source, StreamOptions(options).num_replicas(ranks).rank(rank)));
  }
  return streams;
}

/// The samples of a round: one of each rank that has one.
template <typename T>
std::vector<T> next_round(std::vector<ShardedStream<T>>& streams) {
  std::vector<T> samples;
  for (auto& stream : streams) {
    if (auto sample = stream.next()) samples.push_back(std::move(*sample));
  }
  return samples;
}

}  // namespace ddp::testing
