#include "failed_attempt.h"

#include <sstream>

#include <c10/util/StringUtil.h>

namespace ddp {

std::string serialize(const FailedAttempt& attempt) {
  return c10::str(attempt.rank, " ", attempt.number, " ", attempt.why);
}

FailedAttempt parse_attempt(const std::string& text) {
  FailedAttempt attempt;
  std::istringstream fields(text);
  fields >> attempt.rank >> attempt.number;
  fields.get();  // a space
  std::getline(fields, attempt.why, '\0');
  return attempt;
}

}  // namespace ddp
