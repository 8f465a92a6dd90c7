// A program as data: named choices, each with the number of one of its values. 0 is the simplest
// value.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace ddp::differential {

/// One value of a choice.
struct Value {
  std::string label;
  double weight = 1;
  std::string options = "";  ///< the public names that a program with it calls
};

/// What is drawn. Slots ("layer0", "layer1", ...) share the values of one choice.
struct Choice {
  std::string name;
  std::vector<Value> values;
  int slots = 1;
  bool always = false;  ///< drawn in every program, by weight, and not only where its turn comes
};

/// The table of all choices.
const std::vector<Choice>& choices();

/// Two values that do not stand together ("name=label|label", "name=*" for all but the simplest,
/// "name=!label|label" for all but these). With a text: they do, and every rank throws an error
/// that has it.
struct Rule {
  std::string first, second;
  std::string text = "";
  std::string unless = "";  ///< a third value with which the rule does not hold
};
/// The table of all rules, from the documentation.
const std::vector<Rule>& rules();

/// A value that stands only beside another one, "name=label"; who draws the first gets the second.
struct Need {
  std::string of, needed;
};
/// The table of all needs.
const std::vector<Need>& needs();

/// A drawn program. Copies are cheap, and differ by one choice when a finding is shrunk.
class Program {
 public:
  explicit Program(uint64_t seed = 0) : seed(seed) {}

  /// Whether the choice has one of the labels ("sum|mean").
  bool is(const std::string& name, const std::string& labels) const;
  /// Whether it is not the simplest.
  bool has(const std::string& name) const { return index(name) > 0; }
  const std::string& label(const std::string& name) const;
  /// The label as a number.
  int number(const std::string& name) const;
  int index(const std::string& name) const;
  void set(const std::string& name, int index);
  void set(const std::string& name, const std::string& label);
  /// Whether a pattern of a rule applies.
  bool matches(const std::string& pattern) const;
  /// The choices that are not the simplest, as "name=label", slots without their number.
  std::vector<std::string> taken() const;
  /// Labels of the layers in their order.
  std::vector<std::string> layers() const;

  uint64_t seed;
  std::map<std::string, int> chosen;  ///< without the simplest ones
};

/// Restricts what is drawn: choices that are fixed, by name.
using Fixed = std::map<std::string, std::string>;

/// Draws the program of a seed. Seeds that follow each other begin with pairs that follow each
/// other, so that each pair of values comes within some thousand.
Program draw(uint64_t seed, const Fixed& fixed = {});
/// "seed=17 layer0=linear reduction=Sum", and back.
std::string text_of(const Program& program);
Program parse(const std::string& text);

/// Why two of its choices do not stand together; "" where all do.
std::string excluded(const Program& program);
/// The texts of the errors that the documentation says for it: an error has to have one of them.
/// `certain`: only those that have to come.
std::vector<std::string> refusals(const Program& program, bool certain = false);

/// All pairs of values that no rule keeps apart, "a=b x c=d" in alphabetical order.
const std::vector<std::pair<std::string, std::string>>& pairs();

/// A number of the sequence that a seed starts (splitmix64).
uint64_t mix(uint64_t state);

}  // namespace ddp::differential
