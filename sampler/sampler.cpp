#include <ddp/sampler.h>

#include <algorithm>
#include <string>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <ddp/process_group.h>

#include "shard.h"

namespace ddp {
namespace {

void check_default_group(const char* option) {
  TORCH_CHECK(
      is_initialized(), "DistributedSampler: expected ", option,
      " in the options or a default process group, got neither. Call "
      "ddp::init_process_group() first, "
      "or set num_replicas() and rank().");
}

ShardSpec resolve(size_t dataset_size, const DistributedSamplerOptions& options) {
  if (!options.num_replicas().has_value()) check_default_group("num_replicas");
  if (!options.rank().has_value()) check_default_group("rank");

  ShardSpec spec;
  spec.dataset_size = static_cast<int64_t>(dataset_size);
  spec.num_replicas = options.num_replicas() ? *options.num_replicas() : get_world_size();
  spec.rank = options.rank() ? *options.rank() : get_rank();
  spec.shuffle = options.shuffle();
  spec.seed = options.seed();
  spec.drop_last = options.drop_last();

  TORCH_CHECK_VALUE(
      spec.num_replicas >= 1, "DistributedSampler: expected num_replicas >= 1, got ",
      spec.num_replicas, ". Pass the number of ranks that share the dataset.");
  TORCH_CHECK_VALUE(
      spec.rank >= 0 && spec.rank < spec.num_replicas, "DistributedSampler: Invalid rank ",
      spec.rank, ", rank should be in the interval [0, ", spec.num_replicas - 1,
      "]. Pass this process's rank among the num_replicas, or leave both unset to use the default "
      "group.");
  return spec;
}

int64_t read_int(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  TORCH_CHECK_VALUE(
      archive.try_read(key, value) && value.isInt(),
      "DistributedSampler::load: expected an integer named \"", key,
      "\", got none. Pass an archive that DistributedSampler::save wrote.");
  return value.toInt();
}

// The same position in another order would repeat some samples and lose others, silently.
void check_same(torch::serialize::InputArchive& archive, const char* key, int64_t own) {
  const int64_t saved = read_int(archive, key);
  TORCH_CHECK_VALUE(
      saved == own, "DistributedSampler::load: expected ", key, "=", saved,
      " as when it was saved, got ", own,
      ". Construct the sampler as it was, or call set_epoch() instead of load() to "
      "start that epoch "
      "over.");
}

}  // namespace

struct DistributedSampler::State {
  explicit State(const ShardSpec& spec) : next_epoch(spec) {}

  // What the next reset draws, and where in it that reset starts: not at 0 only after load().
  ShardSpec next_epoch;
  size_t start = 0;

  // The epoch being visited; none before the first reset and after load().
  std::optional<int64_t> epoch;
  std::vector<size_t> indices;
  size_t position = 0;
};

DistributedSampler::DistributedSampler(
    size_t dataset_size, const DistributedSamplerOptions& options)
    : DistributedSampler(resolve(dataset_size, options)) {}

DistributedSampler::DistributedSampler(const ShardSpec& spec)
    : torch::data::samplers::DistributedSampler<>(
          static_cast<size_t>(spec.dataset_size), static_cast<size_t>(spec.num_replicas),
          static_cast<size_t>(spec.rank),
          /*allow_duplicates=*/!spec.drop_last),
      state_(std::make_shared<State>(spec)) {}

void DistributedSampler::set_epoch(size_t epoch) {
  if (epoch == this->epoch()) return;
  state_->next_epoch.epoch = static_cast<int64_t>(epoch);
  state_->start = 0;
}

size_t DistributedSampler::epoch() const { return static_cast<size_t>(state_->next_epoch.epoch); }

void DistributedSampler::reset(std::optional<size_t> new_size) {
  State& state = *state_;
  const auto dataset_size =
      new_size ? static_cast<int64_t>(*new_size) : state.next_epoch.dataset_size;
  if (dataset_size != state.next_epoch.dataset_size) {
    state.next_epoch.dataset_size = dataset_size;
    state.start = 0;
  }
  // Free the old share first: it can be large.
  state.indices = {};
  state.indices = shard_indices(state.next_epoch);
  state.position = std::exchange(state.start, 0);
  state.epoch = state.next_epoch.epoch;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  TORCH_CHECK_VALUE(
      batch_size >= 1,
      "DistributedSampler::next: expected batch_size >= 1, got 0. Pass the number of "
      "samples to take.");
  State& state = *state_;
  if (!state.epoch.has_value()) reset();
  if (state.position == state.indices.size()) return std::nullopt;

  const size_t begin = state.position;
  state.position += std::min(batch_size, state.indices.size() - begin);
  const auto first = state.indices.begin();
  return std::vector<size_t>(first + begin, first + state.position);
}

size_t DistributedSampler::size() const {
  return static_cast<size_t>(shard_size(state_->next_epoch));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const State& state = *state_;
  const ShardSpec& spec = state.next_epoch;
  // After set_epoch the position belongs to an epoch that is over.
  const size_t position = state.epoch == spec.epoch ? state.position : state.start;
  archive.write("epoch", spec.epoch);
  archive.write("position", static_cast<int64_t>(position));
  archive.write("dataset_size", spec.dataset_size);
  archive.write("num_replicas", spec.num_replicas);
  archive.write("shuffle", static_cast<int64_t>(spec.shuffle));
  archive.write("seed", spec.seed);
  archive.write("drop_last", static_cast<int64_t>(spec.drop_last));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  State& state = *state_;
  check_same(archive, "dataset_size", state.next_epoch.dataset_size);
  check_same(archive, "num_replicas", state.next_epoch.num_replicas);
  check_same(archive, "shuffle", state.next_epoch.shuffle);
  check_same(archive, "seed", state.next_epoch.seed);
  check_same(archive, "drop_last", state.next_epoch.drop_last);
  const int64_t epoch = read_int(archive, "epoch");
  const int64_t position = read_int(archive, "position");
  const auto size = static_cast<int64_t>(this->size());
  TORCH_CHECK_VALUE(
      epoch >= 0 && position >= 0 && position <= size,
      "DistributedSampler::load: expected an epoch >= 0 and a position in [0, ", size,
      "], got epoch=", epoch, ", position=", position, ". The archive is damaged: load another.");

  state.next_epoch.epoch = epoch;
  state.start = static_cast<size_t>(position);
  state.epoch.reset();
  state.indices = {};
  state.position = 0;
}

}  // namespace ddp
