#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace ddp {

/// Makes a call that may never return, and waits for its result.
///
/// The call runs on a thread of its own. A call without a result in time is left behind: its thread
/// runs on by itself, and ends with the call or with the process. The call must therefore own all
/// that it uses (shared_ptr, intrusive_ptr, values).
///
/// \param call  returns a value; thread-local state of the caller, such as the current CUDA device,
///         does not apply to it. Destroyed before its result is returned.
/// \param next_look  `std::optional<time_point> next_look()`: how long to wait now; nothing to give
///         up.
/// \return  the result; nothing when the call was left behind.
/// \throws  what the call throws, with its type. std::system_error when no thread can be started.
///
/// Blocks: host. Cost: one thread start.
template <typename Call, typename NextLook>
auto bounded_call(Call call, const NextLook& next_look) -> std::enable_if_t<
    std::is_invocable_v<const NextLook&>, std::optional<std::invoke_result_t<Call&>>> {
  using Result = std::invoke_result_t<Call&>;
  std::promise<Result> promise;
  auto result = promise.get_future();
  std::thread([call = std::optional<Call>(std::move(call)),
               promise = std::move(promise)]() mutable {
    try {
      auto value = (*call)();
      // The caller may rely on it that nothing it lent is in use once it has the result.
      call.reset();
      promise.set_value(std::move(value));
    } catch (...) {
      call.reset();
      promise.set_exception(std::current_exception());
    }
  }).detach();
  while (const auto until = next_look()) {
    if (result.wait_until(*until) == std::future_status::ready) return result.get();
  }
  return std::nullopt;
}

/// The same, until a point in time.
template <typename Call>
auto bounded_call(Call call, std::chrono::steady_clock::time_point until)
    -> std::optional<std::invoke_result_t<Call&>> {
  auto left = std::make_optional(until);
  return bounded_call(std::move(call), [&left] { return std::exchange(left, std::nullopt); });
}

}  // namespace ddp
