#pragma once

#include <cstdint>
#include <string>

namespace ddp {

/// A forward pass that threw on one rank, as the store has it.
struct FailedAttempt {
  int rank = -1;
  uint64_t number = 0;  // of the rank's attempts, from 1
  std::string why;
};

std::string serialize(const FailedAttempt& attempt);
FailedAttempt parse_attempt(const std::string& text);

}  // namespace ddp
