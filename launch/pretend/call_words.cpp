#include "launch/pretend/call_words.h"

#include <initializer_list>

#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/pretend/rank_list.h"

namespace ddp::launch {
namespace {

bool is_one_of(const std::string& kind, std::initializer_list<const char*> kinds) {
  return any_of(kinds, [&](const char* one) { return kind == one; });
}

std::string peer_text(const CallList& list, const ListedCall& call) {
  if (call.peer < 0) return "";
  const auto rank = list.groups[call.group].ranks[static_cast<size_t>(call.peer)];
  const bool is_from = is_one_of(call.kind, {"broadcast", "scatter", "recv"});
  return str(is_from ? " from rank " : " to rank ", rank);
}

}  // namespace

std::string group_text(
    const std::string& name, const std::string& axis, const std::vector<int>& ranks) {
  // Meshes' groups have both in their names.
  if (name == str(axis, " [", joined_by(", ", ranks), "]"))
    return str("process group \"", name, "\"");
  return str(
      "process group \"", name, "\" (", axis.empty() || axis == name ? "" : axis + ", ",
      short_ranks_text(ranks), ")");
}

std::string call_text(const CallList& list, const ListedCall& call) {
  std::string text = call.kind;
  if (call.kind != "barrier") {
    text += str(" of ", call.bytes, " bytes");
    if (call.dtype != "-" && !call.dtype.empty()) text += " of " + call.dtype;
  }
  text += peer_text(list, call);
  const auto step = call.step < 0 ? std::string("before the first step") : str("step ", call.step);
  return str(text, " (", call.place, call.place.empty() ? "" : ", ", step, ")");
}

bool has_root(const std::string& kind) {
  return is_one_of(kind, {"broadcast", "reduce", "gather", "scatter"});
}

bool has_equal_bytes(const std::string& kind) {
  return is_one_of(
      kind, {"all_reduce", "broadcast", "reduce_scatter", "all_gather", "reduce", "gather"});
}

}  // namespace ddp::launch
