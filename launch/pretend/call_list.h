// A rank's calls in a run: a file rank_R.calls, which a program writes where it finds
// DDP_CALLS_DIR.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ddp::launch {

struct ListedGroup {
  std::string name;
  std::string axis;        // "world", a mesh's axis, or "group"
  std::vector<int> ranks;  // of the world, in the group's order
};

struct ListedCall {
  int64_t number = 0;  // the program's
  size_t group = 0;    // index into the list's groups
  std::string kind;    // "all_reduce"
  std::string dtype;   // "-": none, or several
  std::string place;   // "bucket 3 of DistributedDataParallel"; may be empty
  int64_t bytes = 0;   // of this rank's input
  int peer = -1;       // root, or the other rank, in the group; -1: none
  int64_t tag = 0;     // of a message
  int64_t step = -1;   // in which it was made; -1: before the first one

  bool is_send() const { return kind == "send"; }
  bool is_message() const { return is_send() || kind == "recv"; }
};

/// A point of the program's course.
struct ListedEvent {
  enum class Kind { Call, Wait, Step, End };
  Kind kind;
  size_t index;      // of the call made or waited for; a step's number
  double computing;  // seconds of computation since the event before
};

struct KindOfMemory {
  int64_t peak = 0;     // bytes
  int64_t at_peak = 0;  // bytes, when all kinds together were most
};

struct CallList {
  int rank = 0;
  int world_size = 1;
  int ranks_a_host = 1;
  std::vector<ListedGroup> groups;
  std::vector<ListedCall> calls;
  std::vector<ListedEvent> events;
  std::map<std::string, KindOfMemory> memory;
  int64_t peak = 0;          // bytes of tensors
  int64_t process_peak = 0;  // bytes of the process
  bool is_complete = false;  // otherwise there may have been more calls
  std::string error;         // by which the program ended; empty: none
};

/// \param name  of the file, for errors.
/// \throws std::runtime_error  naming file, line, rule and value.
CallList parse_call_list(const std::string& name, const std::string& text);

/// "rank_7.calls".
std::string call_list_file(int rank);

/// Reads these ranks' files, or without ranks all that are in the folder.
///
/// \return by rank, ascending.
/// \throws std::runtime_error  where a file cannot be read, there is none, or they are of different
///         worlds.
std::vector<CallList> read_call_lists(const std::string& folder, const std::vector<int>& ranks);

}  // namespace ddp::launch
