#include "launch/job/state_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <ddp/internal/text.h>

namespace ddp::launch {
namespace {

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

}  // namespace ddp::launch
