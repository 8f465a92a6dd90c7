#include <ddp/prepare.h>

#include <vector>

#include <ATen/ops/empty.h>
#include <ddp/collectives.h>
#include <ddp/gradients.h>
#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/optimizer_time.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <ddp/metrics.h>
#include <ddp/seed_all.h>
#include <ddp/zero.h>

namespace ddp {

struct detail::PreparedState {
  const std::shared_ptr<DistributedDataParallelBase> model;
  torch::optim::Optimizer& optimizer;
  const ProcessGroup group;
  DistributedSampler sampler;
  const int64_t dataset_size;
  const int64_t rows;  // of a whole batch, on this rank
  const int64_t accumulate;
  const std::optional<double> max_norm;
  const bool drop_last;
  const bool draws_ahead;

  PreparedPass* pass = nullptr;            // the loop that is on
  bool has_gradients = false;              // of a batch of the present step
  bool has_stale_gradients = false;        // of a step that a loop left unfinished
  std::unique_ptr<NoSyncGuard> no_sync{};  // in batches that do not end a step
};

namespace {

using detail::PreparedState;

bool has_parameter_of(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer) {
  const auto parameters = model.parameters();
  return any_of(optimizer.param_groups(), [&](const auto& group) {
    return any_of(group.params(), [&](const at::Tensor& stepped) {
      return any_of(parameters, [&](const at::Tensor& p) { return p.is_same(stepped); });
    });
  });
}

std::string multiples_text(int64_t batch_size, int64_t ranks) {
  const int64_t below = batch_size / ranks * ranks;
  return below > 0 ? ddp::str(below, " or ", below + ranks) : ddp::str(ranks);
}

/// Describes a fault of the options, the data set or the optimizer; "" for none.
std::string describe_fault(
    const PrepareOptions& options, const std::optional<size_t>& dataset_size, bool has_parameter,
    int64_t ranks) {
  if (!dataset_size) {
    return "expected a data set that knows its size, got one whose size() is empty. Return the "
           "number of its samples there.";
  }
  if (options.batch_size() < 1) {
    return ddp::str(
        "expected batch_size >= 1, got ", options.batch_size(),
        ". Set it to the number of samples in a batch of all ranks together.");
  }
  if (options.batch_size() % ranks != 0) {
    return ddp::str(
        "expected a batch_size that the ranks can share evenly, got ", options.batch_size(),
        " samples for ", ranks, " ranks. It counts the samples of all ranks together: set it to ",
        multiples_text(options.batch_size(), ranks), ", or start another number of ranks.");
  }
  if (options.accumulate() < 1) {
    return ddp::str(
        "expected accumulate >= 1, got ", options.accumulate(),
        ". Set it to the number of batches in a step, or leave it out.");
  }
  if (options.max_norm() && !(*options.max_norm() > 0)) {
    return ddp::str(
        "expected max_norm > 0, got ", *options.max_norm(),
        ". Leave it unset to step with the gradients as they are.");
  }
  if (options.workers() < 0) {
    return ddp::str(
        "expected workers >= 0, got ", options.workers(),
        ". With 0, the loop's thread draws the batches.");
  }
  if (!has_parameter) {
    return "expected an optimizer of the net's parameters, got one that steps none of them. Make "
           "it of net->parameters().";
  }
  return "";
}

/// The options that have to be equal on all ranks, as "key=value".
std::vector<std::string> fields_of(
    const PrepareOptions& options, const std::optional<size_t>& dataset_size) {
  const auto text = [](const auto& value) { return value ? ddp::str(*value) : "unset"; };
  return {
      ddp::str("batch_size=", options.batch_size()), "seed=" + text(options.seed()),
      ddp::str("accumulate=", options.accumulate()), "max_norm=" + text(options.max_norm()),
      ddp::str("shuffle=", options.shuffle()),       ddp::str("drop_last=", options.drop_last()),
      "size of the data set=" + text(dataset_size)};
}

/// \param by_rank  of each rank its fault, and then its fields.
std::string describe_faults(const std::vector<std::vector<std::string>>& by_rank) {
  const auto& first = by_rank.front();
  for (size_t rank = 1; rank < by_rank.size(); ++rank) {
    for (size_t i = 1; i < first.size(); ++i) {
      if (by_rank[rank].at(i) == first[i]) continue;
      return ddp::str(
          "prepare: expected the same options and a data set of the same size on every rank, got ",
          first[i], " on rank 0 and ", by_rank[rank][i], " on rank ", rank, " of ", by_rank.size(),
          ". Pass the same on every rank.");
    }
  }
  for (const auto& words : by_rank) {
    if (!words.front().empty()) return "prepare: " + words.front();
  }
  return "";
}

void check_on_all_ranks(
    const DistributedDataParallelBase& model, const torch::optim::Optimizer& optimizer,
    const std::optional<size_t>& dataset_size, const PrepareOptions& options,
    const ProcessGroup& group) {
  auto words = fields_of(options, dataset_size);
  const auto fault =
      describe_fault(options, dataset_size, has_parameter_of(model, optimizer), group->getSize());
  words.insert(words.begin(), fault);
  agree(
      packed(words), group, "comparing the options of prepare",
      [](const std::vector<std::string>& texts) {
        std::vector<std::vector<std::string>> by_rank;
        for (const auto& text : texts) by_rank.push_back(unpacked(text));
        return describe_faults(by_rank);
      });
}

std::shared_ptr<PreparedState> make_state(
    std::shared_ptr<DistributedDataParallelBase> model, torch::optim::Optimizer& optimizer,
    const std::optional<size_t>& dataset_size, const PrepareOptions& options) {
  const auto group = model->join_process_group();
  check_on_all_ranks(*model, optimizer, dataset_size, options, group);
  if (options.seed()) seed_all(static_cast<uint64_t>(*options.seed()), group);
  DistributedSampler sampler(
      *dataset_size, DistributedSamplerOptions()
                         .num_replicas(group->getSize())
                         .rank(group->getRank())
                         .shuffle(options.shuffle())
                         .seed(options.seed().value_or(0))
                         .drop_last(options.drop_last()));
  return std::make_shared<PreparedState>(PreparedState{
      std::move(model), optimizer, group, std::move(sampler), static_cast<int64_t>(*dataset_size),
      options.batch_size() / group->getSize(), options.accumulate(), options.max_norm(),
      options.drop_last(), options.workers() > 0 || options.device().has_value()});
}

/// How the sampler and the loader together deal samples out.
struct Share {
  int64_t samples;  // of this rank, in batches
  int64_t batches;
  int64_t padding;  // repeated samples, of all ranks together: the last ones of the last batch
};

Share share_of(const PreparedState& state, int64_t offset) {
  const int64_t ranks = state.group->getSize();
  const int64_t rest = std::max<int64_t>(state.dataset_size - offset, 0);
  if (state.drop_last) {
    const int64_t batches = rest / ranks / state.rows;
    return {batches * state.rows, batches, 0};
  }
  const int64_t samples = (rest + ranks - 1) / ranks;
  return {samples, (samples + state.rows - 1) / state.rows, samples * ranks - rest};
}

void clip(PreparedState& state) {
  if (dynamic_cast<ZeroRedundancyOptimizerBase*>(&state.optimizer) != nullptr) {
    clip_grad_norm_(state.optimizer, *state.max_norm);
  } else {
    clip_grad_norm_(*state.model, *state.max_norm);
  }
}

}  // namespace

DistributedDataParallelOptions detail::wrapper_options(const PrepareOptions& options) {
  auto wrapper = options.wrapper();
  if (options.process_group().given()) wrapper.process_group(options.process_group());
  return wrapper;
}

detail::PreparedPass::PreparedPass(std::shared_ptr<PreparedState> state, int64_t epoch)
    : state_(std::move(state)) {
  DDP_CHECK_VALUE(
      epoch >= 0, "Prepared::loader: expected an epoch >= 0, got ", epoch,
      ". Count the epochs from 0.");
  if (state_->pass != nullptr) state_->pass->end();
  state_->pass = this;
  state_->sampler.set_epoch(static_cast<size_t>(epoch));
  // From here on the sampler's position is that of the loop, and not that of the workers.
  if (state_->draws_ahead) state_->sampler.consume(0);
}

detail::PreparedPass::~PreparedPass() { end(); }

void detail::PreparedPass::loader_has_begun() {
  const auto share = share_of(*state_, static_cast<int64_t>(state_->sampler.offset()));
  samples_ = share.samples;
  batches_ = share.batches;
  padding_ = share.padding;
}

void detail::PreparedPass::next() {
  if (state_->pass != this) return;
  ++batch_;
  if (state_->draws_ahead) state_->sampler.consume(static_cast<size_t>(rows()));
  if (begins_step()) state_->has_gradients = false;
  if (ends_step()) {
    state_->no_sync.reset();
  } else if (!state_->no_sync) {
    state_->no_sync.reset(new NoSyncGuard(state_->model->no_sync()));
  }
}

void detail::PreparedPass::end() {
  if (state_->pass != this) return;
  state_->has_stale_gradients |= state_->has_gradients && !ends_step();
  state_->pass = nullptr;
  state_->has_gradients = false;
  state_->no_sync.reset();
}

int64_t detail::PreparedPass::rows() const {
  return std::min(state_->rows, samples_ - batch_ * state_->rows);
}

int64_t detail::PreparedPass::rows_of_step() const {
  const int64_t most = state_->accumulate * state_->rows;
  const int64_t before = batch_ / state_->accumulate * most;
  return std::min(most, samples_ - before);
}

int64_t detail::PreparedPass::repeated() const { return batch_ + 1 == batches_ ? padding_ : 0; }

bool detail::PreparedPass::begins_step() const { return batch_ % state_->accumulate == 0; }

bool detail::PreparedPass::ends_step() const {
  return (batch_ + 1) % state_->accumulate == 0 || batch_ + 1 == batches_;
}

PreparedBase::PreparedBase(
    std::shared_ptr<DistributedDataParallelBase> model, torch::optim::Optimizer& optimizer,
    std::optional<size_t> dataset_size, const PrepareOptions& options)
    : state_(make_state(std::move(model), optimizer, dataset_size, options)) {}

const detail::PreparedPass& PreparedBase::pass_for(const char* call) const {
  DDP_CHECK(
      state_->pass != nullptr && state_->pass->is_in_batch(), "Prepared::", call,
      ": expected a call in a loop over loader(), whose batches it counts, got one outside. Move "
      "it into the loop's body.");
  return *state_->pass;
}

void PreparedBase::zero_grad() {
  if (state_->accumulate > 1 && state_->has_gradients) return;
  state_->has_stale_gradients = false;
  ddp::zero_grad(state_->optimizer);
}

void PreparedBase::backward(const at::Tensor& loss) {
  if (state_->accumulate == 1) return loss.backward();
  const auto& pass = pass_for("backward");
  if (state_->has_stale_gradients) zero_grad();
  state_->has_gradients = true;
  // Exactly n in a whole step, so that a loop by hand has the same bits.
  (loss / (static_cast<double>(pass.rows_of_step()) / static_cast<double>(pass.rows()))).backward();
}

bool PreparedBase::step() {
  if (state_->accumulate > 1 && !pass_for("step").ends_step()) return false;
  const OptimizerTime::Scope time;
  if (state_->max_norm) clip(*state_);
  state_->optimizer.step();
  state_->has_gradients = false;
  return true;
}

bool PreparedBase::ends_step() const {
  return state_->pass != nullptr && state_->pass->is_in_batch() && state_->pass->ends_step();
}

double PreparedBase::average(double value) const { return ddp::average(value, state_->group); }

std::map<std::string, double> PreparedBase::average(
    const std::map<std::string, double>& values) const {
  return ddp::average(values, state_->group);
}

at::Tensor PreparedBase::gather_for_metrics(const at::Tensor& tensor) const {
  const auto& pass = pass_for("gather_for_metrics");
  DDP_CHECK_VALUE(
      tensor.defined() && tensor.dim() >= 1 && tensor.size(0) == pass.rows(),
      "Prepared::gather_for_metrics: expected a tensor with a row for each of this rank's ",
      pass.rows(), " samples, got ",
      tensor.defined() ? ddp::str("one of sizes ", tensor.sizes()) : "an undefined one",
      ". Pass what the net gave for the batch, and numbers to average().");
  const int64_t ranks = state_->group->getSize();
  auto sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), ranks);
  auto gathered = at::empty(sizes, tensor.options().requires_grad(false));
  all_gather_into_tensor(gathered, tensor.detach().contiguous(), state_->group);
  // Sample i of rank r is number i * ranks + r of the epoch, and the repeated ones are the last.
  const auto in_order = gathered.transpose(0, 1).flatten(0, 1);
  return in_order.narrow(0, 0, in_order.size(0) - pass.repeated());
}

bool PreparedBase::is_main() const { return ddp::is_main(state_->group); }

int64_t PreparedBase::steps_per_epoch() const {
  const int64_t batches = share_of(*state_, /*offset=*/0).batches;
  return (batches + state_->accumulate - 1) / state_->accumulate;
}

DistributedSampler& PreparedBase::sampler() { return state_->sampler; }

torch::data::DataLoaderOptions PreparedBase::loader_options() const {
  return torch::data::DataLoaderOptions(static_cast<size_t>(state_->rows))
      .drop_last(state_->drop_last);
}

const ProcessGroup& PreparedBase::group() const { return state_->group; }

}  // namespace ddp
