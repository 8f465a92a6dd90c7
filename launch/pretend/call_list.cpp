#include "launch/pretend/call_list.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/pretend/rank_list.h"
#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr int64_t kVersion = 1;
constexpr int kMostRanks = 1 << 26;
constexpr const char* kBeginning = "rank_";
constexpr const char* kEnding = ".calls";

class ListReader {
 public:
  explicit ListReader(const std::string& name) : name_(name) {}

  CallList read(const std::string& text) {
    for (size_t begin = 0; begin < text.size();) {
      const auto end = text.find('\n', begin);
      // A process that was killed may have written a part of a line.
      if (end == std::string::npos) break;
      ++line_;
      take(text.substr(begin, end - begin));
      begin = end + 1;
    }
    if (line_ == 0) fail("ddp-calls 1 in the first line", "nothing");
    measure_computing();
    return std::move(list_);
  }

 private:
  using Handler = void (ListReader::*)();

  [[noreturn]] void fail(const std::string& rule, const std::string& got) const {
    throw std::runtime_error(
        str(name_, ":", std::max<int64_t>(line_, 1), ": expected ", rule, ", got ", got));
  }

  void take(const std::string& line) {
    static const std::map<std::string, std::pair<size_t, Handler>> kHandlers = {
        {"ddp-calls", {2, &ListReader::take_version}},
        {"rank", {4, &ListReader::take_rank}},
        {"group", {5, &ListReader::take_group}},
        {"call", {9, &ListReader::take_call}},
        {"wait", {3, &ListReader::take_wait}},
        {"step", {3, &ListReader::take_step}},
        {"pause", {3, &ListReader::take_pause}},
        {"memory", {4, &ListReader::take_memory}},
        {"peak", {2, &ListReader::take_peak}},
        {"process", {2, &ListReader::take_process}},
        {"end", {3, &ListReader::take_end}}};
    fields_ = split(line, '\t');
    const bool is_first = line_ == 1;
    if (is_first != (fields_[0] == "ddp-calls")) {
      fail(is_first ? "ddp-calls 1 in the first line" : "it there only", quoted(line));
    }
    const auto handler = kHandlers.find(fields_[0]);
    if (handler == kHandlers.end()) return;  // of a later writer
    const auto [count, function] = handler->second;
    if (fields_.size() < count) {
      fail(str(count, " fields of a line ", fields_[0]), str(fields_.size(), ": ", quoted(line)));
    }
    (this->*function)();
  }

  static std::string quoted(const std::string& text) { return "'" + text.substr(0, 200) + "'"; }

  int64_t number(size_t field, int64_t low = 0) const {
    const auto& text = fields_[field];
    int64_t value = 0;
    const auto* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || stop != end || value < low) {
      fail(str("a whole number from ", low, " in field ", field + 1), quoted(text));
    }
    return value;
  }
  int small_number(size_t field, int low, int high) const {
    const auto value = number(field, low);
    if (value > high) fail(str("no more than ", high, " in field ", field + 1), str(value));
    return static_cast<int>(value);
  }

  void take_version() {
    if (number(1) != kVersion) fail("version 1, which this ddprun reads", fields_[1]);
  }

  void take_rank() {
    list_.world_size = small_number(2, 1, kMostRanks);
    list_.rank = small_number(1, 0, list_.world_size - 1);
    list_.ranks_a_host = small_number(3, 1, kMostRanks);
  }

  void take_group() {
    auto ranks = parse_rank_list(fields_[4], list_.world_size);
    if (!ranks) {
      fail(
          str("ranks below the world size, ", list_.world_size, ", as A, A-B or A-B:STEP"),
          quoted(fields_[4]));
    }
    if (!contains(*ranks, list_.rank)) {
      fail(str("a group with rank ", list_.rank), quoted(fields_[4]));
    }
    groups_[number(1)] = list_.groups.size();
    list_.groups.push_back({fields_[2], fields_[3], std::move(*ranks)});
  }

  void take_call() {
    ListedCall call;
    call.number = number(1);
    const auto group = groups_.find(number(3));
    if (group == groups_.end()) fail("a group that a line before has", fields_[3]);
    call.group = group->second;
    const auto size = static_cast<int>(list_.groups[call.group].ranks.size());
    call.kind = fields_[4];
    call.dtype = fields_[5];
    call.bytes = number(6);
    call.peer = static_cast<int>(number(7, -1));
    if (call.peer >= size) fail(str("a rank of the group's ", size), fields_[7]);
    call.place = fields_[8];
    if (fields_.size() > 9) call.tag = number(9);
    call.step = step_;
    calls_[call.number] = list_.calls.size();
    add_event(ListedEvent::Kind::Call, list_.calls.size(), number(2));
    list_.calls.push_back(std::move(call));
  }

  void take_wait() {
    const auto call = calls_.find(number(2));
    if (call == calls_.end()) fail("the number of a call before it", fields_[2]);
    add_event(ListedEvent::Kind::Wait, call->second, number(1));
  }

  void take_step() {
    step_ = number(2);
    add_event(ListedEvent::Kind::Step, static_cast<size_t>(step_), number(1));
  }

  void take_pause() { pauses_.emplace_back(number(1), number(2)); }

  void take_memory() { list_.memory[fields_[1]] = {number(2), number(3)}; }
  void take_peak() { list_.peak = number(1); }
  void take_process() { list_.process_peak = number(1); }

  void take_end() {
    add_event(ListedEvent::Kind::End, 0, number(1));
    list_.is_complete = fields_[2] == "ok";
    if (!list_.is_complete) list_.error = fields_[2];
  }

  void add_event(ListedEvent::Kind kind, size_t index, int64_t time) {
    list_.events.push_back({kind, index, 0});
    times_.push_back(time);
  }

  /// Fills in the time between events, without pauses. Threads may wait at the same time, and call
  /// while another one waits, whose pause then follows in the list.
  void measure_computing() {
    std::sort(pauses_.begin(), pauses_.end());
    int64_t last = 0;  // microseconds, up to which all is counted
    auto pause = pauses_.begin();
    for (size_t i = 0; i < times_.size(); ++i) {
      const auto time = std::max(last, times_[i]);
      int64_t computing = 0;
      while (last < time) {
        while (pause != pauses_.end() && pause->second <= last) ++pause;
        const bool is_last = pause == pauses_.end();
        const auto begin = is_last ? time : std::clamp(pause->first, last, time);
        computing += begin - last;
        last = is_last ? time : std::clamp(pause->second, begin, time);
      }
      list_.events[i].computing = 1e-6 * static_cast<double>(computing);
    }
  }

  const std::string& name_;
  CallList list_;
  std::vector<std::string> fields_;
  std::map<int64_t, size_t> groups_, calls_;  // by the program's numbers
  int64_t line_ = 0;
  int64_t step_ = -1;
  std::vector<int64_t> times_;                       // of events, microseconds
  std::vector<std::pair<int64_t, int64_t>> pauses_;  // microseconds
};

std::string text_of_list(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    throw std::runtime_error(
        str(path, ": expected a list of calls, got ", std::strerror(errno != 0 ? errno : EIO),
            ". The rank writes it from its init_process_group on, where it finds DDP_CALLS_DIR."));
  }
  return text.str();
}

std::vector<int> ranks_in(const std::string& folder) {
  std::vector<int> ranks;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const auto name = entry.path().filename().string();
    const auto begin = std::strlen(kBeginning), rest = begin + std::strlen(kEnding);
    if (name.size() <= rest || !begins_with(name, kBeginning)) continue;
    if (name.substr(name.size() - std::strlen(kEnding)) != kEnding) continue;
    const auto rank = number_in(name.substr(begin, name.size() - rest), 0, kMostRanks);
    if (rank) ranks.push_back(*rank);
  }
  if (ranks.empty()) {
    throw std::runtime_error(
        str("expected rank_0.calls or other lists in ", folder, ", got ",
            error ? error.message() : "none"));
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

}  // namespace

CallList parse_call_list(const std::string& name, const std::string& text) {
  return ListReader(name).read(text);
}

std::string call_list_file(int rank) { return str(kBeginning, rank, kEnding); }

std::vector<CallList> read_call_lists(const std::string& folder, const std::vector<int>& ranks) {
  std::vector<CallList> lists;
  for (const int rank : ranks.empty() ? ranks_in(folder) : ranks) {
    const auto path = folder + '/' + call_list_file(rank);
    auto list = parse_call_list(path, text_of_list(path));
    const auto& first = lists.empty() ? list : lists.front();
    if (list.rank != rank || list.world_size != first.world_size) {
      throw std::runtime_error(
          str(path, ": expected rank ", rank, " of ", first.world_size, ", as ",
              call_list_file(first.rank), " has it, got rank ", list.rank, " of ", list.world_size,
              ". Remove the files of other runs."));
    }
    lists.push_back(std::move(list));
  }
  return lists;
}

}  // namespace ddp::launch
