#include "differential/choice.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace ddp::differential {
namespace {

/// Finds a choice by its name, or by the name of one of its slots.
const Choice& choice_of(const std::string& name) {
  static const auto by_name = [] {
    std::unordered_map<std::string, const Choice*> result;
    for (const auto& choice : choices()) {
      result.emplace(choice.name, &choice);
      for (int i = 0; choice.slots > 1 && i < choice.slots; ++i)
        result.emplace(choice.name + std::to_string(i), &choice);
    }
    return result;
  }();
  const auto found = by_name.find(name);
  if (found == by_name.end())
    throw std::invalid_argument("no choice has the name \"" + name + "\"; --list has all");
  return *found->second;
}

int index_of(const Choice& choice, const std::string& label) {
  for (size_t i = 0; i < choice.values.size(); ++i) {
    if (choice.values[i].label == label) return static_cast<int>(i);
  }
  throw std::invalid_argument(
      "\"" + choice.name + "\" has no value \"" + label + "\"; --list has all");
}

bool has_label(const std::string& labels, const std::string& label) {
  std::istringstream list(labels);
  for (std::string one; std::getline(list, one, '|');) {
    if (one == label) return true;
  }
  return false;
}

/// "name=labels" in two parts.
struct Assignment {
  explicit Assignment(const std::string& text)
      : name(text.substr(0, text.find('='))), labels(text.substr(text.find('=') + 1)) {}
  std::string name, labels;
};

/// A pattern of a rule, read once: hundreds of rules are asked for each value that is drawn.
class Pattern {
 public:
  explicit Pattern(const std::string& text) {
    const Assignment parts(text);
    choice_ = &choice_of(parts.name);
    const auto& labels = parts.labels;
    for (const auto& value : choice_->values) {
      takes_.push_back(
          labels == "*"      ? !takes_.empty()
          : labels[0] == '!' ? !has_label(labels.substr(1), value.label)
                             : has_label(labels, value.label));
    }
  }
  bool holds_in(const Program& program) const {
    if (choice_->slots == 1) return takes_[static_cast<size_t>(program.index(choice_->name))];
    return std::any_of(program.chosen.begin(), program.chosen.end(), [&](const auto& one) {
      return takes_[static_cast<size_t>(one.second)] && &choice_of(one.first) == choice_;
    });
  }

 private:
  const Choice* choice_;
  std::vector<bool> takes_;  // by the number of a value
};

/// A rule or a need, read once.
class Reading {
 public:
  explicit Reading(const Rule& rule) : first_(rule.first), second_(rule.second) {
    if (!rule.unless.empty()) unless_.emplace(rule.unless);
  }
  explicit Reading(const Need& need) : first_(need.of), second_(need.needed) {}
  bool first_holds_in(const Program& program) const { return first_.holds_in(program); }
  bool second_holds_in(const Program& program) const { return second_.holds_in(program); }
  bool holds_in(const Program& program) const {
    return first_holds_in(program) && second_holds_in(program) &&
           !(unless_ && unless_->holds_in(program));
  }

 private:
  Pattern first_, second_;
  std::optional<Pattern> unless_;
};

/// All lines of a table, each with its reading.
template <class Line>
std::vector<std::pair<const Line*, Reading>> read(const std::vector<Line>& lines) {
  std::vector<std::pair<const Line*, Reading>> result;
  for (const auto& line : lines) result.emplace_back(&line, Reading(line));
  return result;
}
const auto& read_rules() {
  static const auto all = read(rules());
  return all;
}
const auto& read_needs() {
  static const auto all = read(needs());
  return all;
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t below(uint64_t bound) { return (state_ = mix(state_)) % bound; }
  int weighted(const std::vector<Value>& values, size_t first) {
    double sum = 0;
    for (size_t i = first; i < values.size(); ++i) sum += values[i].weight;
    double left = static_cast<double>(below(1 << 20)) / (1 << 20) * sum;
    for (size_t i = first; i < values.size(); ++i) {
      if ((left -= values[i].weight) < 0) return static_cast<int>(i);
    }
    return static_cast<int>(values.size()) - 1;
  }

 private:
  uint64_t state_;
};

/// A slot of the choice that is still free, or "" where none is.
std::string free_slot(const Program& program, const Choice& choice) {
  if (choice.slots == 1) return program.has(choice.name) ? "" : choice.name;
  for (int i = 0; i < choice.slots; ++i) {
    const auto name = choice.name + std::to_string(i);
    if (!program.has(name)) return name;
  }
  return "";
}

/// Adds a value, if the rules allow it beside the others.
void try_to_add(Program& program, const Choice& choice, int index, const Fixed& fixed) {
  if (index == 0 || fixed.count(choice.name) > 0) return;
  const auto slot = free_slot(program, choice);
  if (slot.empty()) return;
  auto with = program;
  with.set(slot, index);
  for (const auto& [need, reading] : read_needs()) {
    if (!reading.first_holds_in(with) || reading.second_holds_in(with)) continue;
    const Assignment needed(need->needed);
    if (fixed.count(needed.name) > 0) continue;
    const auto& other = choice_of(needed.name);
    const auto free = free_slot(with, other);
    if (!free.empty())
      with.set(free, index_of(other, needed.labels.substr(0, needed.labels.find('|'))));
  }
  if (excluded(with).empty()) program = with;
}

void try_to_add(Program& program, const std::string& value, const Fixed& fixed) {
  const Assignment parts(value);
  const auto& choice = choice_of(parts.name);
  try_to_add(program, choice, index_of(choice, parts.labels), fixed);
}

}  // namespace

uint64_t mix(uint64_t state) {
  state += 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

int Program::index(const std::string& name) const {
  const auto found = chosen.find(name);
  return found == chosen.end() ? 0 : found->second;
}
const std::string& Program::label(const std::string& name) const {
  return choice_of(name).values[static_cast<size_t>(index(name))].label;
}
int Program::number(const std::string& name) const { return std::stoi(label(name)); }
bool Program::is(const std::string& name, const std::string& labels) const {
  return has_label(labels, label(name));
}
void Program::set(const std::string& name, int index) {
  if (index == 0) {
    chosen.erase(name);
  } else {
    chosen[name] = index;
  }
}
void Program::set(const std::string& name, const std::string& label) {
  set(name, index_of(choice_of(name), label));
}

bool Program::matches(const std::string& pattern) const { return Pattern(pattern).holds_in(*this); }

std::vector<std::string> Program::taken() const {
  std::vector<std::string> result;
  for (const auto& [name, index] : chosen) {
    const auto& choice = choice_of(name);
    result.push_back(choice.name + "=" + choice.values[static_cast<size_t>(index)].label);
  }
  std::sort(result.begin(), result.end());
  result.erase(std::unique(result.begin(), result.end()), result.end());
  return result;
}

std::vector<std::string> Program::layers() const {
  std::vector<std::string> result;
  for (int i = 0; i < choice_of("layer").slots; ++i) {
    const auto& label = this->label("layer" + std::to_string(i));
    if (label != "none") result.push_back(label);
  }
  return result;
}

std::string excluded(const Program& program) {
  for (const auto& [rule, reading] : read_rules()) {
    if (rule->text.empty() && reading.holds_in(program)) return rule->first + " x " + rule->second;
  }
  for (const auto& [need, reading] : read_needs()) {
    if (reading.first_holds_in(program) && !reading.second_holds_in(program))
      return need->of + " without " + need->needed;
  }
  return "";
}

std::vector<std::string> refusals(const Program& program, bool certain) {
  std::vector<std::string> result;
  for (const auto& [rule, reading] : read_rules()) {
    if (rule->text.empty() || !reading.holds_in(program)) continue;
    const bool may = rule->text[0] == '?';
    if (!certain || !may) result.push_back(rule->text.substr(may ? 1 : 0));
  }
  return result;
}

const std::vector<std::pair<std::string, std::string>>& pairs() {
  static const auto all = [] {
    std::vector<std::string> values;
    for (const auto& choice : choices()) {
      for (size_t i = 1; i < choice.values.size(); ++i) {
        values.push_back(choice.name + "=" + choice.values[i].label);
      }
    }
    std::sort(values.begin(), values.end());
    std::vector<std::pair<std::string, std::string>> result;
    for (size_t i = 0; i < values.size(); ++i) {
      for (size_t j = i + 1; j < values.size(); ++j) {
        Program both;
        try_to_add(both, values[i], {});
        try_to_add(both, values[j], {});
        if (both.matches(values[i]) && both.matches(values[j]))
          result.emplace_back(values[i], values[j]);
      }
    }
    return result;
  }();
  return all;
}

namespace {

using Pair = std::pair<std::string, std::string>;

/// All pairs in threes that stand together, so that a walk through it has met each.
const std::vector<std::vector<const Pair*>>& threes() {
  static const auto all = [] {
    constexpr size_t kStride = 7'368'787;  // a prime, so that neighbours have little in common
    constexpr size_t kAhead = 40;
    std::deque<const Pair*> left;
    for (size_t i = 0; i < pairs().size(); ++i)
      left.push_back(&pairs()[i * kStride % pairs().size()]);
    std::vector<std::vector<const Pair*>> result;
    while (!left.empty()) {
      Program program;
      auto& three = result.emplace_back();
      for (size_t at = 0; at < std::min(left.size(), kAhead) && three.size() < 3;) {
        const auto& [first, second] = *left[at];
        auto with = program;
        try_to_add(with, first, {});
        try_to_add(with, second, {});
        if (with.matches(first) && with.matches(second)) {
          program = with;
          three.push_back(left[at]);
          left.erase(left.begin() + static_cast<long>(at));
        } else {
          ++at;
        }
      }
    }
    return result;
  }();
  return all;
}

}  // namespace

Program draw(uint64_t seed, const Fixed& fixed) {
  Program program(seed);
  for (const auto& [name, label] : fixed) program.set(name, label);
  Random random(mix(seed));
  for (const auto* pair : threes()[seed % threes().size()]) {
    try_to_add(program, pair->first, fixed);
    try_to_add(program, pair->second, fixed);
  }
  // Of what every program has: each by its weight.
  for (const auto& choice : choices()) {
    if (choice.always && !program.has(choice.name)) {
      try_to_add(program, choice, random.weighted(choice.values, 0), fixed);
    }
  }
  // Then some more, each by its weight; unevenly many, so that small programs come, too.
  const auto more = random.below(5);
  for (uint64_t i = 0; i < more; ++i) {
    const auto& choice = choices()[random.below(choices().size())];
    try_to_add(program, choice, random.weighted(choice.values, 0), fixed);
  }
  while (program.layers().size() < 1 + random.below(3)) {
    const auto& layer = choice_of("layer");
    try_to_add(program, layer, random.weighted(layer.values, 1), fixed);
  }
  // Something to train.
  const auto labels = program.layers();
  const auto is_bare = [](const std::string& label) {
    return has_label(
        "view|transposed|narrowed|unbound|in_place_on_input|dropout|frozen|tied", label);
  };
  if (std::all_of(labels.begin(), labels.end(), is_bare))
    try_to_add(program, "layer=linear", fixed);
  return program;
}

std::string text_of(const Program& program) {
  std::string text = "seed=" + std::to_string(program.seed);
  for (const auto& [name, index] : program.chosen) text += " " + name + "=" + program.label(name);
  return text;
}

Program parse(const std::string& text) {
  Program program;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const Assignment value(word);
    if (value.name == "seed") {
      const bool is_number = !value.labels.empty() &&
                             value.labels.find_first_not_of("0123456789") == std::string::npos;
      if (!is_number || value.labels.size() > 19)
        throw std::invalid_argument("a seed is a number, not \"" + value.labels + "\"");
      program.seed = std::stoull(value.labels);
    } else {
      program.set(value.name, value.labels);
    }
  }
  const auto why = excluded(program);
  if (!why.empty()) throw std::invalid_argument("these do not stand together: " + why);
  return program;
}

}  // namespace ddp::differential
