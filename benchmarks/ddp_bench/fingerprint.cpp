#include "fingerprint.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

namespace ddp_bench {
namespace {

// Largest distances, as shares of the distance that training moved the parameters, after hundreds
// of steps; without averaging the distance would be about 1.
constexpr double kRounding = 0.01;
constexpr double kOnGpu = 0.5;

const char* describe(Agreement agreement) {
  switch (agreement) {
    case Agreement::Bitwise:
      return "bit for bit";
    case Agreement::Rounded:
      return "but for rounding";
    case Agreement::OnGpu:
      return "but for the order in which a GPU adds";
  }
  return "";
}

// FNV-1a, by words of eight bytes.
uint64_t hash_bytes(uint64_t hash, const char* data, size_t size) {
  for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min(sizeof word, size - at));
    hash = (hash ^ word) * 0x100000001b3ULL;
    hash ^= hash >> 32;
  }
  return hash;
}

std::string exact(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

}  // namespace

Fingerprint fingerprint(const std::vector<at::Tensor>& parameters) {
  Fingerprint result{0xcbf29ce484222325ULL, 0};
  for (const auto& parameter : parameters) {
    const auto values = parameter.detach().cpu().contiguous();
    result.hash =
        hash_bytes(result.hash, static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    result.checksum += values.abs().sum(at::kDouble).item<double>();
  }
  return result;
}

double distance(
    const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
    const std::vector<at::Tensor>& start) {
  const auto norm = [](const at::Tensor& t) { return t.detach().norm().item<double>(); };
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double apart = norm(a[i] - b[i]);
    if (apart == 0) continue;
    const double way = std::max(norm(a[i] - start[i]), norm(b[i] - start[i]));
    const double relative = apart / way;
    if (!(relative <= worst)) worst = relative;  // also true for NaN
  }
  return worst;
}

std::string disagreement(const std::vector<Ending>& endings, Agreement agreement) {
  const double allowed = agreement == Agreement::OnGpu ? kOnGpu : kRounding;
  for (const auto& ending : endings) {
    const auto& first = endings.front();
    if (!std::isfinite(ending.fingerprint.checksum)) {
      return c10::str(
          "mode ", ending.mode, ": expected finite parameters, got a checksum of ",
          ending.fingerprint.checksum, ". The training diverged.");
    }
    const bool same = agreement == Agreement::Bitwise
                          ? ending.fingerprint.hash == first.fingerprint.hash
                          : ending.distance <= allowed;
    if (same) continue;
    return c10::str(
        "mode ", ending.mode, ": expected the parameters that mode ", first.mode, " ended with, ",
        describe(agreement), ", got others (checksum ", exact(ending.fingerprint.checksum), " and ",
        exact(first.fingerprint.checksum), ", ", ending.distance,
        " of the way of the training apart).");
  }
  return "";
}

std::string disagreement_of_ranks(
    const std::vector<std::string>& modes, const std::vector<std::vector<uint64_t>>& hashes) {
  for (size_t mode = 0; mode < modes.size(); ++mode) {
    for (size_t rank = 1; rank < hashes.size(); ++rank) {
      if (hashes[rank][mode] == hashes[0][mode]) continue;
      return c10::str(
          "mode ", modes[mode], ": expected the same parameters on all ranks, got others on rank ",
          rank, " than on rank 0.");
    }
  }
  return "";
}

}  // namespace ddp_bench
