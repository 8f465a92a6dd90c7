// Bucket::skip_pack(): gradients that no reduction changes stay where they are.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "reducer/buckets/bucket.h"
#include "reducer/gradients/gradient_placement.h"

#include "support/catch.h"

namespace ddp {
namespace {

std::vector<NamedParameter> two_parameters() {
  return {
      {"a", torch::ones({2, 3}).set_requires_grad(true)},
      {"b", torch::ones({4}).set_requires_grad(true)}};
}

Bucket bucket_of(
    const std::vector<NamedParameter>& parameters,
    std::unique_ptr<GradientPlacement> placement = make_copied_gradients()) {
  const auto allocate = [](int64_t numel, const at::TensorOptions& options) {
    return torch::full({numel}, 7, options);
  };
  Bucket bucket(parameters, {0, 1}, /*tail=*/0, std::move(placement), allocate, nullptr);
  bucket.allocate();
  return bucket;
}

void give_gradients(const std::vector<NamedParameter>& parameters) {
  for (const auto& p : parameters) p.tensor.mutable_grad() = torch::full_like(p.tensor, 2);
}

}  // namespace

TEST_CASE("skip_pack leaves gradients and their memory unchanged", "[bucket]") {
  const torch::NoGradGuard no_grad;
  const auto parameters = two_parameters();
  auto bucket = bucket_of(parameters);
  give_gradients(parameters);
  const auto grad = parameters[0].tensor.grad();
  const auto version = grad._version();
  REQUIRE(bucket.skip_pack(nullptr));
  bucket.unpack(bucket.gradients());
  CHECK(parameters[0].tensor.grad().is_same(grad));
  CHECK(grad._version() == version);
  CHECK(torch::equal(grad, torch::full({2, 3}, 2.)));
  CHECK(torch::equal(bucket.gradients(), torch::full({10}, 7.)));  // nothing was packed

  // The next pass packs again.
  CHECK(bucket.pack(0.5).empty());
  bucket.unpack(bucket.gradients());
  CHECK(torch::equal(grad, torch::full({2, 3}, 1.)));
}

TEST_CASE("skip_pack without unpack does not affect the next pass", "[bucket]") {
  const torch::NoGradGuard no_grad;
  const auto parameters = two_parameters();
  auto bucket = bucket_of(parameters);
  give_gradients(parameters);
  REQUIRE(bucket.skip_pack(nullptr));
  bucket.pack(0.5);
  bucket.unpack(bucket.gradients());
  CHECK(torch::equal(parameters[1].tensor.grad(), torch::full({4}, 1.)));
}

TEST_CASE("skip_pack refuses where unpack is needed", "[bucket]") {
  const torch::NoGradGuard no_grad;
  const auto parameters = two_parameters();
  SECTION("a gradient that is missing") {
    auto bucket = bucket_of(parameters);
    give_gradients(parameters);
    parameters[1].tensor.mutable_grad().reset();
    CHECK_FALSE(bucket.skip_pack(nullptr));
    const std::vector<char> used{1, 0};
    CHECK(bucket.skip_pack(&used));
  }
  SECTION("a gradient of another kind") {
    auto bucket = bucket_of(parameters);
    give_gradients(parameters);
    parameters[1].tensor.mutable_grad() = torch::ones({4}, at::kDouble);
    CHECK_FALSE(bucket.skip_pack(nullptr));
  }
  SECTION("gradients that are views of their bucket") {
    auto bucket = bucket_of(parameters, make_viewed_gradients());
    give_gradients(parameters);
    CHECK_FALSE(bucket.skip_pack(nullptr));
  }
}

TEST_CASE("slots begin where a GPU copies 16 bytes at once", "[bucket]") {
  const torch::NoGradGuard no_grad;
  const bool as_views = GENERATE(false, true), in_place = GENERATE(false, true);
  CAPTURE(as_views, in_place);
  std::vector<NamedParameter> parameters;
  for (const int64_t numel : {3, 5, 4, 1}) {
    parameters.push_back(
        {std::to_string(numel), torch::ones({numel}, at::kDouble).set_requires_grad(true)});
  }
  const auto allocate = [](int64_t numel, const at::TensorOptions& options) {
    return torch::full({numel}, 7, options);
  };
  Bucket bucket(
      parameters, {0, 1, 2, 3}, /*tail=*/2,
      as_views ? make_viewed_gradients() : make_copied_gradients(), allocate, nullptr,
      /*slot_bytes=*/16);
  CHECK(bucket.storage_bytes() == (3 + 1 + 5 + 1 + 4 + 1 + 2) * 8);
  bucket.allocate();
  CHECK(bucket.storage().all().nbytes() == static_cast<size_t>(bucket.storage_bytes()));
  CHECK(bucket.storage().tail().data_ptr<double>() - bucket.gradients().data_ptr<double>() == 15);
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].tensor.mutable_grad() =
        torch::full_like(parameters[i].tensor, 2.0 + static_cast<double>(i));
  }
  CHECK(bucket.pack(0.5).empty());
  const double packed[] = {1, 1, 1, 0, 1.5, 1.5, 1.5, 1.5, 1.5, 0, 2, 2, 2, 2, 2.5};
  CHECK(torch::equal(bucket.gradients(), torch::tensor(at::ArrayRef<double>(packed), at::kDouble)));
  // Reduced in place, or in the memory of another tensor.
  const auto reduced = in_place ? bucket.gradients().mul_(4) : bucket.gradients().mul(4);
  bucket.unpack(reduced);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& grad = parameters[i].tensor.grad();
    CHECK(torch::equal(grad, torch::full_like(grad, 2 * (2.0 + static_cast<double>(i)))));
  }
}

}  // namespace ddp
