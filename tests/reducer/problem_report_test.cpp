#include "reducer/status/problem_report.h"

#include <algorithm>

#include <ddp/internal/join_names.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "support/ranks.h"

#include "support/catch.h"

namespace ddp {

TEST_CASE("join_names lists at most ten names", "[pure][problem_report]") {
  CHECK(join_names({}) == "");
  CHECK(join_names({"a", "b"}) == "a, b");
  const std::vector<std::string> many(12, "w");
  CHECK(join_names(many) == "w, w, w, w, w, w, w, w, w, w and 2 more");
}

TEST_CASE("a problem is listed once, with all ranks that met it", "[pure][problem_report]") {
  const Problem a{"no gradient for x", "Do this."};
  const Problem b{"wrong dtype", "Do that."};
  const auto describe = [](const std::vector<std::vector<Problem>>& by_rank) {
    return describe_problems(by_rank, 3);
  };
  CHECK(describe({{}, {a}}) == "Reducer: no gradient for x on rank 1 of 2. Do this.");
  CHECK(
      describe({{a}, {b}, {a, b}}) ==
      "Reducer: no gradient for x on ranks 0, 2 of 3. Do this.\n"
      "Reducer: wrong dtype on ranks 1, 2 of 3. Do that.");
  CHECK(describe({{a}, {a}}) == "Reducer: no gradient for x on every rank. Do this.");
  CHECK(describe({{a}}) == "Reducer: no gradient for x on rank 0 of 1. Do this.");
}

TEST_CASE("parameters with one cause are listed together, each once", "[pure][problem_report]") {
  std::vector<Problem> problems;
  const auto add = [&](const std::string& what, const std::string& name, const std::string& why) {
    add_problem(problems, {what, "Do this.", {name}, why});
  };
  add("no gradients", "a", "frozen");
  add("no gradients", "b", "moved");
  add("no gradients", "c", "frozen");
  add("no gradients", "c", "frozen");
  add("other gradients", "a", "Double");  // dropped: a has a cause already
  add_problem(problems, {"too many forwards", "Do that."});
  REQUIRE(problems.size() == 3);
  CHECK(describe_problem(problems[0], 9) == "no gradients for 2 of 9 parameters (a, c: frozen)");
  CHECK(describe_problem(problems[1], 1) == "no gradients for 1 of 1 parameter (b: moved)");
  CHECK(describe_problem(problems[2], 9) == "too many forwards");
}

TEST_CASE("names may contain any characters", "[ranks][problem_report]") {
  const auto texts = testing::run_ranks<std::string>(2, [](const testing::Rank& self) {
    std::vector<Problem> problems;
    if (self.rank == 1) problems = {{"no gradients", "Do\tthis.", {"two\nlines", "with\ttab"}, ""}};
    return gather_problems(problems, 9, self.group, [](c10d::Work& work) { work.wait(); });
  });
  const std::string expected =
      "Reducer: no gradients for 2 of 9 parameters (two\nlines, with\ttab) on rank 1 of 2. "
      "Do\tthis.";
  CHECK(texts == std::vector<std::string>{expected, expected});
}

TEST_CASE("a text lists at most ten problems", "[pure][problem_report]") {
  std::vector<std::vector<Problem>> by_rank;
  for (int rank = 0; rank < 64; ++rank) {
    by_rank.push_back({{"no gradient for x" + std::to_string(rank), "Do this."}});
  }
  const auto text = describe_problems(by_rank, 3);
  CHECK(std::count(text.begin(), text.end(), '\n') == 10);
  CHECK_THAT(text, Catch::Matchers::EndsWith("and 54 more problems."));
}

}  // namespace ddp
