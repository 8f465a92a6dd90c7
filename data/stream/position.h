// How far a stream is, and what ranks compare of it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/FunctionRef.h>
#include <torch/serialize/archive.h>

#include "stream/order.h"

namespace ddp {

/// Where a stream is in its epoch.
struct StreamPosition {
  int64_t epoch = 0;
  int64_t base = 0;   // the position of the order at which the ranks took turns first
  int64_t taken = 0;  // samples that this rank has used since
  /// The last round that was used began in it: the same on all ranks, however far each has read.
  BufferStart buffer;
  bool over = false;

  int64_t next(int64_t ranks) const { return base + taken * ranks; }
};

/// "key=value" facts that decide the order.
using StreamFields = std::vector<std::pair<std::string, std::string>>;

/// The same position, after which `ranks` ranks begin to take turns.
StreamPosition rebased(const StreamPosition& position, int64_t ranks);

void save_position(
    torch::serialize::OutputArchive& archive, const StreamPosition& rebased,
    const StreamFields& fields);

/// \param fields_at  the own fields, as save_position() writes them at a position.
/// \throws c10::ValueError  other fields, or no position.
StreamPosition load_position(
    torch::serialize::InputArchive& archive,
    c10::function_ref<StreamFields(const StreamPosition&)> fields_at);

/// The words of a rank before all go on with other ranks.
struct StreamStanding {
  StreamPosition position;      // rebased
  bool has_more = true;         // a sample of this rank is left
  bool begins_anywhere = true;  // false: whole files, which cannot be divided within an epoch
  int64_t begun = 0;            // samples of a batch that is not complete
  StreamFields fields;
};

std::string text_of(const StreamStanding& standing);
std::string text_of(const StreamFields& fields);

/// \return which of the ranks' fields differ; "" if none do.
std::string problem_of_fields(const std::vector<std::string>& by_rank);

/// \return why these ranks cannot go on together; "" if they can.
std::string problem_of_standings(const std::vector<std::string>& by_rank);

/// \param drops_end  StreamEnds::Common: the end of one rank is that of all.
/// \return where they go on.
StreamPosition agreed_position(const std::vector<std::string>& by_rank, bool drops_end);

}  // namespace ddp
