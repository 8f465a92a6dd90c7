// The texts that ranks write for each other do not depend on the program's locale.
#include <cstdint>
#include <locale>
#include <string>
#include <vector>

#include <c10/util/StringUtil.h>
#include <ddp/internal/text.h>

#include "comm/subgroups/subgroups.h"
#include "support/foreign_locale.h"

#include "support/catch.h"

namespace ddp {
namespace {

class WithForeignLocale {
 public:
  WithForeignLocale() : before_(std::locale::global(testing::foreign_locale())) {}
  ~WithForeignLocale() { std::locale::global(before_); }
  WithForeignLocale(const WithForeignLocale&) = delete;
  WithForeignLocale& operator=(const WithForeignLocale&) = delete;

 private:
  const std::locale before_;
};

TEST_CASE("numbers are written the same under every locale", "[text][pure]") {
  const WithForeignLocale foreign;
  REQUIRE(c10::str(2000, ' ', 0.5) == "2 0 0 0 0,5");  // otherwise nothing below is tested
  CHECK(ddp::str(2000, ' ', 0.5) == "2000 0.5");
  CHECK(
      ddp::str("step ", int64_t{1} << 40, " of ", std::string("all")) ==
      "step 1099511627776 of all");
  CHECK(joined_by(", ", std::vector<int>{10, 200}) == "10, 200");
  CHECK(joined_by(", ", std::vector<int>{}) == "");
  CHECK(joined_by(" and ", std::vector<std::string>{"a", "b", "c"}) == "a and b and c");
}

TEST_CASE("numbers are read the same under every locale", "[text][pure]") {
  const WithForeignLocale foreign;
  InputText text("1 200 0.5 why");
  int rank = 0, number = 0;
  double half = 0;
  std::string why;
  text >> rank >> number >> half >> why;
  CHECK(rank == 1);
  CHECK(number == 200);
  CHECK(half == 0.5);
  CHECK(why == "why");
}

TEST_CASE("packed texts are unpacked unchanged", "[text][pure]") {
  const WithForeignLocale foreign;
  const std::vector<std::string> texts{
      "", "2:a", "two\nlines\t", std::string("\0:", 2), std::string(1234, ' '), ""};
  CHECK(unpacked(packed(texts)) == texts);
  CHECK(unpacked(packed({})).empty());
  CHECK(packed({"foo", ""}) == "3:foo0:");
}

}  // namespace
}  // namespace ddp

TEST_CASE(
    "the list of a large group's ranks is short, and that of no other group", "[comm][pure]") {
  CHECK(ddp::member_list_text({0, 2, 5}) == "[0, 2, 5]");
  std::vector<int> ranks;
  for (int rank = 0; rank < 100'000; ++rank) ranks.push_back(rank);
  const auto all = ddp::member_list_text(ranks);
  CHECK(all.size() < 120);
  CHECK(all.find("[0, 1, 2, 3, ..., 99996, 99997, 99998, 99999] (100000 ranks, hash ") == 0);
  ranks.erase(ranks.begin() + 50'000);
  ranks.push_back(ranks.back());
  const auto other = ddp::member_list_text(ranks);
  ranks[50'000] = 50'000;
  CHECK(ddp::member_list_text(ranks) != other);
}

TEST_CASE("JSON strings are escaped", "[comm][pure]") {
  CHECK(ddp::json_text("a\"b\\c\nd") == R"("a\"b\\c\u000ad")");
}
