#include "tally.h"

#include <cstdio>

#include <ddp/metrics.h>

namespace examples {

Tally& Tally::operator+=(const Tally& other) {
  loss_sum += other.loss_sum;
  correct += other.correct;
  samples += other.samples;
  return *this;
}

void Tally::save(torch::serialize::OutputArchive& archive) const {
  archive.write("loss_sum", c10::IValue(loss_sum));
  archive.write("correct", c10::IValue(correct));
  archive.write("samples", c10::IValue(samples));
}

void Tally::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value;
  };
  *this = {read("loss_sum").toDouble(), read("correct").toInt(), read("samples").toInt()};
}

std::string Tally::accuracy() const {
  char text[64];
  const double percent =
      samples > 0 ? 100.0 * static_cast<double>(correct) / static_cast<double>(samples) : 0;
  std::snprintf(
      text, sizeof text, "%.2f%% (%lld/%lld)", percent, static_cast<long long>(correct),
      static_cast<long long>(samples));
  return text;
}

Tally sum_over_ranks(const Tally& own, const ddp::GroupArg& group) {
  // A double holds the counts exactly.
  const auto sums = ddp::sum(
      {{"loss_sum", own.loss_sum},
       {"correct", static_cast<double>(own.correct)},
       {"samples", static_cast<double>(own.samples)}},
      group);
  return {
      sums.at("loss_sum"), static_cast<int64_t>(sums.at("correct")),
      static_cast<int64_t>(sums.at("samples"))};
}

}  // namespace examples
