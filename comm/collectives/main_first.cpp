#include <ddp/main_first.h>

#include <exception>
#include <string>
#include <vector>

#include <ddp/internal/check.h>
#include <ddp/internal/gather_strings.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Throws on every rank if a rank has an exception: the first such rank rethrows its own, the others
// throw its text.
void throw_if_any_failed(
    const std::exception_ptr& own, const char* expected, const char* where,
    const ProcessGroup& group) {
  // The mark distinguishes an exception with an empty text from no exception.
  const auto text = own ? ddp::str('!', text_of(own)) : "";
  int failed = -1;
  try {
    agree(text, group, where, [&](const std::vector<std::string>& texts) -> std::string {
      const auto found = find_if(texts, [](const auto& of_rank) { return !of_rank.empty(); });
      if (found == texts.end()) return "";
      failed = static_cast<int>(found - texts.begin());
      return ddp::str(
          "main_first: expected the function to return on ", expected,
          ", got an exception on rank ", failed, " of ", texts.size(), ": ", found->substr(1));
    });
  } catch (const AgreedError&) {
    if (failed == group->getRank()) std::rethrow_exception(own);
    throw;
  }
}

}  // namespace

void detail::run_main_first(const std::function<void()>& run, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  const bool main = group->getRank() == 0;
  throw_if_any_failed(
      main ? exception_of(run) : nullptr, "rank 0 before the other ranks run it",
      "main_first (rank 0 runs its function first)", group);
  throw_if_any_failed(
      main ? nullptr : exception_of(run), "every rank",
      "main_first (the other ranks run its function)", group);
}

}  // namespace ddp
