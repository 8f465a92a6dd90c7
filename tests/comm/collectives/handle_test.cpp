#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/work/collective_handle.h"

#include "support/catch.h"

namespace ddp {
namespace {

/// A part of a call that ends when the test says so.
class OpenPart : public c10d::Work {
 public:
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void end() {
    finish();
    future_->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
  }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
};

}  // namespace

// A thread of Gloo's runs the callbacks of its works. If they own the group, the last reference to
// it may go there, after the future has woken the thread that drops its own: the thread joins
// itself.
TEST_CASE("the future of a collective does not own its group", "[comm]") {
  const size_t parts = GENERATE(1, 2);
  CAPTURE(parts);
  std::vector<c10::intrusive_ptr<OpenPart>> open;
  for (size_t part = 0; part < parts; ++part) open.push_back(c10::make_intrusive<OpenPart>());
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 1);
  int last_steps = 0;
  CallWatch watch;
  watch.group = group;
  auto handle = c10::make_intrusive<CollectiveHandle>(
      StartedCall{{open.begin(), open.end()}, [&] { ++last_steps; }}, std::move(watch));
  const auto future = handle->getFuture();
  CHECK(group.use_count() == 2);
  handle.reset();
  CHECK(group.use_count() == 1);

  CHECK_FALSE(future->completed());
  for (const auto& part : open) part->end();
  CHECK(future->completed());
  CHECK(last_steps == 1);
}

}  // namespace ddp
