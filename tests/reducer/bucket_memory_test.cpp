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
    if (collective.kind == Kind::AllReduce) all_inside = all_inside && is_inside(collective.in[0]);
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

/// A Reducer of two parameters, with a bucket each after the first pass.
struct TwoParameters {
  testing::Events events;
  c10::intrusive_ptr<Allocating> backend = c10::make_intrusive<Allocating>(0, 2, events);
  at::Tensor w = testing::parameter(), v = testing::parameter();
  Reducer reducer{
      {{"w", w}, {"v", v}},
      testing::group_over(backend),
      ReducerOptions().bucket_cap_mb(1.0 / (1 << 20)).gradient_as_bucket_view(true)};
};

}  // namespace

TEST_CASE("buckets are reduced in memory that the backend allocates", "[pure][reducer]") {
  TwoParameters own;
  for (int pass = 0; pass < 3; ++pass) {
    testing::reduced_backward(own.reducer, [&] { return (own.w * own.v).sum(); });
    CHECK(own.backend->is_inside(own.w.grad()));
    CHECK(own.backend->is_inside(own.v.grad()));
  }
  CHECK(std::count(own.events.begin(), own.events.end(), "allreduce 3") == 2);  // rebuilt
  CHECK(own.backend->all_inside);
}

// Otherwise a pass would hold every gradient twice at its end; the option's purpose is to save
// memory.
TEST_CASE("a view replaces a gradient when its bucket is launched", "[pure][reducer]") {
  TwoParameters own;
  bool was_view = false;
  own.w.register_hook([&](const at::Tensor&) { was_view = own.backend->is_inside(own.v.grad()); });
  for (int pass = 0; pass < 3; ++pass) {
    own.v.mutable_grad().reset();
    testing::reduced_backward(
        own.reducer, [&] { return (own.w.exp() * own.v).sum(); });  // v's comes first
  }
  CHECK(was_view);
}

}  // namespace ddp
