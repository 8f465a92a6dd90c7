// Devices of tensors that are made under a DeferredInit guard, on a device that this program makes
// up: of eight, and without memory or operations.
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
#include <ddp/ddp.h>
#include <torch/library.h>

#include "support/error_of.h"

#include "support/catch.h"

using ddp::testing::error_of;

namespace {

constexpr auto kMadeUp = c10::DeviceType::PrivateUse1;
using MadeUpGuard = c10::impl::FakeGuardImpl<kMadeUp>;

std::optional<c10::Device> made_on;

at::Tensor make(
    c10::SymIntArrayRef, std::optional<at::ScalarType>, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat>) {
  if (!made_on) made_on = device;
  TORCH_CHECK(false, "there is no memory on a device that is made up");
}

void make_up_device() {
  static const bool done = [] {
    static const MadeUpGuard guard;
    c10::impl::registerDeviceGuard(kMadeUp, &guard);
    c10::SetAllocator(kMadeUp, c10::GetAllocator(at::kCPU));
    static torch::Library library(
        torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    library.impl("empty.memory_format", &make);
    return true;
  }();
  (void)done;
}

}  // namespace

TEST_CASE("a device without an index is the guard's current one", "[deferred][once]") {
  make_up_device();
  MadeUpGuard::setDeviceIndex(3);
  at::Tensor made, moved, other;
  {
    const ddp::DeferredInit guard;
    made = torch::empty({40, 50}, kMadeUp);
    moved = torch::zeros({40, 50}).to(kMadeUp);
    other = torch::empty({40, 50}, c10::Device(kMadeUp, 5));
  }
  MadeUpGuard::setDeviceIndex(1);
  CHECK(ddp::is_deferred(made));
  CHECK(made.device() == c10::Device(kMadeUp, 3));
  CHECK(moved.device() == c10::Device(kMadeUp, 3));
  CHECK(other.device() == c10::Device(kMadeUp, 5));
  // It is made there, wherever the program is by then.
  made_on.reset();
  CHECK_THAT(error_of([&] { ddp::materialize({made}); }), ContainsText("a device that is made up"));
  CHECK(made_on == c10::Device(kMadeUp, 3));
}
