#include "local_sgd/diloco/leaders.h"

#include <chrono>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/group_monitor.h>
#include <ddp/internal/text.h>

#include "local_sgd/diloco/exchange.h"

namespace ddp {

std::shared_future<at::Tensor> FixedLeaders::exchange(Difference difference) {
  const Exchange exchange(wire_, count());
  round_ = difference.round;
  bytes_sent_ += exchange.bytes_sent(difference.values.numel());
  // A copy of what it needs, and no `this`: the exchange may outlive a step that throws.
  return std::async(
             std::launch::async,
             [exchange, values = std::move(difference.values), group = group_,
              seconds = seconds_sent_] {
               const at::NoGradGuard no_grad;
               const auto start = std::chrono::steady_clock::now();
               auto mean = exchange.run(values, group);
               const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
               *seconds = *seconds + taken.count();
               return mean;
             })
      .share();
}

// Other regions may not come to the exchange any more.
void FixedLeaders::drop(const std::shared_future<at::Tensor>& mean) noexcept {
  if (!group_) return;
  constexpr std::chrono::seconds kEndsWithin(2);
  if (mean.wait_for(kEndsWithin) == std::future_status::ready) return;
  problem_of([&] {
    const auto monitor = monitor_of(group_);
    monitor->fail(ddp::str(
        "DiLoCo ended on ", monitor->rank_text(), " while round ", round_, " was being exchanged"));
  });
}

}  // namespace ddp
