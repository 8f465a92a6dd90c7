#include "differential/stream.h"

#include <map>
#include <utility>

#include "differential/run.h"

namespace ddp::differential {
namespace {

constexpr size_t kEpochs = 100;  // more than a program takes
constexpr int64_t kBuffer = 7, kSeed = 5;

/// Numbers of the rows in the source's order.
std::vector<int64_t> numbers_of(const std::string& kind, bool short_epochs) {
  const std::vector<int> sizes =
      short_epochs ? std::vector<int>{11, 0, 6, 4, 3} : std::vector<int>{130, 0, 170, 100, 100};
  std::vector<int64_t> numbers;
  int64_t first = 0;
  for (const int size : sizes) {
    for (int64_t i = 0; i < size; ++i) {
      const auto token = first + 2 * i;
      numbers.push_back(kind == "tokens" ? token * 1000 + token + 1 : first + i);
    }
    first += kind == "tokens" ? 2 * size + 1 : size;
  }
  if (kind != "packed") return numbers;
  std::vector<int64_t> tokens, pairs;
  for (const auto number : numbers) {
    tokens.insert(tokens.end(), static_cast<size_t>(1 + number % 3), number);
    tokens.push_back(999);
  }
  for (size_t i = 0; i + 1 < tokens.size(); i += 2)
    pairs.push_back(tokens[i] * 1000 + tokens[i + 1]);
  return pairs;
}

/// All rows of an epoch. A shuffled order is that of a stream without ranks and workers: other
/// tests say what it has to be.
const std::vector<at::Tensor>& rows_of_epoch(const Program& program, int64_t epoch) {
  static std::map<std::tuple<std::string, bool, int64_t>, std::vector<at::Tensor>> all;
  const auto& kind = program.label("batches");
  const bool short_epochs = program.is("epochs", "short");
  const bool is_shuffled = program.is("stream_order", "shuffled");
  auto& rows = all[{kind, short_epochs, is_shuffled ? epoch : -1}];
  if (!rows.empty()) return rows;
  if (!is_shuffled) {
    for (const auto number : numbers_of(kind, short_epochs)) rows.push_back(row_of(number));
    return rows;
  }
  auto stream = make_sharded_stream(
      stream_source(kind, short_epochs),
      ShardedStreamOptions().shuffle_buffer(kBuffer).seed(kSeed).workers(0).num_replicas(1).rank(
          0));
  stream.set_epoch(static_cast<size_t>(epoch));
  while (auto row = stream.next()) rows.push_back(*row);
  return rows;
}

/// Where all ranks' next samples are.
struct Place {
  int64_t epoch = 0, used = 0;
};

/// Takes one sample for each rank; what not every rank would have is left out.
void take_round(const Program& program, Place& place, int ranks) {
  if (place.used + ranks > static_cast<int64_t>(rows_of_epoch(program, place.epoch).size()))
    ++place.epoch, place.used = 0;
  place.used += ranks;
}

int64_t rows_before(const Program& program, int from, int step, int batch, int replica) {
  int64_t rows = 0;
  int batches = 1;
  for (const auto& pass : passes_of(program)) {
    for (const int number : pass.batches) batches = std::max(batches, number + 1);
  }
  for (int s = from; s <= step; ++s) {
    if (!has_input(program, s, replica)) continue;
    for (int b = 0; b < (s < step ? batches : batch); ++b)
      rows += rows_of(program, s, b)[static_cast<size_t>(replica)];
  }
  return rows;
}

}  // namespace

RowsOfBatch batch_of_stream(const Program& program, int step, int batch, int replica) {
  Place place{program.is("stream_order", "shuffled") ? 1 : 0, 0};
  const int reload = reload_step(program);
  const bool is_resumed = step >= reload;
  if (is_resumed) {
    for (auto left = rows_before(program, 0, reload, 0, 0); left > 0; --left)
      take_round(program, place, axes_of(program, 0).dp);
  }
  const int ranks = axes_of(program, step).dp;
  auto skipped = rows_before(program, is_resumed ? reload : 0, step, batch, replica);
  std::vector<at::Tensor> rows{torch::empty({0, 8}, torch::kDouble)};
  auto count = rows_of(program, step, batch)[static_cast<size_t>(replica)];
  for (; skipped > 0; --skipped) take_round(program, place, ranks);
  for (; count > 0; --count) {
    take_round(program, place, ranks);
    const auto at = static_cast<size_t>(place.used - ranks + replica);
    rows.push_back(rows_of_epoch(program, place.epoch)[at].unsqueeze(0));
  }
  return halves(torch::cat(rows));
}

void RankRun::make_stream() {
  if (!program.has("batches")) return;
  const std::string short_epochs = program.is("epochs", "short") ? "true" : "false";
  for (const auto* source : {"row_of", "stream_files", "files_of", "stream_source", "next_rows"})
    trace.use(source);
  trace.say(
      "ShardedStreamOptions stream_options; "
      "stream_options.num_replicas(self.size).rank(self.rank);");
  ShardedStreamOptions stream_options;
  stream_options.num_replicas(self.size).rank(self.rank);
  if (program.is("stream_order", "shuffled")) {
    trace.say("stream_options.shuffle_buffer(7).seed(5);");
    stream_options.shuffle_buffer(kBuffer).seed(kSeed);
  }
  if (program.is("stream_workers", "0")) DDP_DO(trace, stream_options.workers(0));
  if (program.is("stream_workers", "2")) DDP_DO(trace, stream_options.workers(2).depth(5));
  if (program.is("epochs", "short")) DDP_DO(trace, stream_options.ends(StreamEnds::Common));
  trace.say(
      "auto stream = make_sharded_stream(stream_source(\"" + program.label("batches") + "\", " +
      short_epochs + "), stream_options); BatchStream batches(stream, 100);");
  stream_ = std::make_unique<ShardedStream<at::Tensor>>(make_sharded_stream(
      stream_source(program.label("batches"), program.is("epochs", "short")), stream_options));
  batches = std::make_unique<BatchStream<ShardedStream<at::Tensor>>>(*stream_, kEpochs);
  if (program.is("stream_order", "shuffled")) {
    auto& stream = *stream_;
    DDP_DO(trace, stream.set_epoch(1));
  }
}

RankRun::Inputs RankRun::inputs(int step, int batch) {
  const auto rows = rows_of(program, step, batch);
  const auto own_rows = rows[static_cast<size_t>(self.rank)];
  trace.use("values");
  if (batches) {
    const auto name = "rows" + std::to_string(batch);
    trace.say("const auto " + name + " = next_rows(batches, " + of_rank(rows) + ");");
    const auto own = halves(next_rows(*batches, own_rows));
    return {
        own.x, own.target, name + ".narrow(1, 0, 4).contiguous()",
        name + ".narrow(1, 4, 4).contiguous()"};
  }
  const auto seed = data_seed(step, batch, self.rank);
  const auto text = "values(" + std::to_string(data_seed(step, batch, 0)) + " + self.rank";
  const auto sizes = ", {" + of_rank(rows) + ", 4})";
  return {
      values(seed, {own_rows, 4}), values(seed + 5, {own_rows, 4}), text + sizes,
      text + " + 5" + sizes};
}

}  // namespace ddp::differential
