#include <ddp/diloco.h>

#include <chrono>
#include <cmath>
#include <future>
#include <numeric>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/checkpoint_part.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>
#include <ddp/parameter_layout.h>
#include <ddp/zero.h>

#include "elastic/flat_state.h"
#include "local_sgd/diloco/elastic_leaders.h"
#include "local_sgd/diloco/exchange.h"
#include "local_sgd/diloco/fragments.h"
#include "local_sgd/diloco/region.h"

namespace ddp {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check_diloco(const std::vector<at::Tensor>& parameters, const DiLoCoOptions& options) {
  int64_t elements = 0;
  for (const auto& parameter : parameters) {
    DDP_CHECK_VALUE(
        parameter.defined() && parameter.is_floating_point(),
        "DiLoCo: expected floating parameters, got ",
        parameter.defined() ? ddp::str("one of ", parameter.scalar_type()) : "an undefined one",
        ". Leave it out.");
    elements += parameter.numel();
  }
  DDP_CHECK_VALUE(elements > 0, "DiLoCo: expected parameters, got none. Pass net->parameters().");
  DDP_CHECK_VALUE(
      options.sync_every() >= 1, "DiLoCo: expected sync_every of at least 1, got ",
      options.sync_every(), ". 500 is usual.");
  DDP_CHECK_VALUE(
      options.fragments() >= 1 && options.fragments() <= options.sync_every() &&
          options.fragments() <= elements,
      "DiLoCo: expected fragments from 1 to sync_every, ", options.sync_every(),
      ", and to the number of elements, ", elements, ", got ", options.fragments(),
      ". Name fewer.");
  const int64_t turn = options.sync_every() / options.fragments();
  DDP_CHECK_VALUE(
      options.overlap() >= 0 && options.overlap() <= turn,
      "DiLoCo: expected an overlap from 0 to sync_every / fragments, ", turn, ", got ",
      options.overlap(), ". A fragment has to arrive before the next one is sent.");
  DDP_CHECK_VALUE(
      options.outer_lr() > 0 && options.outer_momentum() >= 0 && options.outer_momentum() < 1 &&
          options.mix() >= 0 && options.mix() < 1,
      "DiLoCo: expected outer_lr above 0, outer_momentum and mix in [0, 1), got ",
      options.outer_lr(), ", ", options.outer_momentum(), " and ", options.mix(),
      ". 0.7, 0.9 and 0 are usual.");
  DDP_CHECK_VALUE(
      options.coordinator().empty() || !options.regions(),
      "DiLoCo: expected regions() or coordinator(), got both. Leave one out: with a coordinator "
      "regions may join and leave.");
}

std::string describe_settings(
    const std::vector<at::Tensor>& parameters, const DiLoCoOptions& options) {
  int64_t elements = 0;
  bool has_doubles = false;
  for (const auto& parameter : parameters) {
    if (!parameter.defined()) continue;
    elements += parameter.numel();
    has_doubles = has_doubles || parameter.scalar_type() == at::kDouble;
  }
  return ddp::str(
      parameters.size(), " parameters of ", elements,
      has_doubles ? " elements, some double" : " elements", ", sync_every ", options.sync_every(),
      ", outer_lr ", options.outer_lr(), ", outer_momentum ", options.outer_momentum(),
      ", nesterov ", options.nesterov(), ", fragments ", options.fragments(), ", overlap ",
      options.overlap(), ", mix ", options.mix(), ", wire ", static_cast<int>(options.wire()),
      ", error_feedback ", options.error_feedback());
}

int64_t read_int(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  DDP_CHECK_VALUE(
      archive.try_read(key, value) && value.isInt(), "DiLoCo: expected an integer named \"", key,
      "\" in the archive, got none. Load what DiLoCo::save wrote.");
  return value.toInt();
}

at::Tensor read_values(
    torch::serialize::InputArchive& archive, const char* key, int64_t elements,
    at::ScalarType dtype) {
  at::Tensor values;
  DDP_CHECK_VALUE(
      archive.try_read(key, values) && values.numel() == elements && values.is_floating_point(),
      "DiLoCo: expected ", elements, " numbers named \"", key, "\" in the archive, got ",
      values.defined() ? ddp::str(values.numel(), " of ", values.scalar_type()) : "none",
      ". Load what DiLoCo::save wrote for the same parameters.");
  return values.to(at::kCPU, dtype, /*non_blocking=*/false, /*copy=*/true);
}

/// A region that joins gets a state from the leader of another one.
void check_is_whole(const std::string& name, detail::CheckpointPart& part) {
  const auto subject = ddp::str("DiLoCo::add(\"", name, "\"): ");
  DDP_CHECK_VALUE(
      dynamic_cast<ZeroRedundancyOptimizerBase*>(part.optimizer()) == nullptr, subject,
      "expected a state that each rank of a region has whole, got a ZeroRedundancyOptimizer. Leave "
      "it out: in a region that joins it begins anew.");
  if (part.module() == nullptr) return;
  for (const auto& layout : layouts_of(*part.module())) {
    DDP_CHECK_VALUE(
        layout.sharded_over.empty(), subject, "expected a module that each rank of a region has ",
        "whole, got parts of \"", layout.name, "\". Leave it out.");
  }
}

/// Takes at least one float. In a pass that stores nothing: every region waits for it.
bool is_finite(const at::Tensor& values) {
  const auto [least, largest] = at::aminmax(values);  // both NaN where one value is
  return std::isfinite(least.item<float>()) && std::isfinite(largest.item<float>());
}

std::shared_future<at::Tensor> ready(at::Tensor mean) {
  std::promise<at::Tensor> promise;
  promise.set_value(std::move(mean));
  return promise.get_future().share();
}

/// The result of `begin` on a leader. Its exception comes with the result, for which all ranks of
/// the region wait.
template <typename T, typename Begin>
std::shared_future<T> begun(const Begin& begin) {
  try {
    return begin();
  } catch (...) {
    std::promise<T> promise;
    promise.set_exception(std::current_exception());
    return promise.get_future().share();
  }
}

}  // namespace

class DiLoCo::Impl {
 public:
  Impl(std::vector<at::Tensor> parameters, const DiLoCoOptions& options)
      : options_(options),
        region_(
            options.regions(), options.local(), !options.coordinator().empty(),
            describe_settings(parameters, options),
            problem_of([&] { check_diloco(parameters, options); })),
        fragments_(std::move(parameters), options.fragments()),
        outer_(at::zeros({fragments_.elements()}, fragments_.dtype())),
        momentum_(at::zeros_like(outer_)) {
    const at::NoGradGuard no_grad;
    if (options_.error_feedback()) residual_ = at::zeros_like(outer_);
    for (int64_t f = 0; f < fragments_.count(); ++f) {
      fragments_.part_of(outer_, f).copy_(fragments_.read(f));
    }
    make_leaders(describe_settings(fragments_.parameters(), options_));
    region_.share_of_first(outer_);
    take_outer();
  }

  ~Impl() { drop_exchange(); }

  void add(const std::string& name, detail::CheckpointPartPtr part) {
    if (region_.is_elastic()) check_is_whole(name, *part);
    parts_.emplace_back(name, std::move(part));
  }

  /// \return  the inner steps that the regions have taken, where this one has just joined them.
  std::optional<int64_t> begin_training() {
    if (!std::exchange(joins_, false)) return std::nullopt;
    std::shared_future<Joined> future;
    if (region_.is_leader()) future = elastic_->joined();
    region_.await(future);
    auto joined = region_.is_leader() ? future.get() : Joined{};
    const auto step = region_.share_number(joined.step);
    const auto f = region_.share_number(joined.fragment);
    rounds_ = region_.share_number(joined.state.round);
    if (region_.is_leader()) {
      outer_.copy_(joined.state.outer);
      momentum_.copy_(joined.state.momentum);
    }
    region_.share_values(outer_);
    region_.share_values(momentum_);
    load_parts(region_.share_text(joined.state.parts));
    take_outer();
    round_ = Round{f, step + options_.overlap(), {}, {}};
    if (residual_.defined()) round_->residual = at::zeros({fragments_.size(f)}, fragments_.dtype());
    if (region_.is_leader()) round_->mean = ready(joined.mean);
    if (options_.overlap() == 0) complete();
    return step;
  }

  void after_step(int64_t steps) {
    DDP_CHECK(
        !joins_,
        "DiLoCo: expected begin() before the first step of a region that joins others, got a step. "
        "Call it once all parts are added.");
    if (round_ && steps >= round_->due) complete();
    for (int64_t f = 0; f < fragments_.count(); ++f) {
      const int64_t turn = options_.sync_every() * (f + 1) / fragments_.count();
      if ((steps - turn) % options_.sync_every() != 0) continue;
      begin(f, steps);
      if (options_.overlap() == 0) complete();
    }
  }

  void finish() {
    if (round_) complete();
    if (!region_.is_elastic()) return;
    std::shared_future<void> finished;
    if (region_.is_leader()) finished = elastic_->finish();
    region_.await(finished);
  }

  void check_parameters(const std::vector<at::Tensor>& parameters) const {
    DDP_CHECK_VALUE(
        parameters.size() == fragments_.parameters().size(), "DiLoCo: expected the ",
        fragments_.parameters().size(), " parameters that it was made with, got ",
        parameters.size(), ". Pass those that the optimizer steps to the constructor.");
  }

  int64_t rounds() const { return rounds_; }

  DiLoCoStats stats() const {
    auto stats = stats_;
    if (!region_.is_leader()) return stats;
    stats.bytes_sent = leaders_->bytes_sent();
    stats.seconds_sent = leaders_->seconds_sent();
    return stats;
  }

  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("outer", outer_);
    archive.write("momentum", momentum_);
    if (residual_.defined()) archive.write("residual", residual_);
    archive.write("round", c10::IValue(rounds_));
    archive.write("fragments", c10::IValue(fragments_.count()));
    archive.write("on_its_way", c10::IValue(round_ ? round_->fragment : int64_t{-1}));
    if (!round_) return;
    archive.write("due", c10::IValue(round_->due));
    if (round_->residual.defined()) archive.write("next_residual", round_->residual);
    if (region_.is_leader()) archive.write("mean", round_->mean.get());
  }

  void load(torch::serialize::InputArchive& archive) {
    const auto read = [&](const char* key) {
      return read_values(archive, key, fragments_.elements(), fragments_.dtype());
    };
    auto outer = read("outer"), momentum = read("momentum");
    at::Tensor residual;
    if (options_.error_feedback()) residual = read("residual");
    const auto rounds = read_int(archive, "round");
    const auto fragment = read_int(archive, "on_its_way");
    std::optional<Round> round;
    if (fragment >= 0) round = load_round(archive, fragment);
    drop_exchange();
    outer_ = std::move(outer);
    momentum_ = std::move(momentum);
    residual_ = std::move(residual);
    rounds_ = rounds;
    round_ = std::move(round);
  }

 private:
  /// An exchange that was begun and is not applied yet.
  struct Round {
    int64_t fragment = 0;
    int64_t due = 0;                      // applied after so many inner steps
    at::Tensor residual;                  // of the fragment, once it is applied
    std::shared_future<at::Tensor> mean;  // on the leader
  };

  Round load_round(torch::serialize::InputArchive& archive, int64_t fragment) const {
    const auto saved = read_int(archive, "fragments");
    DDP_CHECK_VALUE(
        saved == fragments_.count() && fragment < saved, "DiLoCo: expected ", saved,
        " fragments as when it was saved, got ", fragments_.count(),
        ". Make it with as many, since one was on its way.");
    Round round{fragment, read_int(archive, "due"), {}, {}};
    const auto size = fragments_.size(fragment);
    if (options_.error_feedback()) {
      round.residual = read_values(archive, "next_residual", size, fragments_.dtype());
    }
    if (region_.is_leader()) round.mean = ready(read_values(archive, "mean", size, at::kFloat));
    return round;
  }

  // Exchanges on a thread of their own must not mix with what the program calls in its group.
  ProcessGroup group_of_exchanges() const {
    const auto& leaders = region_.leaders();
    if (options_.overlap() == 0 || !leaders) return leaders;
    return new_group(numbers_up_to(leaders->getSize()), leaders);
  }

  void make_leaders(const std::string& settings) {
    if (!region_.is_elastic()) {
      if (!region_.is_leader()) return;
      leaders_ = std::make_unique<FixedLeaders>(options_.wire(), group_of_exchanges());
      return;
    }
    std::shared_future<void> met;
    if (region_.is_leader()) met = begun<void>([&] { return meet_others(settings); });
    region_.await(met);
    joins_ = region_.share_number(elastic_ != nullptr && elastic_->joins() ? 1 : 0) != 0;
  }

  std::shared_future<void> meet_others(const std::string& settings) {
    std::vector<int64_t> sizes;
    for (int64_t f = 0; f < fragments_.count(); ++f) sizes.push_back(fragments_.size(f));
    auto elastic = std::make_unique<ElasticLeaders>(
        ElasticLeaders::Settings{
            options_.coordinator(), options_.group_options(), options_.wire(), settings, sizes},
        outer_);
    elastic_ = elastic.get();
    leaders_ = std::move(elastic);
    return elastic_->met();
  }

  /// Makes the parameters the outer ones.
  void take_outer() const {
    for (int64_t f = 0; f < fragments_.count(); ++f) {
      fragments_.write(f, fragments_.part_of(outer_, f), /*keep=*/0);
    }
  }

  std::string packed_parts() const {
    std::vector<std::string> texts;
    for (const auto& [name, part] : parts_) {
      texts.push_back(name);
      texts.push_back(elastic::packed_state(part->state()));
    }
    return packed(texts);
  }

  void load_parts(const std::string& text) {
    const auto texts = unpacked(text);
    bool are_alike = texts.size() == 2 * parts_.size();
    for (size_t i = 0; are_alike && i < parts_.size(); ++i) {
      are_alike = texts[2 * i] == parts_[i].first;
    }
    DDP_CHECK(
        are_alike, "DiLoCo::begin: expected the ", parts_.size(), " parts that were added here, ",
        "got ", texts.size() / 2, " of another region, or others. Add the same names, in the same ",
        "order, in all regions.");
    for (size_t i = 0; i < parts_.size(); ++i) {
      detail::LoadContext context;
      context.subject = ddp::str("DiLoCo, part \"", parts_[i].first, '"');
      parts_[i].second->prepare(elastic::unpacked_state(texts[2 * i + 1]), context).apply();
    }
  }

  void begin(int64_t f, int64_t step) {
    auto difference = fragments_.part_of(outer_, f) - fragments_.read(f);
    if (residual_.defined()) difference += fragments_.part_of(residual_, f);
    auto values = difference.to(at::kFloat);
    Round round{f, step + options_.overlap(), {}, {}};
    if (residual_.defined()) {
      round.residual = difference - Exchange::as_sent(options_.wire(), values);
    }
    if (leaders_) {
      round.mean = begun<at::Tensor>([&] {
        return begin_exchange({rounds_, step, f, std::move(values)});
      });
    }
    round_ = std::move(round);
  }

  std::shared_future<at::Tensor> begin_exchange(Difference difference) const {
    if (elastic_ != nullptr && elastic_->gives_state()) {
      elastic_->offer({rounds_, outer_.clone(), momentum_.clone(), packed_parts()});
    }
    return leaders_->exchange(std::move(difference));
  }

  void complete() {
    const auto round = std::exchange(round_, std::nullopt);
    const auto f = round->fragment;
    const auto start = Clock::now();
    const auto mean = region_.share(round->mean, fragments_.size(f));
    stats_.seconds_waited += seconds_since(start);
    DDP_CHECK(
        is_finite(mean), "DiLoCo: expected finite parameters in all regions, got others in round ",
        rounds_,
        ", which is not applied. Load a checkpoint, and look for the step in which a loss was not "
        "finite.");
    const auto outer = fragments_.part_of(outer_, f);
    step_outer(outer, fragments_.part_of(momentum_, f), mean);
    fragments_.write(f, outer, options_.mix());
    if (residual_.defined()) fragments_.part_of(residual_, f).copy_(round->residual);
    ++rounds_;
    if (elastic_ != nullptr) {
      stats_.regions = elastic_->regions();
    } else {
      stats_.regions.resize(static_cast<size_t>(region_.count()));
      std::iota(stats_.regions.begin(), stats_.regions.end(), int64_t{0});
    }
  }

  /// SGD, as torch::optim::SGD does it; `difference` is the gradient.
  void step_outer(at::Tensor outer, at::Tensor momentum, const at::Tensor& difference) const {
    const auto factor = options_.outer_momentum();
    momentum.mul_(factor).add_(difference);
    outer.sub_(
        options_.nesterov() ? difference.add(momentum, factor) : momentum, options_.outer_lr());
  }

  void drop_exchange() noexcept {
    const auto round = std::exchange(round_, std::nullopt);
    if (round && round->mean.valid() && leaders_) leaders_->drop(round->mean);
  }

  const DiLoCoOptions options_;
  const Region region_;
  const Fragments fragments_;
  at::Tensor outer_;  // of all elements, in the fragments' dtype, on the CPU; as the next two
  at::Tensor momentum_;
  at::Tensor residual_;  // undefined without error feedback
  int64_t rounds_ = 0;
  std::optional<Round> round_;
  DiLoCoStats stats_;
  bool joins_ = false;  // others that train, and has not begun
  std::vector<std::pair<std::string, detail::CheckpointPartPtr>> parts_;
  std::unique_ptr<Leaders> leaders_;   // null on ranks that are no leaders
  ElasticLeaders* elastic_ = nullptr;  // the same, where regions may join and leave
};

DiLoCo::DiLoCo(std::vector<at::Tensor> parameters, const DiLoCoOptions& options)
    : impl_(std::make_unique<Impl>(std::move(parameters), options)) {}

DiLoCo::~DiLoCo() = default;

int64_t DiLoCo::round() const { return impl_->rounds(); }

std::string summary(const DiLoCoStats& stats) {
  return ddp::str(
      stats.regions.size(), " regions, ", mib_text(stats.bytes_sent), " sent in ",
      stats.seconds_sent, " s, ", stats.seconds_waited, " s waited");
}

DiLoCoStats DiLoCo::stats() const { return impl_->stats(); }

int64_t DiLoCo::begin() {
  const at::NoGradGuard no_grad;
  if (const auto step = impl_->begin_training()) set_step(*step);
  return step();
}

DiLoCo& DiLoCo::add_part(const std::string& name, detail::CheckpointPartPtr part) {
  impl_->add(name, std::move(part));
  return *this;
}

void DiLoCo::finish() {
  const at::NoGradGuard no_grad;
  impl_->finish();
}

void DiLoCo::rebind(const GroupArg& /*group*/) {
  DDP_CHECK(
      false,
      "DiLoCo::rebind: expected the regions that it was made with, got a call for others. Make "
      "another with their groups, and load what save() wrote.");
}

void DiLoCo::apply(const std::vector<at::Tensor>& parameters, int64_t step) {
  impl_->check_parameters(parameters);
  impl_->after_step(step + 1);
}

void DiLoCo::save(torch::serialize::OutputArchive& archive) const {
  ModelAverager::save(archive);
  impl_->save(archive);
}

void DiLoCo::load(torch::serialize::InputArchive& archive) {
  impl_->load(archive);
  ModelAverager::load(archive);
}

}  // namespace ddp
