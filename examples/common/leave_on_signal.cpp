#include "leave_on_signal.h"

namespace examples {

void LeaveOnSignal::check(
    std::optional<ddp::Checkpointer>& checkpointer, int64_t number, const std::string& place,
    Progress& progress) {
  if (!notice_ || !notice_->requested()) return;
  checkpointer->save(number);
  checkpointer->wait();
  progress.line("leaves after " + place + ", which is saved");
  notice_->leave();
}

}  // namespace examples
