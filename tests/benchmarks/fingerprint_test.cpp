#include "benchmarks/ddp_bench/fingerprint.h"

#include <cmath>

#include <torch/torch.h>

#include "support/catch.h"

namespace {

using ddp_bench::Agreement;
using ddp_bench::disagreement;
using ddp_bench::Ending;
using ddp_bench::fingerprint;

using Tensors = std::vector<at::Tensor>;

Ending ending(const std::string& mode, uint64_t hash, double distance = 0, double checksum = 1) {
  return {mode, {hash, checksum}, distance};
}

}  // namespace

TEST_CASE("the checksum adds up magnitudes", "[benchmarks][pure]") {
  CHECK(fingerprint({torch::tensor({1.5, -2.0}), torch::tensor({-0.25})}).checksum == 3.75);
  CHECK(std::isnan(fingerprint({torch::tensor({1.0, std::nan("")})}).checksum));
}

TEST_CASE("the hash depends on every bit", "[benchmarks][pure]") {
  const auto hash = [](const Tensors& tensors) { return fingerprint(tensors).hash; };
  // An odd number of floats: the last one fills half a word.
  const auto values = torch::arange(7, at::kFloat);
  const auto base = hash({values});
  CHECK(hash({values.clone()}) == base);
  for (int64_t i = 0; i < values.numel(); ++i) {
    auto changed = values.clone();
    changed[i] = std::nextafter(changed[i].item<float>(), 100.0F);
    CAPTURE(i);
    CHECK(hash({changed}) != base);
  }
  CHECK(hash({values.flip(0)}) != base);
  CHECK(hash({torch::tensor({0.0F})}) != hash({torch::tensor({-0.0F})}));
}

TEST_CASE("the distance is relative to the way", "[benchmarks][pure]") {
  const Tensors start = {torch::zeros({2}), torch::ones({2})};
  const Tensors a = {torch::full({2}, 1.0), torch::full({2}, 3.0)};
  const Tensors b = {torch::full({2}, 1.0), torch::full({2}, 2.5)};
  CHECK(ddp_bench::distance(a, a, start) == 0);
  CHECK(ddp_bench::distance(a, b, start) == Approx(0.25));
  CHECK(ddp_bench::distance(b, a, start) == Approx(0.25));
  CHECK(ddp_bench::distance(a, start, start) == Approx(1));
  const Tensors broken = {torch::full({2}, std::nan("")), torch::full({2}, 3.0)};
  CHECK_FALSE(ddp_bench::distance(a, broken, start) <= 1);
}

TEST_CASE("modes agree to the bit or to rounding", "[benchmarks][pure]") {
  CHECK(disagreement({}, Agreement::Bitwise).empty());
  CHECK(disagreement({ending("c10d", 1), ending("ddp", 1)}, Agreement::Bitwise).empty());
  CHECK(disagreement({ending("c10d", 1), ending("ddp", 2, 0.001)}, Agreement::Rounded).empty());
}

TEST_CASE("a mode that ends with other parameters is named", "[benchmarks][pure][errors]") {
  const std::vector<Ending> endings = {
      ending("naive", 1), ending("c10d", 1), ending("ddp", 2, 0.001, 1.5)};
  CHECK_THAT(
      disagreement(endings, Agreement::Bitwise),
      ContainsText("mode ddp: expected the parameters that mode naive ended with, bit for bit") &&
          ContainsText("checksum 1.5 and 1"));
  CHECK_THAT(
      disagreement({ending("naive", 1), ending("ddp", 2, 0.5)}, Agreement::Rounded),
      ContainsText("mode ddp: expected the parameters that mode naive ended with, but for"));
  CHECK_FALSE(
      disagreement({ending("a", 1), ending("b", 2, std::nan(""))}, Agreement::Rounded).empty());
}

TEST_CASE("a training that diverged does not agree", "[benchmarks][pure][errors]") {
  CHECK_THAT(
      disagreement(
          {ending("naive", 1, 0, INFINITY), ending("ddp", 1, 0, INFINITY)}, Agreement::Bitwise),
      ContainsText("mode naive: expected finite parameters") && ContainsText("diverged"));
}

TEST_CASE("a rank that ends with other parameters is named", "[benchmarks][pure][errors]") {
  const std::vector<std::string> modes = {"c10d", "ddp"};
  CHECK(ddp_bench::disagreement_of_ranks(modes, {{1, 2}, {1, 2}, {1, 2}}).empty());
  CHECK(
      ddp_bench::disagreement_of_ranks(modes, {{1, 2}, {1, 2}, {1, 3}}) ==
      "mode ddp: expected the same parameters on all ranks, got others on rank 2 than on rank 0.");
}
