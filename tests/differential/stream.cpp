#include "differential/stream.h"

#include <map>
#include <utility>

#include "differential/run.h"

namespace ddp::differential {
namespace {

constexpr size_t kEpochs = 100;  // more than a program takes
constexpr int64_t kBuffer = 7, kSeed = 5;

/// The stream of a program, and the rank that reads it.
struct Reader {
  Reader(const Program& program, int rank, int ranks)
      : kind(program.label("batches")),
        short_epochs(program.is("epochs", "short")),
        is_shuffled(program.is("stream_order", "shuffled")),
        by_shard(program.is("stream_division", "by_shard")),
        rank(by_shard ? rank : 0),
        ranks(by_shard ? ranks : 1) {}

  const std::string kind;
  const bool short_epochs, is_shuffled, by_shard;
  const int rank, ranks;  // of those that have an order of their own
};

/// Numbers of the rows in the source's order, of a rank's files.
std::vector<int64_t> numbers_of(const Reader& reader) {
  const auto sizes = sizes_of(reader.short_epochs, reader.by_shard);
  const bool has_tokens = reader.kind == "tokens";
  std::vector<int64_t> numbers;
  int64_t first = 0;
  for (size_t file = 0; file < sizes.size(); ++file) {
    const bool is_own = static_cast<int>(file) % reader.ranks == reader.rank;
    for (int64_t i = 0; i < sizes[file] && is_own; ++i) {
      const auto token = first + 2 * i;
      numbers.push_back(has_tokens ? token * 1000 + token + 1 : first + i);
    }
    first += has_tokens ? 2 * sizes[file] + 1 : sizes[file];
  }
  if (reader.kind != "packed") return numbers;
  std::vector<int64_t> tokens, pairs;
  for (const auto number : numbers) {
    tokens.insert(tokens.end(), static_cast<size_t>(1 + number % 3), number);
    tokens.push_back(999);
  }
  for (size_t i = 0; i + 1 < tokens.size(); i += 2)
    pairs.push_back(tokens[i] * 1000 + tokens[i + 1]);
  return pairs;
}

/// All rows of an epoch, of a rank that has files of its own. A shuffled order is that of a stream
/// without workers, and without ranks where these take turns: other tests say what it has to be.
const std::vector<at::Tensor>& rows_of_epoch(const Reader& reader, int64_t epoch) {
  using Key = std::tuple<std::string, bool, bool, int, int, int64_t>;
  static std::map<Key, std::vector<at::Tensor>> all;
  auto& rows = all[{
      reader.kind, reader.short_epochs, reader.by_shard, reader.rank, reader.ranks,
      reader.is_shuffled ? epoch : -1}];
  if (!rows.empty()) return rows;
  if (!reader.is_shuffled) {
    for (const auto number : numbers_of(reader)) rows.push_back(row_of(number));
    return rows;
  }
  auto stream = make_sharded_stream(
      stream_source(reader.kind, reader.short_epochs, reader.by_shard),
      ShardedStreamOptions()
          .shuffle_buffer(kBuffer)
          .seed(kSeed)
          .workers(0)
          .by_shard(reader.by_shard)
          .ends(StreamEnds::Join)
          .num_replicas(reader.ranks)
          .rank(reader.rank));
  stream.set_epoch(static_cast<size_t>(epoch));
  while (auto row = stream.next()) rows.push_back(*row);
  return rows;
}

/// Where all ranks' next samples are.
struct Place {
  int64_t epoch = 0, used = 0;  // samples of the order that ranks share, or each of its own
};

/// Samples that each rank still has in the epoch.
int64_t rounds_left(const Program& program, const Place& place, int ranks) {
  const auto rows_of_rank = [&](int rank) {
    return static_cast<int64_t>(rows_of_epoch(Reader(program, rank, ranks), place.epoch).size());
  };
  if (!program.is("stream_division", "by_shard")) return (rows_of_rank(0) - place.used) / ranks;
  auto least = rows_of_rank(0);
  for (int rank = 1; rank < ranks; ++rank) least = std::min(least, rows_of_rank(rank));
  return least - place.used;
}

/// Takes samples for each rank, `together` of one epoch; what not every rank would have is left
/// out. \return  the row of a replica of the last one.
at::Tensor take_rounds(
    const Program& program, Place& place, int ranks, int64_t together, int replica) {
  const bool by_shard = program.is("stream_division", "by_shard");
  while (rounds_left(program, place, ranks) < together) {
    TORCH_CHECK(static_cast<size_t>(place.epoch) < kEpochs, "epochs have too few samples");
    ++place.epoch, place.used = 0;
  }
  place.used += by_shard ? 1 : ranks;
  const auto at = by_shard ? place.used - 1 : place.used - ranks + replica;
  return rows_of_epoch(Reader(program, replica, ranks), place.epoch)[static_cast<size_t>(at)];
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
  std::vector<at::Tensor> rows;
  const auto take = [&](int64_t count, int at_step) {
    const int ranks = axes_of(program, at_step).dp;
    rows.assign(1, torch::empty({0, 8}, torch::kDouble));
    // A whole batch is of one epoch.
    const auto size = program.has("stream_batches") ? rows_of(program, at_step, 0)[0] : 1;
    for (int64_t i = 0; i < count; ++i)
      rows.push_back(
          take_rounds(program, place, ranks, size - i % size, std::min(replica, ranks - 1))
              .unsqueeze(0));
  };
  if (is_resumed) take(rows_before(program, 0, reload, 0, 0), 0);
  take(rows_before(program, is_resumed ? reload : 0, step, batch, replica), step);
  take(rows_of(program, step, batch)[static_cast<size_t>(replica)], step);
  return halves(torch::cat(rows));
}

namespace {

ShardedStreamOptions stream_options_of(RankRun& run) {
  const auto& program = run.program;
  const auto& self = run.self;
  auto& trace = run.trace;
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
  if (program.is("stream_division", "by_shard")) DDP_DO(trace, stream_options.by_shard(true));
  if (program.is("epochs", "short")) DDP_DO(trace, stream_options.ends(StreamEnds::Common));
  return stream_options;
}

}  // namespace

void RankRun::make_stream() {
  if (!program.has("batches")) return;
  for (const auto* source :
       {"row_of", "tar_entry", "stream_files", "sizes_of", "files_of", "stream_source", "next_rows",
        "stack_rows", "BatchesOfRows", "next_batch"})
    trace.use(source);
  const auto options = stream_options_of(*this);
  const bool short_epochs = program.is("epochs", "short");
  const bool by_shard = program.is("stream_division", "by_shard");
  const auto text = [](bool value) { return std::string(value ? "true" : "false"); };
  auto made = "make_sharded_stream(stream_source(\"" + program.label("batches") + "\", " +
              text(short_epochs) + ", " + text(by_shard) + "), stream_options)";
  auto stream =
      make_sharded_stream(stream_source(program.label("batches"), short_epochs, by_shard), options);
  if (program.is("stream_order", "shuffled")) stream.set_epoch(1);
  if (program.has("stream_batches")) {
    const auto rows = rows_of(program, first_step, 0)[0];
    made = "batched(" + made + ", " + std::to_string(rows) + ", &stack_rows, true)";
    row_batches_ = std::make_unique<BatchesOfRows>(
        batched(std::move(stream), static_cast<size_t>(rows), &stack_rows, true));
    whole_batches = std::make_unique<BatchStream<BatchesOfRows>>(*row_batches_, kEpochs);
  } else {
    stream_ = std::make_unique<ShardedStream<at::Tensor>>(std::move(stream));
    batches = std::make_unique<BatchStream<ShardedStream<at::Tensor>>>(*stream_, kEpochs);
  }
  trace.say("auto stream = " + made + ";");
  if (program.is("stream_order", "shuffled")) trace.say("stream.set_epoch(1);");
  trace.say("BatchStream batches(stream, 100);");
  if (!by_shard) return;
  with_batches([&](auto& batches) { DDP_DO(trace, batches.rebind(self.group)); });
}

RankRun::Inputs RankRun::inputs(int step, int batch) {
  const auto rows = rows_of(program, step, batch);
  const auto own_rows = rows[static_cast<size_t>(self.rank)];
  trace.use("values");
  if (batches || whole_batches) {
    const auto name = "rows" + std::to_string(batch);
    trace.say("const auto " + name + " = next_rows(batches, " + of_rank(rows) + ");");
    at::Tensor drawn;
    with_batches([&](auto& batches) { drawn = next_rows(batches, own_rows); });
    const auto own = halves(drawn);
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
