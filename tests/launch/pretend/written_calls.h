// Lists of calls as a program writes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ddp/internal/rank_list.h>
#include <ddp/internal/text.h>

#include "launch/pretend/call_list.h"
#include "launch/pretend/rank_list.h"

namespace ddp::testing {

/// The list of one rank, which computes for 10 us before each call.
class WrittenCalls {
 public:
  explicit WrittenCalls(int rank, int world_size, int ranks_a_host = 8) : rank_(rank) {
    put("ddp-calls\t1");
    put(str("rank\t", rank, "\t", world_size, "\t", ranks_a_host));
  }

  /// \return its number here.
  int group(const std::string& name, const std::string& axis, const std::vector<int>& ranks) {
    put(str("group\t", groups_, "\t", name, "\t", axis, "\t", rank_list_text(ranks)));
    return groups_++;
  }

  /// \return its number here.
  int call(
      int group, const std::string& kind, int64_t bytes, const std::string& place = "",
      int peer = -1, const std::string& dtype = "float") {
    time_ += 10;
    const std::string type = kind == "barrier" ? "-" : dtype;
    put(
        str("call\t", calls_, "\t", time_, "\t", group, "\t", kind, "\t", type, "\t", bytes, "\t",
            peer, "\t", place));
    return calls_++;
  }
  void wait(int call) { put(str("wait\t", time_, "\t", call)); }
  void call_and_wait(
      int group, const std::string& kind, int64_t bytes, const std::string& place = "",
      int peer = -1, const std::string& dtype = "float") {
    wait(call(group, kind, bytes, place, peer, dtype));
  }
  void step() { put(str("step\t", time_, "\t", steps_++)); }
  void compute(int64_t microseconds) { time_ += microseconds; }
  void put(const std::string& line) { text_ += line + "\n"; }

  int rank() const { return rank_; }
  int64_t time() const { return time_; }
  std::string file() const { return text_ + str("end\t", time_, "\tok\n"); }
  launch::CallList list() const { return launch::parse_call_list(name(), file()); }
  std::string name() const { return launch::call_list_file(rank_); }

 private:
  int rank_;
  int groups_ = 0, calls_ = 0, steps_ = 0;
  int64_t time_ = 0;
  std::string text_;
};

}  // namespace ddp::testing
