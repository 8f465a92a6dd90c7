// The only file that includes Catch2: hides the v2/v3 difference and the clash with c10's CHECK
// macro. Include it last, after every torch header.
#pragma once

#if __has_include(<c10/util/Logging.h>)  // not in the launcher's tests: no LibTorch
#include <c10/util/Logging.h>            // defines a glog-like CHECK: take it first, then drop it
#undef CHECK
#endif

#include <string>

#if __has_include(<catch2/catch_all.hpp>) && !defined(DDP_CATCH2_V2)  // v3
#include <catch2/catch_all.hpp>
using Catch::Approx;  // declared globally by v2
inline auto ContainsText(const std::string& text) {
  return Catch::Matchers::ContainsSubstring(text);
}
#else  // v2.13
#include <catch2/catch.hpp>
inline auto ContainsText(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif
