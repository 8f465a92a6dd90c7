#include <ddp/preemption_notice.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <map>
#include <mutex>

#include <unistd.h>

#include <ATen/ops/full.h>
#include <ddp/collectives.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

namespace ddp {
namespace {

// Written by the handler alone, in whichever thread it runs; a lock could be held there already.
std::array<std::atomic<bool>, NSIG> came{};
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void note_signal(int signal) { came[static_cast<size_t>(signal)] = true; }

/// The handlers of all notices that live.
struct Handlers {
  struct Installed {
    int users = 0;
    struct sigaction before {};
  };

  std::mutex mutex;
  std::map<int, Installed> by_signal;

  static Handlers& instance() {
    static Handlers handlers;
    return handlers;
  }

  /// \return 0, or why not: an errno.
  int add(int signal) {
    const std::lock_guard lock(mutex);
    const auto found = by_signal.find(signal);
    if (found != by_signal.end()) return ++found->second.users, 0;
    Installed installed{1, {}};
    struct sigaction action {};
    action.sa_handler = note_signal;
    action.sa_flags = SA_RESTART;  // no read or write of the program fails
    if (::sigaction(signal, nullptr, &installed.before) != 0) return errno;
    came[static_cast<size_t>(signal)] = false;
    if (::sigaction(signal, &action, nullptr) != 0) return errno;
    by_signal.emplace(signal, installed);
    return 0;
  }

  void remove(int signal) {
    const std::lock_guard lock(mutex);
    const auto found = by_signal.find(signal);
    if (--found->second.users > 0) return;
    struct sigaction now {};
    ::sigaction(signal, nullptr, &now);
    if (now.sa_handler == note_signal) ::sigaction(signal, &found->second.before, nullptr);
    by_signal.erase(found);
  }
};

}  // namespace

/// Signals of one notice, while it lives.
class PreemptionSignals {
 public:
  explicit PreemptionSignals(const std::vector<int>& signals) {
    for (const int signal : signals) {
      const int problem = Handlers::instance().add(signal);
      if (problem == 0) {
        added_.push_back(signal);
        continue;
      }
      remove_all();
      DDP_CHECK_VALUE(
          false, "PreemptionNoticeOptions: expected signals that can be handled, got ", signal,
          " (", std::strerror(problem), "). Leave it out.");
    }
  }
  ~PreemptionSignals() { remove_all(); }
  C10_DISABLE_COPY_AND_ASSIGN(PreemptionSignals);

  bool has_come() const {
    return any_of(added_, [](int signal) { return came[static_cast<size_t>(signal)].load(); });
  }

 private:
  void remove_all() {
    for (const int signal : added_) Handlers::instance().remove(signal);
  }

  std::vector<int> added_;
};

namespace {

PreemptionNoticeOptions checked(const PreemptionNoticeOptions& options) {
  DDP_CHECK_VALUE(
      options.check_every() >= 1,
      "PreemptionNoticeOptions: expected check_every of at least 1, got ", options.check_every(),
      ". 1 lets the ranks ask each other in every call.");
  DDP_CHECK_VALUE(
      1 <= options.exit_code() && options.exit_code() <= 255,
      "PreemptionNoticeOptions: expected an exit_code from 1 to 255, got ", options.exit_code(),
      ". 0 says that the training is done, and no job has a code above 255.");
  (void)options.group().given();
  return options;
}

/// Collective, in a group of several ranks.
bool is_true_on_any(bool own, const ProcessGroup& group) {
  if (group->getSize() == 1) return own;
  const auto kind = at::TensorOptions(carrier_device(*group)).dtype(at::kLong);
  const auto by_any = all_reduce(at::full({1}, own ? 1 : 0, kind), c10d::ReduceOp::MAX, group);
  return by_any.item<int64_t>() != 0;
}

}  // namespace

struct PreemptionNotice::Impl {
  explicit Impl(const PreemptionNoticeOptions& given)
      : options(checked(given)), signals(options.signals()) {}

  bool was_told() const {
    return signals.has_come() ||
           (!options.path().empty() && ::access(options.path().c_str(), F_OK) == 0);
  }

  const PreemptionNoticeOptions options;
  const PreemptionSignals signals;
  int64_t calls = 0;
  bool requested = false;  // by all ranks
};

PreemptionNotice::PreemptionNotice(const PreemptionNoticeOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}

PreemptionNotice::~PreemptionNotice() = default;

bool PreemptionNotice::requested() {
  if (impl_->requested || ++impl_->calls % impl_->options.check_every() != 0) {
    return impl_->requested;
  }
  impl_->requested = is_true_on_any(impl_->was_told(), impl_->options.group().get());
  return impl_->requested;
}

void PreemptionNotice::leave() {
  try {
    // The end of one rank makes a launcher end the others, which may still save.
    barrier(impl_->options.group());
  } catch (const std::exception&) {
    // Ranks that have failed do not come, and this one leaves all the same.
  }
  std::cout.flush();
  std::clog.flush();
  std::fflush(nullptr);
  std::quick_exit(impl_->options.exit_code());
}

int PreemptionNotice::exit_code() const { return impl_->options.exit_code(); }

}  // namespace ddp
