#include "launch/job/coordinator.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <locale>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ddp/internal/text.h>

#include "launch/poll_until.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr std::chrono::seconds kFirstLineLimit(10);
constexpr std::chrono::seconds kAcceptAgain(1);
constexpr int kMostSilent = 64;
constexpr std::chrono::seconds kLastLinesLimit(2);

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw std::runtime_error("--state: expected a file of a coordinator, got " + path + ": " + why);
}

}  // namespace

StateFile::StateFile(std::string path) : path_(std::move(path)) {
  lock_ = Fd(::open((path_ + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (!lock_) fail(path_, std::strerror(errno));
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) fail(path_, "another coordinator has it");
}

std::optional<Remembered> StateFile::read() const {
  std::ifstream file(path_);
  if (!file) return std::nullopt;
  file.imbue(std::locale::classic());
  Remembered state;
  std::string word;
  size_t members = 0;
  if (!(file >> word >> state.number >> state.formed >> state.established >> members) ||
      word != "ddprun-coordinator") {
    fail(path_, "it is something else");
  }
  membership::Place place;
  char colon = 0;
  while (file >> place.id >> colon >> place.slot) state.members.push_back(place);
  if (state.members.size() != members) fail(path_, "its end is missing");
  return state;
}

void StateFile::write(const Remembered& state) const {
  auto text =
      str("ddprun-coordinator ", state.number, " ", state.formed, " ", state.established, " ",
          state.members.size());
  for (const auto& place : state.members) text += str(" ", place.id, ":", place.slot);
  text += "\n";
  const std::string fresh = path_ + ".new";
  const Fd file(::open(fresh.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644));
  const auto size = static_cast<ssize_t>(text.size());
  if (!file || ::write(file.get(), text.data(), text.size()) != size || ::fsync(file.get()) != 0 ||
      std::rename(fresh.c_str(), path_.c_str()) != 0) {
    fail(path_, std::strerror(errno));
  }
}

void StateFile::remove() const { std::remove(path_.c_str()); }

Coordinator::Coordinator(
    const LaunchOptions& options, const std::string& token, std::optional<int> port) {
  if (port) {
    listener_ = listen_on(*port);
    port_ = port_of(listener_);
    set_nonblocking(listener_);
  }
  std::optional<Remembered> earlier;
  if (options.elastic && !options.elastic->state.empty()) {
    earlier = state_file_.emplace(options.elastic->state).read();
  }
  const bool is_alone = options.command.empty();
  job_.emplace(options, token, wires(is_alone), now(), std::move(earlier));
}

/// \param is_alone  whether no launcher of this host is a client; the job's texts are printed then.
Job::Wires Coordinator::wires(bool is_alone) {
  Job::Wires wires;
  wires.send = [this](int client, const std::string& line) {
    const auto found = clients_.find(client);
    if (found != clients_.end()) found->second.channel.send(line);
  };
  wires.close = [this](int client) {
    const auto found = clients_.find(client);
    if (found != clients_.end()) found->second.channel.close_after_sending();
  };
  wires.watch = [this](int client) { clients_.at(client).channel.close_when_peer_is_lost(); };
  wires.remember = [this](const Remembered& state) {
    if (state_file_) state_file_->write(state);
  };
  wires.new_port = [this] { return reserved_.emplace().port(); };
  wires.reached_at = [this](int client) {
    const auto found = clients_.find(client);
    return found == clients_.end() ? std::string() : found->second.channel.local_host();
  };
  wires.say = [is_alone](const std::string& text) {
    if (is_alone) std::fprintf(stderr, "ddprun: %s\n", text.c_str());
  };
  return wires;
}

membership::LineChannel Coordinator::local_client() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    throw_errno("cannot make a pair of sockets");
  }
  clients_[++last_name_] = {LineChannel(Fd(ends[0])), Clock::now()};
  return LineChannel(Fd(ends[1]));
}

std::chrono::milliseconds Coordinator::now() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start_);
}

void Coordinator::add_to(std::vector<pollfd>& waited) const {
  if (may_accept()) waited.push_back({listener_.get(), POLLIN, 0});
  for (const auto& [name, client] : clients_) client.channel.add_to(waited);
}

std::optional<Coordinator::Clock::time_point> Coordinator::next_time() const {
  std::optional<Clock::time_point> next;
  if (const auto time = job_->next_time()) next = start_ + *time;
  if (next_accept_ > Clock::now() && (!next || next_accept_ < *next)) next = next_accept_;
  for (const auto& [name, client] : clients_) {
    const auto limit = client.since + kFirstLineLimit;
    if (!client.spoke && (!next || limit < *next)) next = limit;
  }
  return next;
}

/// Reads before the job looks at the time: after a stop of this process, signs of life wait in the
/// sockets. Reads members before launchers and handles closed connections last: the messages of a
/// process precede its exit, and its exit precedes the end of its connection.
void Coordinator::serve() {
  accept_clients();
  std::vector<int> names;
  for (const auto& [name, client] : clients_) names.push_back(name);
  for (const bool launchers : {false, true}) {
    for (const int name : names) {
      if (job_->is_launcher(name) == launchers) read_lines_of(name);
    }
  }
  for (const int name : names) drop_if_ended(name);
  job_->on_time(now());
}

/// Limits the descriptors of clients that have not sent a line.
bool Coordinator::may_accept() const {
  const auto is_silent = [](const auto& entry) { return !entry.second.spoke; };
  const auto silent = std::count_if(clients_.begin(), clients_.end(), is_silent);
  return listener_ && silent < kMostSilent && Clock::now() >= next_accept_;
}

void Coordinator::accept_clients() {
  while (may_accept()) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      const bool none_waits = errno == EAGAIN || errno == EWOULDBLOCK;
      if (!none_waits) next_accept_ = Clock::now() + kAcceptAgain;  // out of descriptors
      return;
    }
    clients_[++last_name_] = {LineChannel(std::move(socket)), Clock::now()};
  }
}

void Coordinator::read_lines_of(int name) {
  Client& client = clients_.at(name);
  for (const auto& line : client.channel.exchange()) {
    client.spoke = true;
    job_->on_line(now(), name, line);
  }
}

void Coordinator::drop_if_ended(int name) {
  const Client& client = clients_.at(name);
  const bool is_silent = !client.spoke && Clock::now() >= client.since + kFirstLineLimit;
  if (client.channel && !is_silent) return;
  clients_.erase(name);
  job_->on_closed(now(), name);
}

void Coordinator::finish_sending() {
  if (state_file_) state_file_->remove();
  const auto deadline = Clock::now() + kLastLinesLimit;
  for (auto& [name, client] : clients_) client.channel.close_after_sending();
  for (;;) {
    std::vector<pollfd> waited;
    for (auto& [name, client] : clients_) {
      client.channel.exchange();
      client.channel.add_to(waited);
    }
    if (waited.empty() || Clock::now() >= deadline) return;
    poll_until(waited, deadline);
  }
}

}  // namespace ddp::launch
