#include <ddp/datasets.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp::detail {
namespace {

constexpr double kTolerance = 1e-9;  // Python's, of math.isclose

template <typename Number>
std::string in_braces(const std::vector<Number>& numbers) {
  return ddp::str('{', joined_by(", ", numbers), '}');
}

size_t known_size(const char* subject, std::optional<size_t> size) {
  DDP_CHECK_VALUE(
      size.has_value(), subject,
      ": expected a data set that says its size(), got one that does not. Give one that loads by "
      "index.");
  return *size;
}

/// Deals the numbers of a permutation out, which is Python's of a generator with this seed.
Parts cut_permutation(size_t size, const std::vector<size_t>& lengths, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto order = at::randperm(
      static_cast<int64_t>(size), std::move(generator), at::TensorOptions().dtype(at::kLong));
  const auto* next = order.const_data_ptr<int64_t>();
  Parts parts;
  for (const auto length : lengths) {
    parts.emplace_back(next, next + length);
    next += length;
  }
  return parts;
}

void check_fractions(const std::vector<double>& fractions) {
  double sum = 0;
  for (size_t i = 0; i < fractions.size(); ++i) {
    DDP_CHECK_VALUE(
        fractions[i] >= 0 && fractions[i] <= 1,
        "random_split: expected fractions from 0 to 1, got ", fractions[i], " at position ", i,
        ". Give the sizes of the parts as whole numbers instead.");
    sum += fractions[i];
  }
  DDP_CHECK_VALUE(
      std::abs(sum - 1) <= kTolerance, "random_split: expected fractions whose sum is 1, got ",
      in_braces(fractions), ", whose sum is ", sum,
      ". Give a fraction for what is left over, too, and ignore that part.");
}

}  // namespace

void check_subset(const std::vector<size_t>& indices, std::optional<size_t> size) {
  const auto samples = known_size("Subset", size);
  for (size_t i = 0; i < indices.size(); ++i) {
    DDP_CHECK_VALUE(
        indices[i] < samples, "Subset: expected indices below ", samples,
        ", the data set's size, got ", indices[i], " at position ", i,
        ". Give the numbers of its samples, from 0.");
  }
}

void check_sample_index(const char* name, size_t index, size_t size) {
  DDP_CHECK_VALUE(
      index < size, name, ": expected the number of a sample, below its size ", size, ", got ",
      index, ". Make the sampler with the size() of this data set.");
}

void check_sample_count(const char* name, size_t given, size_t asked) {
  DDP_CHECK(
      given == asked, name, ": expected a data set that gives a sample for each number, got ",
      given, " for ", asked, ". Leave out samples by a Subset, not in get_batch().");
}

Parts split_indices(
    std::optional<size_t> size, const std::vector<double>& fractions, uint64_t seed) {
  const auto samples = known_size("random_split", size);
  check_fractions(fractions);
  std::vector<size_t> lengths;
  size_t left = samples;
  for (const auto fraction : fractions) {
    const auto length = static_cast<size_t>(std::floor(static_cast<double>(samples) * fraction));
    lengths.push_back(std::min(length, left));  // a sum just above 1
    left -= lengths.back();
  }
  for (size_t i = 0; left > 0; ++i, --left) ++lengths[i % lengths.size()];
  return cut_permutation(samples, lengths, seed);
}

Parts split_indices(
    std::optional<size_t> size, const std::vector<int64_t>& lengths, uint64_t seed) {
  const auto samples = known_size("random_split", size);
  size_t sum = 0;
  bool fits = true;
  for (const auto length : lengths) {
    fits = fits && length >= 0 && static_cast<size_t>(length) <= samples - sum;
    if (fits) sum += static_cast<size_t>(length);
  }
  DDP_CHECK_VALUE(
      fits && sum == samples, "random_split: expected lengths of at least 0 whose sum is ", samples,
      ", the data set's size, got ", in_braces(lengths),
      ". Give what is left over as a part, too, or fractions, such as {0.8, 0.2}.");
  return cut_permutation(samples, {lengths.begin(), lengths.end()}, seed);
}

std::vector<size_t> begins_of_parts(const std::vector<std::optional<size_t>>& sizes) {
  DDP_CHECK_VALUE(
      !sizes.empty(),
      "ConcatDataset: expected at least one data set, got none. Give one, which "
      "may be empty.");
  std::vector<size_t> begins{0};
  for (size_t i = 0; i < sizes.size(); ++i) {
    DDP_CHECK_VALUE(
        sizes[i].has_value(), "ConcatDataset: expected data sets that say their size(), got one ",
        "that does not at position ", i, ". Give some that load by index.");
    begins.push_back(begins.back() + *sizes[i]);
  }
  return begins;
}

}  // namespace ddp::detail
