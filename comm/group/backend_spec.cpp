#include "group/backend_spec.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

using backends::BackendDescription;

// Tells the user which backends to choose from; a sentence.
std::string remedy() {
  std::string names;
  for (const auto& backend : backends::all()) {
    if (backend.make != nullptr) names += (names.empty() ? "" : ", ") + backend.name;
  }
  return " Write " + names + " or " + to_string(parse_backend("", /*gpus_are_usable=*/true)) +
         ", or leave it out for what all ranks have.";
}

const BackendDescription& known(const std::string& backend, const std::string& text) {
  const auto* description = backends::find(backend);
  if (description != nullptr) return *description;
  std::vector<std::string> names;
  for (const auto& one : backends::all()) names.push_back(one.name);
  DDP_CHECK_VALUE(
      false, "backend(): expected ", joined_by(", ", names), " or cpu:X,cuda:Y with those, got \"",
      text, "\"", backend == text ? "" : " with \"" + backend + "\"", ".", remedy());
}

bool serves(const BackendDescription& backend, const std::string& device) {
  return std::count(backend.devices.begin(), backend.devices.end(), device) > 0;
}

std::string upper(std::string text) {
  for (auto& letter : text) letter = static_cast<char>(std::toupper(letter));
  return text;
}

void check_serves(
    const BackendDescription& backend, const std::string& device, const std::string& text) {
  if (serves(backend, device)) return;
  std::vector<std::string> others;
  for (const auto& other : backends::all()) {
    if (serves(other, device)) others.push_back(other.name);
  }
  const auto last = others.back();
  others.pop_back();
  DDP_CHECK_VALUE(
      false, "backend(): expected ", joined_by(", ", others), " or ", last, " for ", device,
      ", for ", backend.name, " serves ", upper(backend.devices.front()), " tensors only, got \"",
      text, "\".", remedy());
}

void add(BackendSpec& spec, const std::string& part, const std::string& text) {
  const auto colon = part.find(':');
  DDP_CHECK_VALUE(
      colon != std::string::npos,
      "backend(): expected device:backend pairs as in cpu:gloo,cuda:nccl, got \"", text,
      "\" with \"", part, "\".", remedy());
  const auto device = part.substr(0, colon);
  const auto backend = part.substr(colon + 1);
  DDP_CHECK_VALUE(
      device == "cpu" || device == "cuda", "backend(): expected the devices cpu and cuda, got \"",
      text, "\" with \"", device, "\".", remedy());
  check_serves(known(backend, text), device, text);
  DDP_CHECK_VALUE(
      spec.emplace(device, backend).second, "backend(): expected each device once, got \"", text,
      "\" with \"", device, "\" again.", remedy());
}

}  // namespace

BackendSpec parse_backend(const std::string& text, bool gpus_are_usable) {
  BackendSpec spec;
  const auto serve_all = [&](const BackendDescription& backend) {
    for (const auto& device : backend.devices) spec[device] = backend.name;
  };
  if (text.empty()) {
    for (const auto& backend : backends::all()) {
      const bool usable = gpus_are_usable || backend.find_gpu == nullptr;
      if (backend.is_default && usable) serve_all(backend);
    }
  } else if (text.find_first_of(":,") == std::string::npos) {
    serve_all(known(text, text));
  } else {
    InputText parts(text);
    for (std::string part; std::getline(parts, part, ',');) add(spec, part, text);
    DDP_CHECK_VALUE(
        text.back() != ',', "backend(): expected no comma at the end, got \"", text, "\".",
        remedy());
  }
  return spec;
}

void check_built(const BackendSpec& spec) {
  for (const auto& [device, name] : spec) {
    const auto& backend = *backends::find(name);
    DDP_CHECK(backend.make != nullptr, "backend ", name, ": ", backend.why_no_build);
  }
}

const BackendDescription* backend_of_gpus(const BackendSpec& spec) {
  for (const auto& [device, name] : spec) {
    const auto* backend = backends::find(name);
    if (backend->find_gpu != nullptr) return backend;
  }
  return nullptr;
}

std::string to_string(const BackendSpec& spec) {
  std::string text;
  for (const auto& [device, backend] : spec) {
    text += (text.empty() ? "" : ",") + device + ":" + backend;
  }
  return text;
}

}  // namespace ddp
