#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace ddp {

/// c10d's default size of the first bucket to become ready: a small one starts the first
/// all-reduce early.
constexpr int64_t kDefaultFirstBucketBytes = int64_t{1} << 20;
constexpr int64_t kDefaultBucketCapBytes = int64_t{25} << 20;
/// Never closes a bucket: everything of one dtype and device is in one bucket.
constexpr int64_t kUnlimitedBytes = std::numeric_limits<int64_t>::max();

struct NamedParameter;

/// The properties of one parameter that the planner uses.
struct ParameterExtent {
  int64_t bytes;
  c10::ScalarType dtype;
  c10::Device device;
  bool expect_sparse = false;
};

std::vector<ParameterExtent> extents_of(const std::vector<NamedParameter>& parameters);

/// The buckets of parameters that one all-reduce each reduces, in launch order.
struct BucketPlan {
  /// `buckets[b]` lists indices into the parameter list that was planned.
  std::vector<std::vector<size_t>> buckets;
  /// `limits[b]`: the cap in bytes under which bucket b was filled; 0 for a sparse parameter's.
  std::vector<int64_t> limits;
};

/// The order of the buckets that ranks agreed on, for a reducer that takes the place of another.
struct BucketOrder {
  /// Parameter indices, in the order in which their gradients become ready. Empty: the ranks have
  /// not agreed.
  std::vector<size_t> parameters;
  /// The cap, where the ranks agreed on one, too.
  std::optional<int64_t> cap_bytes;
};

/// Walks the parameters in `order` and groups them into buckets.
///
/// A bucket never mixes dtypes or devices; each (dtype, device) fills its own sequence of buckets
/// under `caps`, the last cap repeating. A bucket closes when its size reaches its cap, and the
/// parameter that crossed it stays in. A sparse parameter has a bucket of its own and uses up no
/// cap. Every rank must arrive at the same plan: it is a pure function of its arguments, and
/// buckets left open at the end are closed in order of their first parameter's place in `order`.
///
/// \param parameters  all parameters; `order` indexes into them.
/// \param caps  bytes, each > 0, at least one.
/// \param order  a permutation of the parameters' indices: expected or observed gradient order.
///        Empty: registration order, and the buckets are then sorted by their smallest index.
/// \return a plan whose buckets partition the parameters.
/// \throws c10::ValueError  for an empty or non-positive cap, or an `order` of another length.
///
/// Cost: O(P), no communication.
/// Source: compute_bucket_assignment_by_size, torch 2.11.0; unlike there the order of the
/// leftover buckets is defined.
BucketPlan plan_buckets(
    const std::vector<ParameterExtent>& parameters, const std::vector<int64_t>& caps,
    const std::vector<size_t>& order = {});

/// A cap in bytes, at most kUnlimitedBytes; MiB are 2^20 bytes.
int64_t bytes_of_mb(double mb);

/// The caps, in bytes, for the user's settings in MiB (2^20 bytes): the list when there is one;
/// else the one cap for every bucket; else 1 MiB for the first and 25 MiB for the rest.
///
/// \throws c10::ValueError  for a cap that is not a positive, finite number of MiB or is below a
///         byte, naming the option.
std::vector<int64_t> bucket_caps_bytes(
    const std::optional<double>& cap_mb, const std::vector<double>& cap_mb_list);

}  // namespace ddp
