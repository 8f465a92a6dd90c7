#include "launch/hosts/coordinator.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <sstream>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include "launch/hosts/reserved_port.h"

namespace ddp::launch {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::minutes kJoinLimit(5);
constexpr std::chrono::seconds kLineLimit(5);  // for the rest of a line that has begun

constexpr std::chrono::milliseconds kGrace(5000);      // a Supervisor's longest default
constexpr std::chrono::milliseconds kEndLimit(20000);  // after which a host counts as lost

}  // namespace

Coordinator::Coordinator(const LaunchOptions& options)
    : options_(options),
      listener_(listen_on(options.master_port)),
      stop_(make_pipe()),
      hosts_(static_cast<size_t>(options.nodes)),
      running_(hosts_.size(), false),
      thread_([this] {
        try {
          run();
        } catch (const std::exception& error) {
          send_to_all(std::string("finish 1 ") + error.what());
        }
      }) {}

Coordinator::~Coordinator() {
  stop_.write.reset();
  thread_.join();
}

void Coordinator::run() {
  if (!gather_hosts()) return;
  listener_.reset();
  for (int number = 0;; ++number) {
    const ReservedPort reserved;  // held until the attempt has ended
    send_to_all("start " + std::to_string(number) + " " + std::to_string(reserved.port()));
    const auto failure = run_attempt();
    if (!failure) return send_to_all("finish 0 ");
    if (failure->restartable && number < options_.max_restarts) continue;
    std::string text = failure->text;
    if (failure->restartable && number > 0) {
      text = "gave up: no restart of " + std::to_string(number) + " is left";
    }
    return send_to_all("finish " + std::to_string(failure->code) + " " + text);
  }
}

/// \return whether all hosts have joined.
bool Coordinator::gather_hosts() {
  const auto deadline = Clock::now() + kJoinLimit;
  const auto joined = [this] {
    return std::count_if(
        hosts_.begin(), hosts_.end(), [](const LineSocket& host) { return bool(host); });
  };
  while (joined() < options_.nodes) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd waited[] = {{listener_.get(), POLLIN, 0}, {stop_.read.get(), POLLIN, 0}};
    const int ready = left.count() > 0 ? ::poll(waited, 2, static_cast<int>(left.count())) : 0;
    if (ready <= 0) {
      send_to_all(
          "refuse expected " + std::to_string(options_.nodes) + " hosts within 5 minutes, got " +
          std::to_string(joined()) + ". Start ddprun on the others.");
      return false;
    }
    if (waited[1].revents != 0) return false;
    Fd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd) admit_host(LineSocket(std::move(fd)));
  }
  return true;
}

/// Closes a stranger's connection without an answer.
void Coordinator::admit_host(LineSocket host) {
  std::istringstream line(host.read_line(kLineLimit).value_or(""));
  std::string word;
  int node = -1;
  int nodes = 0;
  int ranks = 0;
  int restarts = 0;
  if (!(line >> word >> node >> nodes >> ranks >> restarts) || word != "join") return;
  if (nodes != options_.nodes || ranks != options_.local_ranks ||
      restarts != options_.max_restarts) {
    return host.send_line(
        "refuse expected node 0's --nnodes " + std::to_string(options_.nodes) +
        ", --nproc-per-node " + std::to_string(options_.local_ranks) + " and --max-restarts " +
        std::to_string(options_.max_restarts) + ", got " + std::to_string(nodes) + ", " +
        std::to_string(ranks) + " and " + std::to_string(restarts));
  }
  if (node < 0 || node >= nodes) return;
  LineSocket& place = hosts_[static_cast<size_t>(node)];
  pollfd earlier = {place.fd(), POLLIN, 0};
  // Hosts send nothing before the start, so a connection that is readable has closed.
  if (place && ::poll(&earlier, 1, 0) == 0) {
    return host.send_line(
        "refuse --node-rank: expected one host with each, got a second one with " +
        std::to_string(node));
  }
  place = std::move(host);
}

/// \return the first failure, once all hosts have ended the attempt; nothing after a success.
std::optional<Coordinator::Failure> Coordinator::run_attempt() {
  const auto end_limit = static_cast<int>((options_.grace.value_or(kGrace) + kEndLimit).count());
  std::optional<Failure> first;
  running_.assign(hosts_.size(), true);
  while (std::count(running_.begin(), running_.end(), true) > 0) {
    std::vector<pollfd> waited;
    // poll skips a negative descriptor.
    for (size_t node = 0; node < hosts_.size(); ++node) {
      waited.push_back({running_[node] ? hosts_[node].fd() : -1, POLLIN, 0});
    }
    const bool in_time = ::poll(waited.data(), waited.size(), first ? end_limit : -1) > 0;
    for (size_t node = 0; node < hosts_.size(); ++node) {
      if (!running_[node] || (in_time && waited[node].revents == 0)) continue;
      auto failure = take_report(node);
      if (!failure) continue;
      if (!first) send_to_all("end");
      if (!first || !failure->restartable) first = std::move(failure);
    }
  }
  return first;
}

std::optional<Coordinator::Failure> Coordinator::take_report(size_t node) {
  running_[node] = false;
  std::istringstream line(hosts_[node].read_line(kLineLimit).value_or(""));
  std::string word;
  int code = 0;
  bool restartable = false;
  if (line >> word >> code >> restartable && word == "ended") {
    if (code == 0) return std::nullopt;
    if (restartable) return Failure{code, true, ""};
    return Failure{
        code, false,
        "node " + std::to_string(node) + " ended the job with code " + std::to_string(code)};
  }
  hosts_[node].close();
  return Failure{1, false, "the ddprun of node " + std::to_string(node) + " is gone"};
}

void Coordinator::send_to_all(const std::string& line) {
  for (const LineSocket& host : hosts_) host.send_line(line);
}

}  // namespace ddp::launch
