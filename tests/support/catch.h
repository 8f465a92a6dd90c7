// The only file that includes Catch2: hides the v2/v3 difference and the clash with c10's CHECK
// macro. Include it last, after every torch header.
#pragma once

#if __has_include(<c10/util/Logging.h>)  // not in the launcher's tests: no LibTorch
#include <c10/util/Logging.h>            // defines a glog-like CHECK: take it first, then drop it
#undef CHECK
#endif

#include <algorithm>
#include <string>
#include <vector>

#if __has_include(<catch2/catch_all.hpp>) && !defined(DDP_CATCH2_V2)  // v3
#include <catch2/catch_all.hpp>
using Catch::Approx;  // declared globally by v2
using MatcherOfTexts = Catch::Matchers::MatcherBase<std::vector<std::string>>;
inline auto ContainsText(const std::string& text) {
  return Catch::Matchers::ContainsSubstring(text);
}
#else  // v2.13
#include <catch2/catch.hpp>
using MatcherOfTexts = Catch::MatcherBase<std::vector<std::string>>;
inline auto ContainsText(const std::string& text) { return Catch::Matchers::Contains(text); }
#endif

/// Whether `matcher` matches each of several texts, the ranks' errors for example:
/// `CHECK_THAT(errors, Each(ContainsText("boom")))`.
template <typename Matcher>
class Each : public MatcherOfTexts {
 public:
  explicit Each(const Matcher& matcher) : matcher_(matcher) {}

  bool match(const std::vector<std::string>& texts) const override {
    return !texts.empty() && std::all_of(texts.begin(), texts.end(), [&](const std::string& text) {
      return matcher_.match(text);
    });
  }

 protected:
  std::string describe() const override { return "each " + matcher_.toString(); }

 private:
  const Matcher& matcher_;  // a temporary of the same CHECK_THAT
};
