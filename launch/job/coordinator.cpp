#include "launch/job/coordinator.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
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

constexpr std::chrono::seconds kLineLimit(10);
constexpr std::chrono::seconds kAcceptAgain(1);
constexpr size_t kMostSilent = 64;
constexpr std::chrono::seconds kLastLinesLimit(2);

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw std::runtime_error("--state: expected a file of a coordinator, got " + path + ": " + why);
}

/// \return errno, or 0.
int write_to_disk(const std::string& path, const std::string& text) {
  const Fd file(::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644));
  const ssize_t count = file ? ::write(file.get(), text.data(), text.size()) : -1;
  if (count < 0) return errno;
  if (static_cast<size_t>(count) < text.size()) return ENOSPC;
  return ::fsync(file.get()) == 0 ? 0 : errno;
}

/// A file that was renamed has its name after a loss of power only if its folder is written, too.
///
/// \return errno, or 0: some file systems cannot.
int write_names_to_disk(const std::filesystem::path& folder) {
  const char* path = folder.empty() ? "." : folder.c_str();
  const Fd names(::open(path, O_DIRECTORY | O_RDONLY | O_CLOEXEC));
  if (!names) return errno;
  return ::fsync(names.get()) == 0 || errno == EINVAL ? 0 : errno;
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
  int error = write_to_disk(fresh, text);
  if (error == 0 && std::rename(fresh.c_str(), path_.c_str()) != 0) error = errno;
  if (error == 0) error = write_names_to_disk(std::filesystem::path(path_).parent_path());
  if (error == 0) return;
  std::remove(fresh.c_str());
  throw std::runtime_error(
      str("--state: expected to write ", path_, ", got: ", std::strerror(error)));
}

void StateFile::remove() const { std::remove(path_.c_str()); }

Coordinator::Coordinator(
    const LaunchOptions& options, const std::string& token, std::optional<int> port) {
  if (port) {
    const bool has_other_hosts = only_coordinates(options) || hosts_that_agree(options) > 1;
    listener_ = has_other_hosts || *port != 0 ? listen_on(*port) : listen_on_this_host();
    port_ = port_of(listener_);
    set_nonblocking(listener_);
  }
  std::optional<Remembered> earlier;
  if (options.elastic && !options.elastic->state.empty()) {
    earlier = state_file_.emplace(options.elastic->state).read();
  }
  const bool is_alone = only_coordinates(options);
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
  clients_[++last_name_] = {LineChannel(Fd(ends[0])), std::nullopt, true};
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
    if (client.line_due && (!next || *client.line_due < *next)) next = client.line_due;
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
  make_room();
  for (const int name : names) drop_if_ended(name);
  job_->on_time(now());
}

/// Strangers do not take the place of clients whose lines have come, but are not read yet.
bool Coordinator::may_accept() const {
  return listener_ && count_silent() < kMostSilent && Clock::now() >= next_accept_;
}

size_t Coordinator::count_silent() const {
  const auto is_silent = [](const auto& entry) { return !entry.second.spoke; };
  return static_cast<size_t>(std::count_if(clients_.begin(), clients_.end(), is_silent));
}

void Coordinator::accept_clients() {
  while (may_accept()) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      const bool none_waits = errno == EAGAIN || errno == EWOULDBLOCK;
      is_full_ = errno == EMFILE || errno == ENFILE;
      if (!none_waits) next_accept_ = Clock::now() + kAcceptAgain;
      return;
    }
    clients_[++last_name_] = {LineChannel(std::move(socket)), Clock::now() + kLineLimit, false};
  }
}

/// Takes the descriptors of strangers for clients that wait, or for a process that is started.
void Coordinator::make_room() {
  const auto silent = count_silent();
  auto dropped = std::exchange(is_full_, false)
                     ? silent
                     : (silent < kMostSilent ? 0 : silent - kMostSilent / 2);
  for (auto& [name, client] : clients_) {
    if (dropped == 0) return;
    if (client.spoke) continue;
    client.channel.close();
    --dropped;
  }
}

void Coordinator::read_lines_of(int name) {
  Client& client = clients_.at(name);
  const bool had_begun = client.spoke && client.line_due;
  const auto lines = client.channel.exchange();
  for (const auto& line : lines) {
    client.spoke = true;
    job_->on_line(now(), name, line);
  }
  if (!client.spoke) return;
  if (!client.channel.has_begun_line()) {
    client.line_due.reset();
  } else if (!had_begun || !lines.empty()) {
    client.line_due = Clock::now() + kLineLimit;
  }
}

void Coordinator::drop_if_ended(int name) {
  const Client& client = clients_.at(name);
  const bool is_late = client.line_due && Clock::now() >= *client.line_due;
  if (client.channel && !is_late) return;
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
