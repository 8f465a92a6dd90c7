#include <algorithm>
#include <deque>
#include <exception>
#include <optional>
#include <utility>

#include <c10/util/Exception.h>
#include <ddp/detail/stream_engine.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/hash.h>
#include <ddp/internal/text.h>
#include <ddp/sharded_stream.h>

#include "stream/pass.h"
#include "stream/position.h"

namespace ddp::detail {
namespace {

StreamRanks ranks_of(const ShardedStreamOptions& options) {
  const bool has_group = is_initialized();
  DDP_CHECK_VALUE(
      options.num_replicas().has_value() == options.rank().has_value(),
      "ShardedStream: expected both num_replicas and rank, or neither, got one. Set both, or leave "
      "both unset to use the default group.");
  StreamRanks ranks;
  ranks.count = options.num_replicas().value_or(has_group ? get_world_size() : 1);
  ranks.rank = options.rank().value_or(has_group ? get_rank() : 0);
  DDP_CHECK_VALUE(
      ranks.count >= 1 && ranks.count <= INT32_MAX,
      "ShardedStream: expected num_replicas >= 1 and ", "below 2^31, got ", ranks.count,
      ". Pass the number of ranks that share the data.");
  DDP_CHECK_VALUE(
      ranks.rank >= 0 && ranks.rank < ranks.count, "ShardedStream: expected a rank in [0, ",
      ranks.count, "), got ", ranks.rank, ". Pass this process's rank among the num_replicas.");
  return ranks;
}

void check_range(const char* name, int64_t value, int64_t least) {
  DDP_CHECK_VALUE(
      value >= least && value <= INT32_MAX, "ShardedStreamOptions: expected ", name, " from ",
      least, " to 2^31 - 1, got ", value, ". Leave it out for the default.");
}

void check_files(size_t files, const StreamRanks& ranks) {
  DDP_CHECK_VALUE(
      files >= static_cast<size_t>(ranks.count), "ShardedStream: expected a file or more for each ",
      "rank with by_shard(true), got ", files, " for ", ranks.count,
      " ranks. Write more files, or leave by_shard out.");
}

void check_ends(const ShardedStreamOptions& options, int64_t ranks) {
  DDP_CHECK_VALUE(
      ranks == 1 || options.ends() == StreamEnds::Common,
      "BatchStream: expected a stream with StreamEnds::Common on more than one rank, got ",
      "StreamEnds::Join on ", ranks, " ranks, of which some would begin the next epoch before the ",
      "others. Set ShardedStreamOptions().ends(ddp::StreamEnds::Common), or call set_epoch() in a ",
      "loop of your own.");
}

}  // namespace

struct StreamEngine::Impl {
  Impl(StreamSourcePtr from, const ShardedStreamOptions& given)
      : source(std::move(from)), options(given), ranks(ranks_of(given)) {
    check_range("shuffle_buffer", options.shuffle_buffer(), 0);
    check_range("workers", options.workers(), 0);
    check_range("depth", options.depth(), 1);
    if (options.by_shard()) check_files(source->files(), ranks);
    if (!is_initialized() || options.num_replicas()) return;
    is_compared = ranks.count == 1;
    if (options.by_shard()) group = default_group();
  }

  bool agrees_on_end() const {
    return options.by_shard() && options.ends() == StreamEnds::Common && ranks.count > 1;
  }
  /// Ranks that take turns.
  StreamRanks turns() const { return options.by_shard() ? StreamRanks{} : ranks; }

  StreamFields fields(bool of_rank) const {
    auto fields = source->fields();
    fields.emplace_back("shuffle_buffer", std::to_string(options.shuffle_buffer()));
    fields.emplace_back("seed", std::to_string(options.seed()));
    fields.emplace_back("by_shard", options.by_shard() ? "true" : "false");
    if (of_rank) {
      fields.emplace_back("num_replicas", std::to_string(ranks.count));
      fields.emplace_back("rank", std::to_string(ranks.rank));
    }
    return fields;
  }
  /// For comparisons of ranks: those of a position, and how the ranks' parts end.
  StreamFields shared_fields() const {
    auto shared = fields(/*of_rank=*/false);
    shared.emplace_back("ends", options.ends() == StreamEnds::Common ? "Common" : "Join");
    return shared;
  }
  /// Whether the position is one of this rank's own order, and not of one that all share. A common
  /// end is that of all; another rank's end says nothing of this rank's files.
  bool is_own(const StreamPosition& at) const {
    const bool has_ended = at.over && options.ends() == StreamEnds::Common;
    return options.by_shard() && at.base > 0 && !has_ended;
  }

  StreamOrder order() const {
    StreamOrder order;
    order.source = source;
    order.buffer = options.shuffle_buffer();
    order.seed = mixed(
        mix_bits(static_cast<uint64_t>(options.seed())), static_cast<uint64_t>(position.epoch));
    order.files = shuffled_numbers(source->files(), order.seed);
    if (order.buffer == 0) std::sort(order.files.begin(), order.files.end());
    if (options.by_shard()) {
      std::vector<size_t> own;
      for (auto i = static_cast<size_t>(ranks.rank); i < order.files.size();
           i += static_cast<size_t>(ranks.count)) {
        own.push_back(order.files[i]);
      }
      order.files = std::move(own);
    }
    return order;
  }

  void go_to(const StreamPosition& there) {
    pass.reset();
    ready.clear();
    allowed = 0;
    position = there;
  }

  /// Has at least `count` samples ready, or all that are left.
  void prepare(size_t count) {
    if (position.over) return;
    if (!pass) {
      const auto taking = turns();
      RankPart part{position.next(taking.count), taking.count, taking.rank};
      part.whole_rounds = !options.by_shard() && options.ends() == StreamEnds::Common;
      pass = std::make_unique<StreamPass>(order(), position.buffer, part, options);
    }
    try {
      while (ready.size() < count) {
        auto work = pass->next();
        if (!work) return;
        ready.push_back(std::move(work));
      }
    } catch (...) {
      go_to(position);
      throw;
    }
  }

  /// With whole files: ranks say how many samples each has, and all take as many as the least.
  void agree_on_end() {
    if (!agrees_on_end() || allowed > 0 || position.over) return;
    DDP_CHECK(
        group, "ShardedStream: expected a group with by_shard(true) and StreamEnds::Common, whose ",
        "ranks compare their ends, got num_replicas alone. Leave num_replicas and rank unset for "
        "the "
        "default group, or call rebind(group) before.");
    const auto problem = problem_of([&] { prepare(static_cast<size_t>(options.depth())); });
    const auto texts = agree(
        packed({problem, std::to_string(ready.size())}), group, "comparing the ends of streams",
        [](const std::vector<std::string>& by_rank) {
          for (size_t rank = 0; rank < by_rank.size(); ++rank) {
            const auto text = unpacked(by_rank[rank]).at(0);
            if (!text.empty()) return ddp::str(text, " (on rank ", rank, ')');
          }
          return std::string();
        });
    allowed = ready.size();
    for (const auto& text : texts) {
      allowed = std::min(allowed, static_cast<size_t>(std::stoull(unpacked(text).at(1))));
    }
    if (allowed == 0) end();
  }

  /// Ranks whose files are in another order would lose samples and repeat others.
  void compare_once() {
    if (is_compared) return;
    agree(
        text_of(shared_fields()), default_group(), "comparing the sources of streams",
        problem_of_fields);
    is_compared = true;
  }

  void end() {
    auto ended = position;
    ended.over = true;
    go_to(ended);
  }

  std::shared_ptr<void> next() {
    compare_once();
    agree_on_end();
    if (position.over) return nullptr;
    prepare(1);
    if (ready.empty()) {
      end();
      return nullptr;
    }
    const auto work = std::move(ready.front());
    ready.pop_front();
    if (allowed > 0) --allowed;
    ++position.taken;
    position.buffer = work->dealt().start;
    DDP_CHECK(
        !work->error(), "ShardedStream: expected to load sample ", work->dealt().position,
        " of epoch ", position.epoch, ", of ", pass->place(work->dealt().record.mark),
        ", got an error: ", ddp::text_of(work->error()), ". next() goes on after it.");
    return work->take();
  }

  StreamStanding standing(int64_t begun) {
    // An error in place of the next sample is a sample that is left.
    (void)problem_of([&] { prepare(1); });
    StreamStanding standing;
    standing.position = rebased(position, turns().count);
    standing.has_more = !position.over && (!ready.empty() || !pass);
    standing.begins_anywhere = !is_own(standing.position) || !standing.has_more;
    standing.begun = begun;
    standing.fields = shared_fields();
    return standing;
  }

  void rebind(const ProcessGroup& next_group, int64_t begun) {
    const auto texts = agree(
        text_of(standing(begun)), next_group, "comparing the positions of streams",
        problem_of_standings);
    StreamRanks next_ranks{next_group->getSize(), next_group->getRank()};
    if (options.by_shard()) check_files(source->files(), next_ranks);
    go_to(agreed_position(texts, options.ends() == StreamEnds::Common));
    ranks = next_ranks;
    group = next_group;
    is_compared = true;
  }

  const StreamSourcePtr source;
  const ShardedStreamOptions options;
  StreamRanks ranks;
  ProcessGroup group;  // only where ranks agree on their end
  bool is_compared = true;
  StreamPosition position;
  std::unique_ptr<StreamPass> pass;
  std::deque<std::unique_ptr<SampleWork>> ready;
  size_t allowed = 0;  // samples that every rank has
};

StreamEngine::StreamEngine(StreamSourcePtr source, const ShardedStreamOptions& options)
    : impl_(std::make_unique<Impl>(std::move(source), options)) {}

StreamEngine::~StreamEngine() = default;

std::shared_ptr<void> StreamEngine::next() { return impl_->next(); }

void StreamEngine::set_epoch(size_t epoch) {
  const auto wanted = static_cast<int64_t>(epoch);
  if (wanted == impl_->position.epoch && !impl_->position.over) return;
  StreamPosition begin;
  begin.epoch = wanted;
  impl_->go_to(begin);
}

size_t StreamEngine::epoch() const { return static_cast<size_t>(impl_->position.epoch); }

int64_t StreamEngine::taken() const { return impl_->position.taken; }

void StreamEngine::check_epochs() const { check_ends(impl_->options, impl_->ranks.count); }

void StreamEngine::check_epochs(const GroupArg& group) const {
  check_ends(impl_->options, group.get()->getSize());
}

void StreamEngine::rebind(const GroupArg& group, int64_t begun) {
  impl_->rebind(group.get(), begun);
}

std::function<void()> StreamEngine::bookmark() {
  return [impl = impl_.get(), there = impl_->position, ranks = impl_->ranks] {
    impl->ranks = ranks;
    impl->go_to(there);
  };
}

void StreamEngine::save(torch::serialize::OutputArchive& archive) const {
  const auto position = rebased(impl_->position, impl_->turns().count);
  save_position(archive, position, impl_->fields(impl_->is_own(position)));
}

void StreamEngine::load(torch::serialize::InputArchive& archive) {
  impl_->go_to(load_position(archive, [&](const StreamPosition& position) {
    return impl_->fields(impl_->is_own(position));
  }));
}

}  // namespace ddp::detail
