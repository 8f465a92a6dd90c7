#include "backends/message_check.h"

#include <c10/core/ScalarType.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

namespace ddp::backends {

void check_message(const char* call, const std::vector<at::Tensor>& tensors, int tag) {
  DDP_CHECK_VALUE(
      tensors.size() == 1 && tensors[0].layout() == at::kStrided && tensors[0].is_contiguous() &&
          !tensors[0].is_conj() && !tensors[0].is_neg(),
      call, ": expected one dense, contiguous tensor, got ", tensors.size(),
      " tensor(s), or one that is not. Call contiguous() first, after resolve_conj() and "
      "resolve_neg().");
  DDP_CHECK_VALUE(
      is_tag(tag), call, ": expected a tag of 0 to ", kMostTag, ", got ", tag,
      ". Give both sides the same one, such as 0.");
}

std::string problem_of_message(
    const MessageHeader& header, const at::Tensor& tensor, int source, int tag, int rank,
    int ranks) {
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  if (dtype == tensor.scalar_type() && header.numel == tensor.numel()) return "";
  return ddp::str(
      "recv: expected a message of ", tensor.numel(), " x ", tensor.scalar_type(), " from rank ",
      source, " with tag ", tag, ", got ", header.numel, " x ", dtype, " on rank ", rank, " of ",
      ranks,
      ". Receive what was sent, in the order of sending: tensors of the same dtype and size.");
}

}  // namespace ddp::backends
