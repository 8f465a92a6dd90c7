#include "launch/hosts/hosts_loop.h"

#include <climits>
#include <csignal>
#include <cstring>
#include <utility>

#include <poll.h>
#include <unistd.h>

#include <ddp/internal/text.h>

#include "launch/hosts/remote_command.h"
#include "launch/pipe.h"
#include "launch/poll_until.h"
#include "launch/processes/signals.h"
#include "launch/processes/spawn.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kGraceOfLeavers(30000);  // of ranks that may save what they have
constexpr milliseconds kHostLimit(15000);       // beyond its ranks' grace period
constexpr milliseconds kWaitForClients(2000);

std::string current_folder() {
  char folder[PATH_MAX];
  if (::getcwd(folder, sizeof(folder)) != nullptr) return folder;
  throw_errno("cannot name the working folder");
}

/// The path of this ddprun, which the hosts have at the same place.
std::string own_path() {
  char path[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof(path));
  if (size > 0) return {path, static_cast<size_t>(size)};
  throw_errno("cannot name ddprun's path");
}

}  // namespace

std::string PortLine::filter(std::string_view bytes) {
  if (port_ > 0) return std::string(bytes);
  std::string passed;
  held_ += bytes;
  for (size_t end; port_ == 0 && (end = held_.find('\n')) != std::string::npos;) {
    const auto line = held_.substr(0, end + 1);
    held_.erase(0, end + 1);
    port_ = port_of_line(line);
    if (port_ == 0) passed += line;
  }
  if (port_ > 0) passed += std::exchange(held_, {});
  return passed;
}

HostsLoop::HostsLoop(const LaunchOptions& options, int lifeline)
    : options_(options),
      hosts_(*options.hosts),
      lifeline_(lifeline),
      signals_(open_signals(awaited_signals())),
      clients_(/*kills_groups=*/false),
      output_(STDOUT_FILENO, STDERR_FILENO) {
  ::signal(SIGPIPE, SIG_IGN);  // a write reports EPIPE
}

int HostsLoop::run() {
  start_those_that_can();
  while (clients_.count() > 0) {
    wait_for_event();
    handle_signals();
    check_lifeline();
    copy_output();
    reap_ended();
    if (state_ == State::Running) start_those_that_can();
    check_deadline();
    if (state_ == State::Killing && Clock::now() >= deadline_) break;
  }
  finish_output();
  return exit_code_;
}

/// All others need the port.
void HostsLoop::start_those_that_can() {
  const bool needs_port = options_.nodes > 1 && options_.master_port == 0;
  if (started_ == 0) start(0, options_.master_port);
  const int port = needs_port ? port_line_.port() : options_.master_port;
  if (needs_port && port == 0) return;
  while (started_ < options_.nodes) start(started_, port);
}

void HostsLoop::start(int node, int port) {
  const auto environment = passed_on(current_environment(), hosts_.variables);
  auto command = hosts_.rsh;
  command.push_back(hosts_.names.at(static_cast<size_t>(node)));
  command.push_back(remote_command(
      current_folder(), environment, own_path(), host_arguments(options_, node, port)));
  Output::Filter filter;
  if (node == 0 && port == 0 && options_.nodes > 1) {
    filter = [this](std::string_view bytes) { return port_line_.filter(bytes); };
  }
  const auto ends = output_.add_launcher(std::move(filter));
  Pipe orders = make_pipe();
  const pid_t pid =
      spawn(command, current_environment(), {orders.read.get(), ends.out.get(), ends.err.get()});
  clients_.add(node, pid, node);
  orders_[node] = std::move(orders.write);
  ++started_;
}

void HostsLoop::wait_for_event() {
  std::vector<pollfd> waited = {{signals_.get(), POLLIN, 0}, {clients_.fd(), POLLIN, 0}};
  if (lifeline_is_open_) waited.push_back({lifeline_, POLLIN, 0});
  output_.add_to(waited);
  std::optional<Clock::time_point> next;
  if (state_ != State::Running) next = deadline_;
  poll_until(waited, next);
}

void HostsLoop::handle_signals() {
  while (const auto signal = next_signal(signals_.get())) {
    if (*signal == SIGWINCH) {
      output_.resize();
    } else if (*signal != SIGCHLD) {  // SIGCHLD only wakes the loop
      on_signal(*signal);
    }
  }
}

void HostsLoop::on_signal(int signal) {
  if (state_ == State::Killing) return;
  if (clients_.count() > 0) {
    output_.say("got " + signal_name(signal) + "; passing it on to " + count_left());
  }
  send({signal});
  if (is_only_forwarded(signal)) {
    noticed_ = true;
    return;
  }
  ++signals_taken_;
  if (state_ == State::Ending) return;
  exit_code_ = 128 + signal;
  begin_ending();
}

void HostsLoop::check_lifeline() {
  if (!lifeline_is_open_) return;
  pollfd lifeline = {lifeline_, POLLIN, 0};
  if (::poll(&lifeline, 1, 0) <= 0) return;
  lifeline_is_open_ = false;
  if (state_ == State::Running) exit_code_ = 128 + SIGKILL;
  output_.say("was killed itself; ending " + count_left());
  begin_killing();
}

void HostsLoop::copy_output() {
  output_.copy();
  if (output_.error() == 0 || state_ != State::Running) return;
  exit_code_ = 128 + SIGPIPE;
  send({});
  begin_ending();
}

void HostsLoop::reap_ended() {
  for (const auto& [client, status] : clients_.reap()) {
    output_.drain(client.output);
    orders_.erase(client.rank);
    on_ended(client.rank, status);
  }
}

void HostsLoop::on_ended(int node, int status) {
  int code = exit_code_of(status);
  auto how = describe_end(status);
  // A first host may name its port and end before this loop starts the others.
  const bool lacks_port = started_ < options_.nodes && port_line_.port() == 0;
  if (code == 0 && lacks_port) {
    code = 1;
    how = "ended before its ddprun named a port";
  }
  if (code == 0 || state_ != State::Running) return;
  exit_code_ = code;
  const bool leaves = noticed_ && code == kLeftCode;
  const auto left =
      clients_.count() == 0 ? "" : (leaves ? "; waiting for " : "; ending ") + count_left();
  output_.say(str(name_of(node), ": ", hosts_.rsh.front(), " ", how, left));
  if (!leaves) send({});  // the others got the notice, too
  begin_ending();
}

/// The hosts end their ranks by themselves; what does not come to an end is cut off.
void HostsLoop::check_deadline() {
  if (state_ != State::Ending || Clock::now() < deadline_ || clients_.count() == 0) return;
  output_.say("the hosts took too long to end; killing the clients of " + count_left());
  begin_killing();
}

void HostsLoop::send(const Order& order) {
  const auto line = line_of(order);
  for (auto& [node, fd] : orders_) {
    // A few bytes fit into the pipe; a client that is gone is reaped.
    if (::write(fd.get(), line.data(), line.size()) < 0) continue;
  }
}

void HostsLoop::begin_ending() {
  state_ = State::Ending;
  const auto grace =
      options_.grace.value_or(options_.elastic || noticed_ ? kGraceOfLeavers : kGraceAfterSignal);
  deadline_ = Clock::now() + grace + kHostLimit;
}

void HostsLoop::begin_killing() {
  state_ = State::Killing;
  deadline_ = Clock::now() + kWaitForClients;
  orders_.clear();
  clients_.send(SIGKILL);
}

/// Writes the rest of the output; a signal stops waiting for the reader.
void HostsLoop::finish_output() {
  const int signals_before = signals_taken_;
  output_.write_rest({{signals_.get(), POLLIN, 0}, {lifeline_, POLLIN, 0}}, [&] {
    handle_signals();
    check_lifeline();
    return lifeline_is_open_ && signals_taken_ == signals_before;
  });
}

std::string HostsLoop::name_of(int node) const {
  return str("host ", hosts_.names.at(static_cast<size_t>(node)), " (node ", node, ")");
}

std::string HostsLoop::count_left() const { return count_of(clients_.count(), "host"); }

}  // namespace ddp::launch
