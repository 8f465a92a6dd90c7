// The memory of buckets: the backend allocates it, if it can.
#include <algorithm>

#include "passes.h"
#include "support/recording_backend.h"

#include "support/catch.h"

namespace ddp {
namespace {

// Allocates memory, and records whether all tensors to reduce lie in it.
class Allocating : public testing::RecordingBackend {
 public:
  using RecordingBackend::RecordingBackend;

  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    made_.push_back(at::empty({size}, options));
    return made_.back();
  }
  WorkPtr run(Collective collective) override {
    if (collective.kind == Kind::AllReduce) {
      all_inside = all_inside && is_inside(collective.in[0]);
    }
    return RecordingBackend::run(std::move(collective));
  }

  bool is_inside(const at::Tensor& tensor) const {
    return std::any_of(made_.begin(), made_.end(), [&](const at::Tensor& memory) {
      return tensor.is_alias_of(memory);
    });
  }

  bool all_inside = true;

 private:
  std::vector<at::Tensor> made_;
};

}  // namespace

TEST_CASE("buckets are reduced in memory that the backend allocates", "[pure][reducer]") {
  testing::Events events;
  const auto backend = c10::make_intrusive<Allocating>(0, 2, events);
  const auto group = testing::group_over(backend);
  const auto w = testing::parameter();
  const auto v = testing::parameter();
  Reducer reducer(
      {{"w", w}, {"v", v}}, group,
      ReducerOptions().bucket_cap_mb(1.0 / (1 << 20)).gradient_as_bucket_view(true));
  for (int pass = 0; pass < 3; ++pass) {
    testing::reduced_backward(reducer, [&] { return (w * v).sum(); });
    CHECK(backend->is_inside(w.grad()));
    CHECK(backend->is_inside(v.grad()));
  }
  CHECK(std::count(events.begin(), events.end(), "allreduce 3") == 2);  // rebuilt: a bucket each
  CHECK(backend->all_inside);
}

// Otherwise a pass would hold every gradient twice at its end; the option's purpose is to save
// memory.
TEST_CASE("a view replaces a gradient when its bucket is launched", "[pure][reducer]") {
  testing::Events events;
  const auto backend = c10::make_intrusive<Allocating>(0, 2, events);
  const auto group = testing::group_over(backend);
  const auto w = testing::parameter();
  const auto v = testing::parameter();
  Reducer reducer(
      {{"w", w}, {"v", v}}, group,
      ReducerOptions().bucket_cap_mb(1.0 / (1 << 20)).gradient_as_bucket_view(true));
  bool was_view = false;
  w.register_hook([&](const at::Tensor&) { was_view = backend->is_inside(v.grad()); });
  for (int pass = 0; pass < 3; ++pass) {
    v.mutable_grad().reset();
    testing::reduced_backward(reducer, [&] { return (w.exp() * v).sum(); });  // v's comes first
  }
  CHECK(was_view);
}

}  // namespace ddp
