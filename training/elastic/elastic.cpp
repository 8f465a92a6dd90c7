#include <ddp/elastic.h>

#include <ddp/internal/check.h>

#include "elastic/run.h"

namespace ddp {

Elastic::Elastic(const ElasticOptions& options) : impl_(std::make_unique<Impl>(options)) {}

Elastic::~Elastic() = default;

Elastic& Elastic::add_part(
    const std::string& name, detail::CheckpointPartPtr state, detail::ElasticHooks hooks,
    bool is_per_rank) {
  impl_->add(elastic::Part(name, std::move(state), std::move(hooks), is_per_rank));
  return *this;
}

Elastic& Elastic::checkpoints(Checkpointer& checkpointer) {
  impl_->checkpointer = &checkpointer;
  return *this;
}

Elastic& Elastic::on_change(std::function<void(const ElasticGeneration&)> act) {
  impl_->on_change.push_back(std::move(act));
  return *this;
}

void Elastic::loop(const std::function<bool()>& turn) {
  auto& run = *impl_;
  try {
    run.enter();
    for (bool is_over = false; !is_over;) {
      try {
        const bool goes_on = run.begin_turn() && turn();
        is_over = !goes_on && run.finish();
        if (!goes_on && !is_over) run.recover();
      } catch (...) {
        if (!run.can_recover_from(std::current_exception())) throw;
        run.recover();
      }
    }
  } catch (...) {
    run.leave_by(std::current_exception());
    throw;
  }
}

void Elastic::step(torch::optim::Optimizer& optimizer) {
  step([&] { optimizer.step(); });
}

void Elastic::step(GradScaler& scaler, torch::optim::Optimizer& optimizer) {
  step([&] {
    scaler.step(optimizer);
    scaler.update();
  });
}

void Elastic::step(const std::function<void()>& apply) { impl_->step(apply); }

int64_t Elastic::steps() const { return impl_->progress.steps; }

ElasticGeneration Elastic::generation() const { return impl_->generation; }

ProcessGroup Elastic::process_group() const { return impl_->group; }

bool Elastic::is_newcomer() const { return !impl_->has_state; }

void Elastic::leave() { impl_->leave(); }

void Elastic::enter() { impl_->enter(); }

bool Elastic::begin_turn() { return impl_->begin_turn(); }

void Elastic::recover() { impl_->recover(); }

void Elastic::finish() {
  if (impl_->finish()) return;
  throw readable_error<RankLost>(
      DDP_HERE, "Elastic::finish: other ranks need the state of this one: call recover().");
}

}  // namespace ddp
