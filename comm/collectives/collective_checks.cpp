#include "collectives/collective_checks.h"

#include <algorithm>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include "backends/tags.h"

namespace ddp {

void check_tensor(const char* call, const at::Tensor& tensor, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensor.defined(), call, ": expected a defined tensor, got an undefined one ",
      on_rank_text(group), ". Give it a size before the call, as at::empty() does.");
  DDP_CHECK_VALUE(
      tensor.layout() == at::kStrided, call, ": expected a dense tensor, got layout ",
      tensor.layout(), " ", on_rank_text(group), ". Call to_dense() first.");
  DDP_CHECK_VALUE(
      !tensor.is_quantized(), call, ": expected a tensor of plain numbers, got a quantized one of ",
      tensor.scalar_type(), " ", on_rank_text(group),
      ". Its scale stays on this rank: call dequantize(), or send int_repr() and the scale.");
  const auto devices = group.getDeviceTypes();
  std::string served;
  for (const auto& device : devices) {
    if (device.type() == tensor.device().type()) return;
    served += (served.empty() ? "" : ", ") + device.str();
  }
  DDP_CHECK_VALUE(
      false, call, ": expected a tensor on a device the group has a backend for (", served,
      "), got one on ", tensor.device(), " ", on_rank_text(group),
      ". Move the tensor, or choose the backends, as in backend(\"cpu:gloo,cuda:nccl\").");
}

void check_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors,
    const at::Tensor& like, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensors.size() == static_cast<size_t>(group.getSize()), call,
      ": expected one tensor per rank in ", name, ", which is ", group.getSize(), ", got ",
      tensors.size(), " ", on_rank_text(group), ". Give one for each rank, in the order of ranks.");
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(call, tensors[i], group);
    DDP_CHECK_VALUE(
        tensors[i].scalar_type() == like.scalar_type() && tensors[i].device() == like.device(),
        call, ": expected ", name, "[", i, "] to be ", like.scalar_type(), " on ", like.device(),
        " like the rest, got ", tensors[i].scalar_type(), " on ", tensors[i].device(), " ",
        on_rank_text(group), ". Convert it with to() first.");
  }
}

void check_no_list(
    const char* call, const char* name, const std::vector<at::Tensor>& tensors, int root,
    c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensors.empty(), call, ": expected ", name, " to be empty on all ranks but ", root, ", got ",
      tensors.size(), " tensor(s) ", on_rank_text(group), ". Pass an empty list there.");
}

void check_shape(
    const char* call, const std::string& name, const at::Tensor& tensor, const at::Tensor& like,
    c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      tensor.sizes() == like.sizes(), call, ": expected ", name, " of shape ", like.sizes(),
      ", got ", tensor.sizes(), " ", on_rank_text(group), ". Make it with that shape.");
}

void check_rank(const char* call, const char* name, int rank, c10d::ProcessGroup& group) {
  DDP_CHECK_VALUE(
      rank >= 0 && rank < group.getSize(), call, ": expected ", name,
      " to be a rank of the group, 0 to ", group.getSize() - 1, ", got ", rank, " ",
      on_rank_text(group), ". Count ranks as get_rank() of that group does.");
}

void check_peer(const char* call, const char* name, int rank, int tag, c10d::ProcessGroup& group) {
  check_rank(call, name, rank, group);
  DDP_CHECK_VALUE(
      rank != group.getRank(), call, ": expected ", name, " to be another rank, got this one ",
      on_rank_text(group), ". What stays on a rank is copied, not sent.");
  DDP_CHECK_VALUE(
      is_tag(tag), call, ": expected a tag of 0 to ", kMostTag, ", got ", tag, " ",
      on_rank_text(group), ". Give both sides the same one, such as 0.");
}

bool have_equal_shapes(const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.sizes() == tensors.front().sizes();
  });
}

}  // namespace ddp
