// The collectives of <ddp/collectives.h> that take lists of tensors.
#include <ddp/collectives.h>

#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ddp/internal/capabilities.h>
#include <ddp/internal/check.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "collectives/arguments.h"
#include "group/monitored_group.h"

namespace ddp {
namespace {

// Backends gather equal sizes only, so different sizes are broadcast, one rank after the other.
StartedCall all_gather_uneven(
    const std::vector<WireTensor>& outputs, const WireTensor& input, c10d::ProcessGroup& group) {
  at::Tensor(outputs[group.getRank()].wire).copy_(input.wire);
  std::vector<WorkPtr> works;
  for (int rank = 0; rank < group.getSize(); ++rank) {
    std::vector<at::Tensor> tensors{outputs[rank].wire};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    works.push_back(group.broadcast(tensors, options));
  }
  return copying_out({std::move(works)}, outputs, {input});
}

/// An all-to-all of lists over a backend that only has the one of a flat tensor.
///
/// \param outputs, inputs  of one dtype, one tensor for each rank.
StartedCall all_to_all_flat(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    c10d::ProcessGroup& group) {
  std::vector<at::Tensor> pieces;
  std::vector<int64_t> sent;
  std::vector<int64_t> received;
  for (const auto& input : inputs) {
    pieces.push_back(input.reshape({-1}));
    sent.push_back(pieces.back().numel());
  }
  int64_t total = 0;
  for (const auto& output : outputs) {
    received.push_back(output.numel());
    total += received.back();
  }
  auto from = at::cat(pieces);
  auto to = at::empty({total}, from.options());
  auto to_each = received;  // a copy, because a backend may clear it
  const auto work = group.DDP_GROUP_ALL_TO_ALL_SINGLE(to, from, to_each, sent);
  const auto finish = [to, received, outputs] {
    const auto parts = to.split_with_sizes(received);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      at::Tensor(outputs[rank]).copy_(parts[rank].view(outputs[rank].sizes()));
    }
  };
  return {{work}, finish, outputs, {to, from}};
}

/// An input that becomes this rank's part of the outputs.
WireTensor part_apart_from(
    const std::vector<WireTensor>& outputs, const at::Tensor& input, c10d::ProcessGroup& group) {
  const auto plain = wire_of(input);
  const auto rank = static_cast<size_t>(group.getRank());
  return apart_from(
      outputs, plain, !outputs.empty() && begin_alike(outputs[rank].wire, plain.wire));
}

/// Inputs of which this rank's becomes its output.
std::vector<WireTensor> wires_apart_from(
    const WireTensor& output, std::vector<WireTensor> inputs, c10d::ProcessGroup& group) {
  for (size_t rank = 0; rank < inputs.size(); ++rank) {
    const bool is_own = static_cast<int>(rank) == group.getRank();
    const bool in_place = is_own && begin_alike(output.wire, inputs[rank].wire);
    inputs[rank] = apart_from({output}, inputs[rank], in_place);
  }
  return inputs;
}

bool have_equal_shapes(const std::vector<at::Tensor>& tensors) {
  return all_of(
      tensors, [&](const at::Tensor& tensor) { return tensor.sizes() == tensors.front().sizes(); });
}

}  // namespace

WorkPtr all_gather_async(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("all_gather", input, *group);
  check_list("all_gather", "outputs", outputs, input, *group);
  const auto own = ddp::str("outputs[", group->getRank(), "]");
  check_shape("all_gather", own, outputs[group->getRank()], input, *group);
  const auto output_wires = wires_of(outputs);
  const auto input_wire = part_apart_from(output_wires, input, *group);
  if (!have_equal_shapes(outputs)) {
    return monitored("all_gather", *group, input.device(), [&] {
      return all_gather_uneven(output_wires, input_wire, *group);
    });
  }
  std::vector<std::vector<at::Tensor>> to{wire_tensors(output_wires)};
  std::vector<at::Tensor> from{input_wire.wire};
  return monitored("all_gather", *group, input.device(), [&] {
    return copying_out({{group->allgather(to, from)}}, output_wires, {input_wire});
  });
}

WorkPtr gather_async(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("gather", input, *group);
  check_rank("gather", "dst", dst, *group);
  if (group->getRank() == dst) {
    check_list("gather", "outputs", outputs, input, *group);
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      check_shape("gather", ddp::str("outputs[", rank, "]"), outputs[rank], input, *group);
    }
  } else {
    check_no_list("gather", "outputs", outputs, dst, *group);
  }
  const auto output_wires = wires_of(outputs);
  std::vector<std::vector<at::Tensor>> to;
  if (group->getRank() == dst) to.push_back(wire_tensors(output_wires));
  const auto input_wire = part_apart_from(output_wires, input, *group);
  std::vector<at::Tensor> from{input_wire.wire};
  c10d::GatherOptions options;
  options.rootRank = dst;
  return monitored(
      "gather", *group, input.device(),
      [&] { return copying_out({{group->gather(to, from, options)}}, output_wires, {input_wire}); },
      Peers::Some);
}

WorkPtr scatter_async(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, int src, const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("scatter", output, *group);
  check_rank("scatter", "src", src, *group);
  const auto output_wire = wire_of(output);
  std::vector<std::vector<at::Tensor>> from;
  std::vector<WireTensor> input_wires;
  if (group->getRank() == src) {
    check_list("scatter", "inputs", inputs, output, *group);
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      check_shape("scatter", ddp::str("inputs[", rank, "]"), inputs[rank], output, *group);
    }
    input_wires = wires_apart_from(output_wire, wires_of(inputs), *group);
    from.push_back(wire_tensors(input_wires));
  } else {
    check_no_list("scatter", "inputs", inputs, src, *group);
  }
  std::vector<at::Tensor> to{output_wire.wire};
  c10d::ScatterOptions options;
  options.rootRank = src;
  return monitored(
      "scatter", *group, output.device(),
      [&] {
        return copying_out({{group->scatter(to, from, options)}}, {output_wire}, input_wires);
      },
      Peers::Some);
}

WorkPtr reduce_scatter_async(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, c10d::ReduceOp op,
    const GroupArg& group_arg) {
  const auto group = group_arg.get();
  check_tensor("reduce_scatter", output, *group);
  check_list("reduce_scatter", "inputs", inputs, output, *group);
  const auto own = ddp::str("inputs[", group->getRank(), "]");
  check_shape("reduce_scatter", own, inputs[group->getRank()], output, *group);
  const auto reduction = wire_reduction("reduce_scatter", op, output, *group);
  const auto output_wire = reduction_wire_of(output, reduction);
  std::vector<at::Tensor> to{output_wire.wire};
  std::vector<WireTensor> input_wires;
  for (const auto& input : inputs) input_wires.push_back(reduction_wire_of(input, reduction));
  input_wires = wires_apart_from(output_wire, std::move(input_wires), *group);
  std::vector<std::vector<at::Tensor>> from{wire_tensors(input_wires)};
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction.op;
  return monitored("reduce_scatter", *group, output.device(), [&] {
    return copying_out(
        {{group->reduce_scatter(to, from, options)}}, {output_wire}, input_wires,
        reduction.divisor);
  });
}

WorkPtr all_to_all_async(
    std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const GroupArg& group_arg) {
  const auto group = group_arg.get();
  DDP_CHECK_VALUE(
      !inputs.empty(), "all_to_all: expected one tensor per rank in inputs, got none ",
      on_rank_text(*group), ". Give one for each rank, in the order of ranks.");
  check_tensor("all_to_all", inputs.front(), *group);
  check_list("all_to_all", "inputs", inputs, inputs.front(), *group);
  check_list("all_to_all", "outputs", outputs, inputs.front(), *group);
  const auto sent = inputs[group->getRank()].numel();
  const auto received = outputs[group->getRank()].numel();
  DDP_CHECK_VALUE(
      sent == received, "all_to_all: expected outputs[", group->getRank(), "] of ", sent,
      " elements, which inputs[", group->getRank(), "] has, got ", received, " ",
      on_rank_text(*group), ". Make it as large as what this rank sends itself.");
  const auto output_wires = wires_of(outputs);
  auto input_wires = wires_of(inputs);
  for (auto& input : input_wires) input = apart_from(output_wires, input);
  const auto device = inputs.front().device();
  auto to = wire_tensors(output_wires);
  auto from = wire_tensors(input_wires);
  const bool takes_lists = capabilities_of(*group, device).exchanges_lists;
  return monitored("all_to_all", *group, device, [&] {
    return copying_out(
        takes_lists ? StartedCall{{group->alltoall(to, from)}} : all_to_all_flat(to, from, *group),
        output_wires, input_wires);
  });
}

void all_gather(std::vector<at::Tensor>& outputs, const at::Tensor& input, const GroupArg& group) {
  all_gather_async(outputs, input, group)->wait();
}

void gather(
    std::vector<at::Tensor>& outputs, const at::Tensor& input, int dst, const GroupArg& group) {
  gather_async(outputs, input, dst, group)->wait();
}

void scatter(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, int src, const GroupArg& group) {
  scatter_async(output, inputs, src, group)->wait();
}

void reduce_scatter(
    at::Tensor& output, const std::vector<at::Tensor>& inputs, c10d::ReduceOp op,
    const GroupArg& group) {
  reduce_scatter_async(output, inputs, op, group)->wait();
}

void all_to_all(
    std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const GroupArg& group) {
  all_to_all_async(outputs, inputs, group)->wait();
}

}  // namespace ddp
