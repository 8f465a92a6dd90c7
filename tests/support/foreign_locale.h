// The locale of a program that formats numbers for its users, as after
// std::locale::global(std::locale("")): "2 000,5". A program that includes this uses the locale
// where DDP_TEST_LOCALE is "all", or the RANK of the process.
#pragma once

#include <cstdlib>
#include <cstring>
#include <locale>
#include <string>

namespace ddp::testing {

/// As in French, but with a blank after every digit, not every third, so that small numbers show
/// it, too.
struct ForeignNumbers : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return ' '; }
  std::string do_grouping() const override { return "\1"; }
};

inline std::locale foreign_locale() {
  return std::locale(std::locale::classic(), new ForeignNumbers);  // the locale owns the facet
}

inline bool use_foreign_locale() {
  const char* const where = std::getenv("DDP_TEST_LOCALE");
  if (where == nullptr) return false;
  const char* const rank = std::getenv("RANK");
  const bool here = rank != nullptr && std::strcmp(where, rank) == 0;
  if (here || std::strcmp(where, "all") == 0) std::locale::global(foreign_locale());
  return true;
}

inline const bool kUsesForeignLocale = use_foreign_locale();

}  // namespace ddp::testing
