#include <ddp/diloco.h>

#include <atomic>
#include <chrono>
#include <future>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ddp/internal/check.h>
#include <ddp/internal/error_text.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "local_sgd/diloco/exchange.h"
#include "local_sgd/diloco/fragments.h"
#include "local_sgd/diloco/outer_update.h"
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
}

std::string describe_settings(
    const std::vector<at::Tensor>& parameters, const DiLoCoOptions& options) {
  int64_t elements = 0;
  for (const auto& parameter : parameters) {
    elements += parameter.defined() ? parameter.numel() : 0;
  }
  return ddp::str(
      parameters.size(), " parameters of ", elements, " elements, sync_every ",
      options.sync_every(), ", outer_lr ", options.outer_lr(), ", outer_momentum ",
      options.outer_momentum(), ", nesterov ", options.nesterov(), ", fragments ",
      options.fragments(), ", overlap ", options.overlap(), ", mix ", options.mix(), ", wire ",
      static_cast<int>(options.wire()), ", error_feedback ", options.error_feedback());
}

int64_t read_int(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  DDP_CHECK_VALUE(
      archive.try_read(key, value) && value.isInt(), "DiLoCo: expected an integer named \"", key,
      "\" in the archive, got none. Load what DiLoCo::save wrote.");
  return value.toInt();
}

at::Tensor read_values(torch::serialize::InputArchive& archive, const char* key, int64_t elements) {
  at::Tensor values;
  DDP_CHECK_VALUE(
      archive.try_read(key, values) && values.numel() == elements &&
          values.scalar_type() == at::kFloat,
      "DiLoCo: expected ", elements, " numbers named \"", key, "\" in the archive, got ",
      values.defined() ? ddp::str(values.numel(), " of ", values.scalar_type()) : "none",
      ". Load what DiLoCo::save wrote for the same parameters.");
  return values.cpu().clone();
}

/// A mean that is known already.
std::shared_future<at::Tensor> ready(at::Tensor mean) {
  std::promise<at::Tensor> promise;
  promise.set_value(std::move(mean));
  return promise.get_future().share();
}

}  // namespace

class DiLoCo::Impl {
 public:
  Impl(std::vector<at::Tensor> parameters, const DiLoCoOptions& options)
      : options_(options),
        region_(
            options.regions(), options.local(), describe_settings(parameters, options),
            problem_of([&] { check_diloco(parameters, options); })),
        fragments_(std::move(parameters), options.fragments()),
        exchange_(options.wire(), region_.count()),
        update_{options.outer_lr(), options.outer_momentum(), options.nesterov()},
        outer_(at::zeros({fragments_.elements()}, at::kFloat)),
        momentum_(at::zeros_like(outer_)) {
    const at::NoGradGuard no_grad;
    if (options_.error_feedback()) residual_ = at::zeros_like(outer_);
    for (int64_t f = 0; f < fragments_.count(); ++f) {
      fragments_.part_of(outer_, f).copy_(fragments_.read(f));
    }
    region_.share_of_first(outer_);
    for (int64_t f = 0; f < fragments_.count(); ++f) {
      fragments_.write(f, fragments_.part_of(outer_, f), /*keep=*/0);
    }
  }

  ~Impl() { drop_exchange(); }

  /// Called after `steps` inner steps.
  void after_step(int64_t steps) {
    if (round_ && steps >= round_->due) complete();
    for (int64_t f = 0; f < fragments_.count(); ++f) {
      const int64_t turn = options_.sync_every() * (f + 1) / fragments_.count();
      if ((steps - turn) % options_.sync_every() != 0) continue;
      begin(f, steps + options_.overlap());
      if (options_.overlap() == 0) complete();
    }
  }

  void finish() {
    if (round_) complete();
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
    if (region_.is_leader()) stats.seconds_sent = *seconds_sent_;
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
    const auto elements = fragments_.elements();
    auto outer = read_values(archive, "outer", elements);
    auto momentum = read_values(archive, "momentum", elements);
    at::Tensor residual;
    if (options_.error_feedback()) residual = read_values(archive, "residual", elements);
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
    if (options_.error_feedback()) round.residual = read_values(archive, "next_residual", size);
    if (region_.is_leader()) round.mean = ready(read_values(archive, "mean", size));
    return round;
  }

  void begin(int64_t f, int64_t due) {
    auto values = fragments_.part_of(outer_, f) - fragments_.read(f);
    if (residual_.defined()) values += fragments_.part_of(residual_, f);
    const auto elements = fragments_.size(f);
    const auto own = exchange_.encode_own(values);
    Round round{f, due, {}, {}};
    if (residual_.defined()) round.residual = values - exchange_.decode_own(own, elements);
    if (region_.is_leader()) {
      stats_.bytes_sent += exchange_.bytes_sent(elements);
      // A copy of what it needs, and no `this`: the exchange may outlive a step that throws.
      round.mean = std::async(
                       std::launch::async,
                       [exchange = exchange_, own, elements, leaders = region_.leaders(),
                        seconds = seconds_sent_] {
                         const at::NoGradGuard no_grad;
                         const auto start = Clock::now();
                         auto mean = exchange.run(own, elements, leaders);
                         *seconds = *seconds + seconds_since(start);
                         return mean;
                       })
                       .share();
    }
    round_ = std::move(round);
  }

  void complete() {
    const auto round = std::exchange(round_, std::nullopt);
    const auto f = round->fragment;
    const auto start = Clock::now();
    const auto mean = region_.share(round->mean, fragments_.size(f));
    stats_.seconds_waited += seconds_since(start);
    DDP_CHECK(
        at::isfinite(mean).all().item<bool>(),
        "DiLoCo: expected finite parameters in all regions, got others in round ", rounds_,
        ", which is not applied. Load a checkpoint, and look for the step in which a loss was not "
        "finite.");
    const auto outer = fragments_.part_of(outer_, f);
    update_.step(outer, fragments_.part_of(momentum_, f), mean);
    fragments_.write(f, outer, options_.mix());
    if (residual_.defined()) fragments_.part_of(residual_, f).copy_(round->residual);
    ++rounds_;
    stats_.regions.resize(static_cast<size_t>(region_.count()));
    std::iota(stats_.regions.begin(), stats_.regions.end(), int64_t{0});
  }

  // Other regions may not come to the exchange any more.
  void drop_exchange() noexcept {
    const auto round = std::exchange(round_, std::nullopt);
    if (!round || !round->mean.valid() || !region_.leaders()) return;
    constexpr std::chrono::seconds kPatience(2);
    if (round->mean.wait_for(kPatience) == std::future_status::ready) return;
    problem_of([&] {
      const auto monitor = monitor_of(region_.leaders());
      monitor->fail(ddp::str(
          "DiLoCo ended on ", monitor->rank_text(), " while round ", rounds_,
          " was being exchanged"));
    });
  }

  const DiLoCoOptions options_;
  const Region region_;
  const Fragments fragments_;
  const Exchange exchange_;
  const OuterUpdate update_;
  at::Tensor outer_;  // float32, of all elements, on the CPU; as the next two
  at::Tensor momentum_;
  at::Tensor residual_;  // undefined without error feedback
  int64_t rounds_ = 0;
  std::optional<Round> round_;
  DiLoCoStats stats_;
  // Written by an exchange's thread.
  const std::shared_ptr<std::atomic<double>> seconds_sent_ =
      std::make_shared<std::atomic<double>>(0);
};

DiLoCo::DiLoCo(std::vector<at::Tensor> parameters, const DiLoCoOptions& options)
    : impl_(std::make_unique<Impl>(std::move(parameters), options)) {}

DiLoCo::~DiLoCo() = default;

int64_t DiLoCo::round() const { return impl_->rounds(); }

DiLoCoStats DiLoCo::stats() const { return impl_->stats(); }

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
