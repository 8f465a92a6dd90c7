// Questions to the layouts of parameters.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ddp/parameter_layout.h>
#include <ddp/process_group.h>

namespace ddp {

ParameterLayout whole_layout(std::string name, const at::Tensor& parameter);

/// Whether ranks of the group have different elements of the parameter. False where groups of other
/// jobs hide that.
bool is_cut_over(const ParameterLayout& layout, const c10d::ProcessGroup& group);

/// Whether this rank lacks elements of the parameter: it is cut over a group of several ranks.
bool is_in_parts(const ParameterLayout& layout);

/// Whether the ranks of the group have the parameter in parts that they know of: is_cut_over(), or
/// it is declared as cut over groups that lie in this one, if only of one rank each. True for
/// groups of other jobs.
bool is_cut_within(const ParameterLayout& layout, const c10d::ProcessGroup& group);

/// The views of `tensor` that belong to the layout's boxes, in their order.
///
/// \param tensor  of the sizes of the layout's `local`: that, or a tensor of an optimizer's state.
/// \throws c10::ValueError  for boxes that are no views of it.
std::vector<at::Tensor> views_of_boxes(const ParameterLayout& layout, const at::Tensor& tensor);

}  // namespace ddp
