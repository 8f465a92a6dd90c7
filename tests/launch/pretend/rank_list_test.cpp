#include "launch/pretend/rank_list.h"

#include <optional>
#include <string>
#include <vector>

#include <ddp/internal/rank_list.h>

#include "support/catch.h"

using ddp::rank_list_text;
using namespace ddp::launch;
using Ranks = std::vector<int>;

TEST_CASE("lists of ranks are numbers, ranges and steps", "[pure]") {
  CHECK(parse_rank_list("7", 8) == Ranks{7});
  CHECK(parse_rank_list("0,7,3", 8) == Ranks{0, 7, 3});
  CHECK(parse_rank_list("2-5", 8) == Ranks{2, 3, 4, 5});
  CHECK(parse_rank_list("0-1016:508,1", 1024) == Ranks{0, 508, 1016, 1});
  CHECK(parse_rank_list("0-7:3", 8) == Ranks{0, 3, 6});
  for (const char* bad :
       {"", ",", "8", "-1", "3-2", "0-8", "0-", "-3", "0:2", "0-4:0", "0-4:", "a", "0,,1", "0 ",
        "1-2-3", "99999999999", "0-3:2:1"}) {
    CAPTURE(bad);
    CHECK_FALSE(parse_rank_list(bad, 8));
  }
}

TEST_CASE("texts of ranks are short, and are read as the same ranks", "[pure]") {
  CHECK(rank_list_text({0, 1, 2, 3}) == "0-3");
  CHECK(rank_list_text({3, 11, 19, 20}) == "3-19:8,20");
  CHECK(rank_list_text({5, 6, 9}) == "5,6,9");
  CHECK(rank_list_text({4, 0, 8}) == "4,0,8");
  CHECK(short_ranks_text({7}) == "rank 7");
  CHECK(short_ranks_text({0, 2, 3, 4}) == "ranks 0, 2-4");
  for (const Ranks& ranks :
       {Ranks{0}, Ranks{9, 8, 7}, Ranks{0, 4, 8, 9, 10, 3, 3, 3}, Ranks{1, 2}}) {
    CHECK(parse_rank_list(rank_list_text(ranks), 16) == ranks);
  }
}
