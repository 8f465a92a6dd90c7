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
/// The call runs on a thread of its own. If it has no result in time, it is abandoned: its thread
/// continues, and ends with the call or with the process. The call must therefore own everything
/// that it uses (shared_ptr, intrusive_ptr, values).
///
/// \param call  returns a value; thread-local state of the caller, such as the current CUDA device,
///         does not apply to it. Destroyed before its result is returned.
/// \param next_check  `std::optional<time_point> next_check()`: until when to wait for the result
///         before the next call of next_check(); nothing to abandon the call.
/// \return  the result; nothing if the call was abandoned.
/// \throws  the call's exception, with its type. std::system_error when no thread can be started.
///
/// Blocks: host. Cost: one thread start.
template <typename Call, typename NextCheck>
auto bounded_call(Call call, const NextCheck& next_check) -> std::enable_if_t<
    std::is_invocable_v<const NextCheck&>, std::optional<std::invoke_result_t<Call&>>> {
  using Result = std::invoke_result_t<Call&>;
  std::promise<Result> promise;
  auto result = promise.get_future();
  std::thread([call = std::optional<Call>(std::move(call)),
               promise = std::move(promise)]() mutable {
    try {
      auto value = (*call)();
      // Once the caller has the result, nothing that it lent to the call may be in use.
      call.reset();
      promise.set_value(std::move(value));
    } catch (...) {
      call.reset();
      promise.set_exception(std::current_exception());
    }
  }).detach();
  while (const auto until = next_check()) {
    if (result.wait_until(*until) == std::future_status::ready) return result.get();
  }
  return std::nullopt;
}

/// The same with a point in time as the limit.
template <typename Call>
auto bounded_call(Call call, std::chrono::steady_clock::time_point until)
    -> std::optional<std::invoke_result_t<Call&>> {
  auto left = std::make_optional(until);
  return bounded_call(std::move(call), [&left] { return std::exchange(left, std::nullopt); });
}

}  // namespace ddp
