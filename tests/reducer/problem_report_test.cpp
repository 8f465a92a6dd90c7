#include "reducer/problem_report.h"

#include "support/catch.h"

namespace ddp {

TEST_CASE("names are listed up to ten", "[pure][problem_report]") {
  CHECK(join_names({}) == "");
  CHECK(join_names({"a", "b"}) == "a, b");
  const std::vector<std::string> many(12, "w");
  CHECK(join_names(many) == "w, w, w, w, w, w, w, w, w, w and 2 more");
}

TEST_CASE("a problem is told once, with all ranks that met it", "[pure][problem_report]") {
  const Problem a{"no gradient for x", "Do this."};
  const Problem b{"wrong dtype", "Do that."};
  CHECK(describe_problems({{}, {a}}) == "Reducer: no gradient for x on rank 1 of 2. Do this.");
  CHECK(
      describe_problems({{a}, {b}, {a, b}}) ==
      "Reducer: no gradient for x on ranks 0, 2 of 3. Do this.\n"
      "Reducer: wrong dtype on ranks 1, 2 of 3. Do that.");
  CHECK(describe_problems({{a}, {a}}) == "Reducer: no gradient for x on every rank. Do this.");
  CHECK(describe_problems({{a}}) == "Reducer: no gradient for x on rank 0 of 1. Do this.");
}

}  // namespace ddp
