#pragma once

#include <optional>
#include <string>

#include "launch/membership/membership.h"
#include "launch/pipe.h"

namespace ddp::launch {

/// Keeps what a coordinator has to know after a restart. One process at a time may have it.
class StateFile {
 public:
  /// \throws std::runtime_error  when another process has it, or it cannot be made.
  explicit StateFile(std::string path);

  /// \return nothing when there is none.
  /// \throws std::runtime_error  when it is something else.
  std::optional<Remembered> read() const;
  /// Replaces it as a whole, on the disk when it returns.
  /// \throws std::runtime_error  when it cannot be written.
  void write(const Remembered& state) const;
  void remove() const;

 private:
  const std::string path_;
  Fd lock_;
};

}  // namespace ddp::launch
