#pragma once

#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include <ddp/export.h>
#include <ddp/process_group.h>

namespace ddp {

namespace detail {
DDP_API void run_main_first(const std::function<void()>& run, const GroupArg& group);
}  // namespace detail

/// Runs `f` on rank 0 of the group, and then on the other ranks at the same time: the first run
/// downloads a data set or fills a cache, the others find it there.
///
/// Example:
/// ```
/// auto dataset = ddp::main_first([] { return open_or_download("data"); });
/// ```
/// Rank 0 is the group's: one for all hosts. If each host has a disk of its own, pass a group of
/// the host's ranks.
///
/// \param f  takes no arguments; must not contain collectives, because rank 0 runs it alone. Must
///        return within the group's timeout, which is how long the other ranks wait.
/// \return what `f` returns on this rank, by value.
/// \throws  on every rank if `f` throws on one. The first rank that failed rethrows what `f`
///         threw, the others a c10::Error with its text. After an exception on rank 0 the others do
///         not run `f`. The group stays usable.
///
/// Collective: yes. Blocks: host.
template <typename F>
auto main_first(F&& f, const GroupArg& group = {}) {
  using Result = std::decay_t<std::invoke_result_t<F&>>;
  if constexpr (std::is_void_v<Result>) {
    detail::run_main_first([&f] { std::invoke(f); }, group);
  } else {
    std::optional<Result> result;
    detail::run_main_first([&] { result.emplace(std::invoke(f)); }, group);
    return Result(*std::move(result));
  }
}

}  // namespace ddp
