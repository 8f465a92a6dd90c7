#include "wrapper/snapshot.h"

#include <string>

#include <ATen/core/grad_mode.h>
#include <ddp/internal/check.h>

namespace ddp {
namespace {

using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

void copy_tensors(const NamedTensors& from, const NamedTensors& to, const ValueOf& value_of) {
  for (const auto& item : from) {
    if (!item.value().defined()) continue;
    const auto* found = to.find(item.key());
    const auto value = value_of(item.value());
    DDP_CHECK_VALUE(
        found && found->defined() && found->sizes() == value.sizes(),
        "update_snapshot: expected a copy of the wrapped module, got a module without \"",
        item.key(), "\" ", value.sizes(), ". Make it by snapshot().");
    if (found->scalar_type() == value.scalar_type()) {
      found->copy_(value);
    } else {
      found->set_data(value.to(found->device(), /*non_blocking=*/false, /*copy=*/true));
    }
  }
}

}  // namespace

void copy_values(
    const torch::nn::Module& module, torch::nn::Module& copy, const ValueOf& value_of) {
  const at::NoGradGuard no_grad;
  copy_tensors(module.named_parameters(), copy.named_parameters(), value_of);
  copy_tensors(module.named_buffers(), copy.named_buffers(), value_of);
}

void write_module(
    const torch::nn::Module& module, torch::serialize::OutputArchive& archive,
    const ValueOf& value_of) {
  for (const auto& p : module.named_parameters(/*recurse=*/false)) {
    archive.write(p.key(), value_of(p.value()));
  }
  for (const auto& b : module.named_buffers(/*recurse=*/false)) {
    archive.write(b.key(), value_of(b.value()), /*is_buffer=*/true);
  }
  for (const auto& child : module.named_children()) {
    if (!child.value()->is_serializable()) continue;
    torch::serialize::OutputArchive inner(archive.compilation_unit());
    write_module(*child.value(), inner, value_of);
    archive.write(child.key(), inner);
  }
}

}  // namespace ddp
