#include "backend_spec.h"

#include <algorithm>
#include <sstream>

#include <c10/util/Exception.h>

namespace ddp {
namespace {

constexpr const char* kRemedy =
    " Write gloo, shm, nccl or cpu:shm,cuda:nccl, or leave it out for what all ranks have.";

void check_known(const std::string& backend, const std::string& text) {
  TORCH_CHECK_VALUE(
      backend == "gloo" || backend == "shm" || backend == "nccl" || backend == "mpi",
      "backend(): expected gloo, shm, nccl, mpi or cpu:X,cuda:Y with those, got \"", text, "\"",
      backend == text ? "" : " with \"" + backend + "\"", ".", kRemedy);
}

void add(BackendSpec& spec, const std::string& part, const std::string& text) {
  const auto colon = part.find(':');
  TORCH_CHECK_VALUE(
      colon != std::string::npos,
      "backend(): expected device:backend pairs as in cpu:gloo,cuda:nccl, got \"", text,
      "\" with \"", part, "\".", kRemedy);
  const auto device = part.substr(0, colon);
  const auto backend = part.substr(colon + 1);
  TORCH_CHECK_VALUE(
      device == "cpu" || device == "cuda", "backend(): expected the devices cpu and cuda, got \"",
      text, "\" with \"", device, "\".", kRemedy);
  check_known(backend, text);
  TORCH_CHECK_VALUE(
      !(backend == "nccl" && device == "cpu"),
      "backend(): expected gloo, shm or mpi for cpu, for nccl serves CUDA tensors only, got \"",
      text, "\".", kRemedy);
  TORCH_CHECK_VALUE(
      !(backend == "shm" && device == "cuda"),
      "backend(): expected gloo, nccl or mpi for cuda, for shm serves CPU tensors only, got \"",
      text, "\".", kRemedy);
  TORCH_CHECK_VALUE(
      spec.emplace(device, backend).second, "backend(): expected each device once, got \"", text,
      "\" with \"", device, "\" again.", kRemedy);
}

}  // namespace

BackendSpec parse_backend(const std::string& text, bool nccl_is_usable) {
  BackendSpec spec;
  if (text.empty()) {
    spec["cpu"] = "shm";
    if (nccl_is_usable) spec["cuda"] = "nccl";
  } else if (text.find_first_of(":,") == std::string::npos) {
    check_known(text, text);
    if (text != "nccl") spec["cpu"] = text;
    if (text != "shm") spec["cuda"] = text;
  } else {
    std::istringstream parts(text);
    for (std::string part; std::getline(parts, part, ',');) add(spec, part, text);
    TORCH_CHECK_VALUE(
        text.back() != ',', "backend(): expected no comma at the end, got \"", text, "\".",
        kRemedy);
  }
  return spec;
}

void check_built(const BackendSpec& spec) {
  TORCH_CHECK(
      !is_used(spec, "mpi"),
      "backend mpi: LibTorch's binaries come without it. Use gloo or nccl, under mpirun too.");
}

bool is_used(const BackendSpec& spec, const std::string& backend) {
  return std::any_of(
      spec.begin(), spec.end(), [&](const auto& entry) { return entry.second == backend; });
}

std::string to_string(const BackendSpec& spec) {
  std::string text;
  for (const auto& [device, backend] : spec) {
    text += (text.empty() ? "" : ",") + device + ":" + backend;
  }
  return text;
}

}  // namespace ddp
