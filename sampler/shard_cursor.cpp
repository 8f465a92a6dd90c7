#include "shard_cursor.h"

#include <algorithm>
#include <utility>

#include <ddp/internal/check.h>
#include <ddp/process_group.h>

namespace ddp {
namespace {

int64_t read_int(
    torch::serialize::InputArchive& archive, const std::string& key, const std::string& sampler) {
  c10::IValue value;
  DDP_CHECK_VALUE(
      archive.try_read(key, value) && value.isInt(), sampler,
      "::load: expected an integer named \"", key,
      "\", got none or something else. Pass an archive that ", sampler, "::save wrote.");
  return value.toInt();
}

// In another order, the same position would silently repeat some samples and lose other samples.
std::vector<ShardCursor::Field> fields_of(const ShardCursor::Options& options) {
  return {
      {"dataset_size", options.order.dataset_size},
      {"num_samples", options.order.size},
      {"shuffle", options.order.shuffled},
      {"seed", options.seed},
      {"drop_last", options.shard.tail == Tail::kDrop},
      {"fingerprint", options.order.fingerprint}};
}

void check_default_group(const char* sampler, const char* option) {
  DDP_CHECK(
      is_initialized(), sampler, ": expected ", option,
      " in the options or a default process group, got neither. Call ddp::init_process_group() "
      "first, or set num_replicas() and rank().");
}

}  // namespace

ShardSpec shard_of_rank(
    const char* sampler, std::optional<int64_t> num_replicas, std::optional<int64_t> rank) {
  if (!num_replicas.has_value()) check_default_group(sampler, "num_replicas");
  if (!rank.has_value()) check_default_group(sampler, "rank");

  ShardSpec spec;
  spec.num_replicas = num_replicas ? *num_replicas : get_world_size();
  spec.rank = rank ? *rank : get_rank();
  DDP_CHECK_VALUE(
      spec.num_replicas >= 1 && spec.num_replicas <= INT32_MAX, sampler,
      ": expected num_replicas >= 1 and below 2^31, got ", spec.num_replicas,
      ". Pass the number of ranks that share the dataset.");
  DDP_CHECK_VALUE(
      spec.rank >= 0 && spec.rank < spec.num_replicas, sampler, ": Invalid rank ", spec.rank,
      ", rank should be in the interval [0, ", spec.num_replicas - 1,
      "]. Pass this process's rank among the num_replicas, or leave both unset to use the default "
      "group.");
  return spec;
}

ShardCursor::ShardCursor(Options options) : options_(std::move(options)) { next_ = start_of(0); }

ShardCursor::Start ShardCursor::start_of(int64_t epoch) const {
  const ShardSpec& shard = options_.shard;
  return {epoch, /*offset=*/0, shard.num_replicas * shard.batch_size, /*chosen=*/true};
}

std::vector<ShardCursor::Field> ShardCursor::identifying_fields() const {
  const std::lock_guard lock(mutex_);
  return fields_of(options_);
}

std::vector<ShardCursor::Field> ShardCursor::common_fields() const {
  const std::lock_guard lock(mutex_);
  auto fields = fields_of(options_);
  fields.push_back({"num_replicas", options_.shard.num_replicas});
  fields.push_back({"epoch", next_.epoch});
  return fields;
}

ShardSpec ShardCursor::shard_at(int64_t offset) const {
  ShardSpec shard = options_.shard;
  shard.order_size = options_.order.size;
  shard.offset = offset;
  return shard;
}

void ShardCursor::set_epoch(int64_t epoch) {
  const std::lock_guard lock(mutex_);
  // The epoch that load() chose keeps its position.
  if (epoch != next_.epoch) next_ = start_of(epoch);
  next_.chosen = true;
}

int64_t ShardCursor::epoch() const {
  const std::lock_guard lock(mutex_);
  return next_.epoch;
}

int64_t ShardCursor::size() const {
  const std::lock_guard lock(mutex_);
  return sample_count(shard_at(/*offset=*/0));
}

int64_t ShardCursor::offset() const {
  const std::lock_guard lock(mutex_);
  return visit_ ? visit_->start.offset : next_.offset;
}

void ShardCursor::reset(std::optional<size_t> new_size) {
  const std::lock_guard lock(mutex_);
  reset_locked(new_size);
}

void ShardCursor::reset_locked(std::optional<size_t> new_size) {
  if (new_size && static_cast<int64_t>(*new_size) != options_.order.dataset_size) {
    resize(static_cast<int64_t>(*new_size));
  }
  if (!next_.chosen && visit_) {
    if (visit_->drawing == Drawing::None) return;  // drawn already, and still at its start
    repeat_or_advance();
  }

  // Free the old share first: it can be large.
  visit_.reset();
  visit_ = draw(next_, shard_at(next_.offset));
  next_ = start_of(next_.epoch);
  next_.chosen = false;
}

ShardCursor::Visit ShardCursor::draw(const Start& start, const ShardSpec& share) const {
  const auto seed = static_cast<uint64_t>(options_.seed) + static_cast<uint64_t>(start.epoch);
  const at::Tensor order = options_.order.draw(options_.order.size, seed, start.step_size);
  return {start, take_shard(order, share)};
}

void ShardCursor::repeat_or_advance() {
  if (options_.advance_epoch) {
    next_ = start_of(next_.epoch + 1);
  } else if (options_.order.shuffled && options_.order.size > 1 && !std::exchange(warned_, true)) {
    TORCH_WARN(
        options_.name, ": rank ", options_.shard.rank,
        " begins an epoch in the same order as the one before (epoch ", next_.epoch,
        "), because nobody called set_epoch() in between. Call set_epoch(epoch) before each epoch, "
        "on every rank, or set the option advance_epoch.");
  }
}

void ShardCursor::resize(int64_t new_size) {
  DDP_CHECK_VALUE(
      options_.order.resizable, options_.name, "::reset: expected a dataset of the ",
      options_.order.dataset_size, " samples that the sampler was constructed for, got ", new_size,
      ". Construct another for a dataset of another size.");
  options_.order.dataset_size = new_size;
  options_.order.size = new_size;
  const bool chosen = next_.chosen || !visit_ || visit_->drawing == Drawing::None;
  next_ = start_of(next_.epoch);
  next_.chosen = chosen;
}

std::optional<std::vector<size_t>> ShardCursor::next(size_t batch_size) {
  DDP_CHECK_VALUE(
      batch_size >= 1, options_.name,
      "::next: expected batch_size >= 1, got 0. Pass the number of samples to take.");
  const std::lock_guard lock(mutex_);
  Visit& visit = begin(Drawing::Batches, "next");
  visit.drawing = Drawing::Batches;
  if (visit.handed_out == visit.indices.size()) return std::nullopt;

  const size_t begin = visit.handed_out;
  visit.handed_out += std::min(batch_size, visit.indices.size() - begin);
  const auto first = visit.indices.begin();
  return std::vector<size_t>(
      first + static_cast<std::ptrdiff_t>(begin),
      first + static_cast<std::ptrdiff_t>(visit.handed_out));
}

ShardCursor::Visit& ShardCursor::begin(Drawing drawing, const char* function) {
  if (!visit_) reset_locked(std::nullopt);
  DDP_CHECK(
      visit_->drawing == Drawing::None || visit_->drawing == Drawing::Over ||
          visit_->drawing == drawing,
      options_.name, "::", function,
      ": expected either next() or next_of() within an epoch, got both on rank ",
      options_.shard.rank, ". Use one of them until the epoch is over.");
  return *visit_;
}

// Deals the whole order out by positions, so that the rank of a sample depends on neither the steps
// before nor where the visit began: an interrupted run continues as an uninterrupted one.
void ShardCursor::begin_steps(int64_t step) {
  if (visit_->drawing == Drawing::Steps) return;
  Start start = visit_->start;
  if (start.offset == 0) start.step_size = step;
  ShardSpec whole = shard_at(/*offset=*/0);
  whole.tail = Tail::kUneven;
  const bool is_drawn = visit_->start.offset == 0 && options_.shard.tail != Tail::kDrop &&
                        !options_.order.depends_on_step_size;
  if (!is_drawn) visit_ = draw(start, whole);
  visit_->drawing = Drawing::Steps;
  visit_->visited = start.offset;
}

int64_t ShardCursor::own_positions_before(int64_t position) const {
  ShardSpec before = options_.shard;
  before.order_size = position;
  before.tail = Tail::kUneven;
  return sample_count(before);
}

std::optional<std::vector<size_t>> ShardCursor::next_of(size_t global) {
  DDP_CHECK_VALUE(
      global >= 1 && global <= INT32_MAX, options_.name,
      "::next_of: expected a number of samples >= 1 and below 2^31, got ", global,
      ". Pass how many all ranks together take in a step.");
  const std::lock_guard lock(mutex_);
  begin(Drawing::Steps, "next_of");
  const auto step = static_cast<int64_t>(global);
  begin_steps(step);
  Visit& visit = *visit_;
  visit.step = step;
  if (is_over()) return std::nullopt;
  const auto first = own_positions_before(visit.visited);
  visit.visited = std::min(visit.visited + step, options_.order.size);
  const auto last = own_positions_before(visit.visited);
  return std::vector<size_t>(visit.indices.begin() + first, visit.indices.begin() + last);
}

void ShardCursor::consume(size_t samples) {
  const std::lock_guard lock(mutex_);
  DDP_CHECK(
      !visit_ || visit_->drawing != Drawing::Steps, options_.name,
      "::consume: expected samples that next() returned, got a call in an epoch of next_of() on "
      "rank ",
      options_.shard.rank, ". Leave it out: next_of() counts its samples as used.");
  const size_t most = visit_ ? visit_->handed_out - visit_->consumed : 0;
  DDP_CHECK_VALUE(
      samples <= most, options_.name, "::consume: expected at most the ", most,
      " samples that rank ", options_.shard.rank,
      " was handed out in this epoch and has not consumed, got ", samples,
      ". Count each sample once, before the next epoch begins.");
  counts_consumed_ = true;
  if (visit_) visit_->consumed += samples;
}

// After set_epoch the visit belongs to an epoch that is over, and after load there is none.
bool ShardCursor::is_visiting() const { return visit_ && visit_->start.epoch == next_.epoch; }

// Whether every sample of the visit that this rank gets is used.
bool ShardCursor::is_over() const {
  switch (visit_->drawing) {
    case Drawing::None:
      break;
    case Drawing::Over:
      return true;
    case Drawing::Batches:
      return used() == visit_->indices.size();
    case Drawing::Steps: {
      const int64_t rest = options_.order.size - visit_->visited;
      return rest <= 0 || (options_.shard.tail == Tail::kDrop && rest < visit_->step);
    }
  }
  return false;
}

ShardCursor::Start ShardCursor::position() const {
  if (!is_visiting()) return next_;
  Start position = visit_->start;
  if (visit_->drawing == Drawing::Steps) {
    position.offset = visit_->visited;
  } else {
    const int64_t visited = static_cast<int64_t>(used()) * options_.shard.num_replicas;
    position.offset = std::min(position.offset + visited, options_.order.size);
  }
  return position;
}

ShardCursor::Standing ShardCursor::standing() const {
  const std::lock_guard lock(mutex_);
  const Start start = position();
  Standing standing{start.epoch, start.offset, start.offset, start.step_size, false};
  if (!is_visiting()) return standing;
  standing.over = !next_.chosen && is_over();
  if (visit_->drawing != Drawing::Steps) {
    const auto turns = static_cast<int64_t>(used());
    standing.next_own =
        visit_->start.offset + turns * options_.shard.num_replicas + options_.shard.rank;
  }
  return standing;
}

void ShardCursor::rebind(int64_t num_replicas, int64_t rank, const Standing& agreed) {
  const std::lock_guard lock(mutex_);
  options_.shard.num_replicas = num_replicas;
  options_.shard.rank = rank;
  go_to_locked(agreed);
}

void ShardCursor::go_to(const Standing& standing) {
  const std::lock_guard lock(mutex_);
  go_to_locked(standing);
}

void ShardCursor::go_to_locked(const Standing& agreed) {
  next_ = start_of(agreed.epoch);
  if (agreed.position > 0) next_.step_size = agreed.step_size;
  next_.offset = agreed.position;
  visit_.reset();
  if (!agreed.over) return;
  // An epoch that is over stays so: the next reset begins another one.
  next_.offset = options_.order.size;
  visit_ = Visit{next_, {}};
  visit_->drawing = Drawing::Over;
  next_ = start_of(agreed.epoch);
  next_.chosen = false;
}

void ShardCursor::save(torch::serialize::OutputArchive& archive) const {
  const std::lock_guard lock(mutex_);
  const Start start = position();
  archive.write("epoch", start.epoch);
  archive.write("position", start.offset);
  archive.write("step_size", start.step_size);
  archive.write("counts_consumed", static_cast<int64_t>(counts_consumed_));
  for (const auto& [key, value] : fields_of(options_)) archive.write(key, value);
}

void ShardCursor::load(torch::serialize::InputArchive& archive) {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, own] : fields_of(options_)) {
    const int64_t saved = read_int(archive, key, options_.name);
    DDP_CHECK_VALUE(
        saved == own, options_.name, "::load: expected ", key, "=", saved,
        " as when it was saved, got ", own,
        ". Construct the sampler as it was, or call set_epoch() instead of load() to start that "
        "epoch over.");
  }
  Start start;
  start.epoch = read_int(archive, "epoch", options_.name);
  start.offset = read_int(archive, "position", options_.name);
  start.step_size = read_int(archive, "step_size", options_.name);
  const bool counts_consumed = read_int(archive, "counts_consumed", options_.name) != 0;
  DDP_CHECK_VALUE(
      start.epoch >= 0 && start.offset >= 0 && start.offset <= options_.order.size &&
          start.step_size >= 1,
      options_.name, "::load: expected an epoch >= 0, a position in [0, ", options_.order.size,
      "] and a step_size >= 1, got epoch=", start.epoch, ", position=", start.offset,
      ", step_size=", start.step_size, ". The archive is damaged: load another.");
  next_ = start;
  counts_consumed_ = counts_consumed_ || counts_consumed;
  visit_.reset();
}

}  // namespace ddp
