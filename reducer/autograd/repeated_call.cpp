#include <ddp/internal/repeated_call.h>

#include <atomic>
#include <utility>

namespace ddp {
namespace {

thread_local int64_t call_of_thread = 0;

}  // namespace

int64_t repeated_call() { return call_of_thread; }

int64_t new_repeated_call() {
  static std::atomic<int64_t> last = 0;
  return ++last;
}

RepeatedCallScope::RepeatedCallScope(int64_t call) : before_(std::exchange(call_of_thread, call)) {}

RepeatedCallScope::~RepeatedCallScope() { call_of_thread = before_; }

}  // namespace ddp
