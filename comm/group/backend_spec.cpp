#include "group/backend_spec.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include <ATen/core/functional.h>
#include <c10/core/Device.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using backends::RegisteredBackend;

// Tells the user which backends to choose from; a sentence.
std::string remedy(const std::string& more = "") {
  std::string names;
  for (const auto* backend : backends::all()) {
    if (backend->make) names += (names.empty() ? "" : ", ") + backend->name;
  }
  return " Write " + names + " or " + to_string(parse_backend("", /*gpus_are_usable=*/true)) +
         more + ", or leave it out for what all ranks have.";
}

/// A name that no backend of this process has.
class UnknownBackend : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

const RegisteredBackend& known(const std::string& backend, const std::string& text) {
  const auto* description = backends::find(backend);
  if (description != nullptr) return *description;
  std::vector<std::string> names;
  for (const auto* one : backends::all()) names.push_back(one->name);
  const auto problem = ddp::str(
      "backend(): expected ", joined_by(", ", names), " or cpu:X,cuda:Y with those, got \"", text,
      "\"", backend == text ? "" : " with \"" + backend + "\"", ".",
      remedy(", or register it with ddp::register_backend"));
  // No rank can have registered another name.
  constexpr auto kLettersOfNames = "abcdefghijklmnopqrstuvwxyz0123456789_";
  DDP_CHECK_VALUE(
      !backend.empty() && backend.find_first_not_of(kLettersOfNames) == std::string::npos, problem);
  throw readable_error<UnknownBackend>(DDP_HERE, problem);
}

bool serves(const RegisteredBackend& backend, const std::string& device) {
  return std::count(backend.devices.begin(), backend.devices.end(), device) > 0;
}

std::string upper(std::string text) {
  for (auto& letter : text) letter = static_cast<char>(std::toupper(letter));
  return text;
}

void check_serves(
    const RegisteredBackend& backend, const std::string& device, const std::string& text) {
  if (serves(backend, device)) return;
  std::vector<std::string> others;
  for (const auto* other : backends::all()) {
    if (serves(*other, device)) others.push_back(other->name);
  }
  auto choice = std::string("a backend that is registered");
  if (!others.empty()) {
    choice = others.back();
    others.pop_back();
    if (!others.empty()) choice = joined_by(", ", others) + " or " + choice;
  }
  DDP_CHECK_VALUE(
      false, "backend(): expected ", choice, " for ", device, ", for ", backend.name, " serves ",
      upper(backend.devices.front()), " tensors only, got \"", text, "\".", remedy());
}

// A word of c10::Device's, without an index.
void check_device(const std::string& device, const std::string& text) {
  bool is_type = false;
  try {
    is_type = !c10::Device(device).has_index();
  } catch (const c10::Error&) {
    // c10's text would name Python's functions.
  }
  DDP_CHECK_VALUE(
      is_type, "backend(): expected types of devices, such as cpu, cuda and xpu, got \"", text,
      "\" with \"", device, "\".", remedy());
}

void add(BackendSpec& spec, const std::string& part, const std::string& text) {
  const auto colon = part.find(':');
  DDP_CHECK_VALUE(
      colon != std::string::npos,
      "backend(): expected device:backend pairs as in cpu:gloo,cuda:nccl, got \"", text,
      "\" with \"", part, "\".", remedy());
  const auto device = part.substr(0, colon);
  const auto backend = part.substr(colon + 1);
  check_device(device, text);
  check_serves(known(backend, text), device, text);
  DDP_CHECK_VALUE(
      spec.emplace(device, backend).second, "backend(): expected each device once, got \"", text,
      "\" with \"", device, "\" again.", remedy());
}

}  // namespace

c10::DeviceType device_type_of(const std::string& device) { return c10::Device(device).type(); }

BackendSpec parse_backend(const std::string& text, bool gpus_are_usable, std::string* unknown) {
  BackendSpec spec;
  const auto serve_all = [&](const RegisteredBackend& backend) {
    for (const auto& device : backend.devices) spec[device] = backend.name;
  };
  if (text.empty()) {
    for (const auto* backend : backends::all()) {
      const bool usable = gpus_are_usable || !backend->picks_device;
      if (backend->is_default && usable) serve_all(*backend);
    }
    return spec;
  }
  try {
    if (text.find_first_of(":,") == std::string::npos) {
      serve_all(known(text, text));
      return spec;
    }
    InputText parts(text);
    for (std::string part; std::getline(parts, part, ',');) add(spec, part, text);
  } catch (const UnknownBackend& error) {
    if (unknown == nullptr) throw;
    *unknown = text_of(error);
    return spec;
  }
  DDP_CHECK_VALUE(
      text.back() != ',', "backend(): expected no comma at the end, got \"", text, "\".", remedy());
  return spec;
}

void check_built(const BackendSpec& spec) {
  for (const auto& [device, name] : spec) {
    const auto& backend = *backends::find(name);
    DDP_CHECK(backend.make, "backend ", name, ": ", backend.why_no_build);
  }
}

std::optional<DevicePicker> device_picker(const BackendSpec& spec) {
  for (const auto& [device, name] : spec) {
    const auto* backend = backends::find(name);
    if (backend->picks_device) return DevicePicker{device_type_of(device), backend};
  }
  return std::nullopt;
}

std::string backend_claim(const std::string& text) {
  if (text.find_first_of(":,") == std::string::npos) {
    const auto* backend = backends::find(text);
    return backend && !backend->is_own ? to_string(parse_backend(text, true)) : text;
  }
  std::vector<std::string> pairs;
  InputText parts(text);
  for (std::string part; std::getline(parts, part, ',');) pairs.push_back(part);
  std::sort(pairs.begin(), pairs.end());
  return joined_by(",", pairs);
}

std::string to_string(const BackendSpec& spec) {
  return joined_by(
      ",", c10::fmap(spec, [](const auto& pair) { return pair.first + ":" + pair.second; }));
}

}  // namespace ddp
