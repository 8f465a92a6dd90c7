#include <ddp/autocast.h>

#include <ATen/autocast_mode.h>
#include <ddp/internal/check.h>
#include <ddp/internal/ranges.h>

namespace ddp {
namespace {

c10::DeviceType with_autocast(c10::DeviceType device) {
  const auto& devices = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  DDP_CHECK_VALUE(
      contains(devices, device), "AutocastGuard: expected a device with autocast, got ",
      c10::DeviceTypeName(device),
      ". Pass the type of the device that the model is on, such as torch::kCPU or torch::kCUDA.");
  return device;
}

}  // namespace

AutocastGuard::AutocastGuard(c10::DeviceType device, const AutocastOptions& options)
    : device_(with_autocast(device)),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      dtype_before_(at::autocast::get_autocast_dtype(device)),
      cache_was_enabled_(at::autocast::is_autocast_cache_enabled()) {
  const auto dtype = options.dtype().value_or(dtype_before_);
  DDP_CHECK_VALUE(
      !options.enabled() || dtype == at::kBFloat16 || dtype == at::kHalf,
      "AutocastGuard: expected dtype BFloat16 or Half, got ", dtype,
      ". For full precision leave the guard out, or give it enabled(false).");
  at::autocast::set_autocast_enabled(device_, options.enabled());
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled().value_or(cache_was_enabled_));
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
  at::autocast::set_autocast_cache_enabled(cache_was_enabled_);
}

}  // namespace ddp
