// The messages between the coordinator of an elastic job and its members, one a line: a word, and
// values with a space between them. Launcher and library share this header, so it needs no
// LibTorch.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace ddp::membership {

/// The longest line: `form` of some thousand members fits.
constexpr size_t kMaxLine = size_t{1} << 18;

/// Chosen at random by a process when it starts, so that no coordinator has to count; never 0.
using ProcessId = uint64_t;

/// A process, and the slot that it has.
struct Place {
  ProcessId id = 0;
  int slot = -1;
};

inline bool operator==(const Place& a, const Place& b) { return a.id == b.id && a.slot == b.slot; }

/// The state that a member has: nothing yet, all of one applied step, or parts of two.
enum class Holding { None, Whole, Torn };

/// Where a process stands in its job: of itself in Member, of each process in launch::Membership.
enum class Stage {
  Starting,   // said hello
  Preparing,  // has a slot, and is not ready
  Ready,      // waits to join
  Back,       // came back to a new coordinator
  Asked,      // from here on a member: a generation ended, and it has to stop and report
  Reported,
  Placed,  // in the generation that was formed: makes its groups
  Met,     // has its groups, and gets the state
  Training,
  Broken,  // its group failed, and the coordinator knows
  Paused,  // at the boundary of a planned change
  Done,    // waits for the others, and gives them the state
  Over,    // has no part in the job any more
};

/// The last value of a line: it may have spaces.
struct Text {
  std::string value;
};

// From a member. `generation` is the number that the message is about.

/// A new process. The token keeps other jobs out; it is no security. slot -1: any free one.
struct Hello {
  std::string token;
  ProcessId id = 0;
  int slot = -1;
  int pid = 0;
  std::string host;
};
/// A process whose coordinator did not answer, or came back. `generation`: the highest that it was
/// told of; `trains`: it is in the midst of it.
struct Back {
  std::string token;
  ProcessId id = 0;
  int slot = -1;
  int pid = 0;
  std::string host;
  int64_t generation = 0;
  bool trains = false;
};
/// Sent every second in both directions.
struct Alive {};
/// Ready to be let in.
struct Waits {};
/// Answers `gather`. `turns` orders members with equal `applied`: a turn that is over counts.
/// `form`: the generation of the last `form` that the member has; 0: none.
struct Report {
  int64_t generation = 0;
  int64_t applied = 0;
  int64_t turns = 0;
  Holding holding = Holding::None;
  int64_t form = 0;
};
/// The group of the generation failed. `accused`: the processes that are to blame, as far as it is
/// known.
struct Lost {
  int64_t generation = 0;
  std::vector<ProcessId> accused;
  Text why;
};
/// The user's code threw; the process leaves.
struct Threw {
  int64_t applied = 0;
  Text why;
};
/// The generation's groups are made; the state may be on its way.
struct Met {
  int64_t generation = 0;
};
struct Entered {
  int64_t generation = 0;
};
/// Stands at the boundary that the members agreed on for a planned change.
struct Pauses {
  int64_t generation = 0;
};
struct Leaves {};
struct Done {};

// From the coordinator.

/// Answers `hello`. `size`: of the job with all slots; `joins`: others train already.
struct You {
  int slot = -1;
  int size = 0;
  bool joins = false;
  int64_t lost_after_ms = 0;
  int64_t wait_ms = 0;
};
/// Where members of other hosts reach this process's host, which it may know by a loopback address.
struct Reached {
  std::string host;
};
/// A process waits, or one leaves: pause at the next boundary.
struct Change {};
/// Stop now, and report.
struct Gather {
  int64_t generation = 0;
  Text why;
};
/// The next generation: a member's rank is its place in `members`. Without `sources` the state is
/// that of the start.
struct Form {
  int64_t generation = 0;
  int64_t applied = 0;
  int64_t turns = 0;
  std::vector<Place> members;
  std::vector<ProcessId> sources;
};
/// The same for a member that has the form of `base`: what differs. `gone`: members of it that are
/// none any more; `added`: new ones; `without_state`: the members that are no sources.
struct Reform {
  int64_t generation = 0;
  int64_t applied = 0;
  int64_t turns = 0;
  int64_t base = 0;
  bool from_start = false;  // there are no sources
  std::vector<ProcessId> gone;
  std::vector<Place> added;
  std::vector<ProcessId> without_state;
};
struct Fenced {
  Text why;
};
/// The job is over, or this process may go: code 0. Otherwise it cannot go on.
struct End {
  int code = 0;
  Text why;
};

// In both directions.

/// Where the store of a generation listens: from its first member to the coordinator, and on.
struct Store {
  int64_t generation = 0;
  std::string address;
};

using MemberMessage = std::variant<
    Hello, Back, Alive, Waits, Report, Lost, Threw, Store, Met, Entered, Pauses, Leaves, Done>;
using CoordinatorMessage =
    std::variant<You, Alive, Reached, Change, Gather, Form, Reform, Store, Fenced, End>;

namespace lines_detail {

// A message's word, and its fields in order.
#define DDP_MEMBERSHIP_LINE(Type, word, ...)               \
  inline const char* word_of(const Type&) { return word; } \
  inline auto fields_of([[maybe_unused]] Type& line) { return std::tie(__VA_ARGS__); }
DDP_MEMBERSHIP_LINE(Hello, "hello", line.token, line.id, line.slot, line.pid, line.host)
DDP_MEMBERSHIP_LINE(
    Back, "back", line.token, line.id, line.slot, line.pid, line.host, line.generation, line.trains)
DDP_MEMBERSHIP_LINE(Alive, "alive")
DDP_MEMBERSHIP_LINE(Waits, "waits")
DDP_MEMBERSHIP_LINE(
    Report, "report", line.generation, line.applied, line.turns, line.holding, line.form)
DDP_MEMBERSHIP_LINE(Lost, "lost", line.generation, line.accused, line.why)
DDP_MEMBERSHIP_LINE(Threw, "threw", line.applied, line.why)
DDP_MEMBERSHIP_LINE(Store, "store", line.generation, line.address)
DDP_MEMBERSHIP_LINE(Met, "met", line.generation)
DDP_MEMBERSHIP_LINE(Entered, "entered", line.generation)
DDP_MEMBERSHIP_LINE(Pauses, "pauses", line.generation)
DDP_MEMBERSHIP_LINE(Leaves, "leaves")
DDP_MEMBERSHIP_LINE(Done, "done")
DDP_MEMBERSHIP_LINE(You, "you", line.slot, line.size, line.joins, line.lost_after_ms, line.wait_ms)
DDP_MEMBERSHIP_LINE(Reached, "reached", line.host)
DDP_MEMBERSHIP_LINE(Change, "change")
DDP_MEMBERSHIP_LINE(Gather, "gather", line.generation, line.why)
DDP_MEMBERSHIP_LINE(
    Form, "form", line.generation, line.applied, line.turns, line.members, line.sources)
DDP_MEMBERSHIP_LINE(
    Reform, "reform", line.generation, line.applied, line.turns, line.base, line.from_start,
    line.gone, line.added, line.without_state)
DDP_MEMBERSHIP_LINE(Fenced, "fenced", line.why)
DDP_MEMBERSHIP_LINE(End, "end", line.code, line.why)
#undef DDP_MEMBERSHIP_LINE

inline void put(std::string& line, const std::string& word) { line += word; }
inline void put(std::string& line, bool value) { line += value ? '1' : '0'; }
inline void put(std::string& line, Holding value) {
  line += std::to_string(static_cast<int>(value));
}
inline void put(std::string& line, const Text& text) {
  for (const char c : text.value) line += c == '\n' || c == '\r' ? ' ' : c;
}
inline void put(std::string& line, const Place& place) {
  line += std::to_string(place.id) + ":" + std::to_string(place.slot);
}
template <typename Number, typename = std::enable_if_t<std::is_integral_v<Number>>>
void put(std::string& line, Number value) {
  line += std::to_string(value);
}
template <typename Value>
void put(std::string& line, const std::vector<Value>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) line += ',';
    put(line, values[i]);
  }
  if (values.empty()) line += '-';
}

/// Cuts `text` at the first `separator`, and returns what is before it.
inline std::string_view cut(std::string_view& text, char separator) {
  const auto at = text.find(separator);
  const auto word = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
  return word;
}

template <typename Number, typename = std::enable_if_t<std::is_integral_v<Number>>>
bool read(std::string_view word, Number& value) {
  const auto* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  return error == std::errc() && stop == end;
}
inline bool read(std::string_view word, std::string& value) {
  value = word;
  return !word.empty();
}
inline bool read(std::string_view word, bool& value) {
  value = word == "1";
  return word == "1" || word == "0";
}
inline bool read(std::string_view word, Holding& value) {
  int number = 0;
  if (!read(word, number) || number < 0 || number > static_cast<int>(Holding::Torn)) return false;
  value = static_cast<Holding>(number);
  return true;
}
inline bool read(std::string_view word, Place& value) {
  const auto id = cut(word, ':');
  return read(id, value.id) && read(word, value.slot);
}
template <typename Value>
bool read(std::string_view word, std::vector<Value>& values) {
  if (word.empty()) return false;
  if (word == "-") return true;
  while (!word.empty()) {
    if (!read(cut(word, ','), values.emplace_back())) return false;
  }
  return true;
}

template <typename Value>
bool take(std::string_view& rest, Value& value) {
  if constexpr (std::is_same_v<Value, Text>) {
    value.value = std::exchange(rest, {});
    return true;
  } else {
    return read(cut(rest, ' '), value);
  }
}

template <typename Variant, typename Message, typename... Others>
std::optional<Variant> read_as(std::string_view word, std::string_view rest) {
  Message message;
  if (word == word_of(message)) {
    const auto take_all = [&](auto&... fields) { return (take(rest, fields) && ...); };
    if (!std::apply(take_all, fields_of(message)) || !rest.empty()) return std::nullopt;
    return Variant(std::move(message));
  }
  if constexpr (sizeof...(Others) > 0) {
    return read_as<Variant, Others...>(word, rest);
  } else {
    return std::nullopt;
  }
}

template <typename... Messages>
std::optional<std::variant<Messages...>> read_one_of(
    std::string_view line, const std::variant<Messages...>* /*type*/) {
  const auto word = cut(line, ' ');
  return read_as<std::variant<Messages...>, Messages...>(word, line);
}

}  // namespace lines_detail

/// The message as a line, without its end. Words (token, host, address) must have no space.
template <typename Variant>
std::string line_of(Variant message) {
  return std::visit(
      [](auto& one) {
        std::string line = lines_detail::word_of(one);
        const auto put_all = [&line](const auto&... fields) {
          ((line += ' ', lines_detail::put(line, fields)), ...);
        };
        std::apply(put_all, lines_detail::fields_of(one));
        return line;
      },
      message);
}

/// Reads a line of `MemberMessage` or `CoordinatorMessage`; nothing if it is none.
template <typename Variant>
std::optional<Variant> message_of(std::string_view line) {
  return lines_detail::read_one_of(line, static_cast<const Variant*>(nullptr));
}

}  // namespace ddp::membership
