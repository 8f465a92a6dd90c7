#include <ddp/parameter_layout.h>

#include <unordered_set>

#include <ddp/internal/check.h>
#include <ddp/internal/cut_parameters.h>
#include <ddp/internal/cut_registry.h>
#include <ddp/internal/groups.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/stage_tensors.h>

namespace ddp {
namespace {

// Appends elements [begin, end) of `box`, whose dimensions before `dim` have size 1.
void append_boxes(
    std::vector<TensorBox>& boxes, const TensorBox& box, size_t dim, int64_t begin, int64_t end) {
  if (begin == end) return;
  int64_t row = 1;  // elements of one index of `dim`
  for (size_t d = dim + 1; d < box.size.size(); ++d) row *= box.size[d];
  const auto rows = [&](int64_t first, int64_t last) {
    auto part = box;
    part.offset[dim] += first;
    part.size[dim] = last - first;
    return part;
  };
  const auto first = begin / row;
  const auto last = end / row;
  if (first == last) {
    append_boxes(boxes, rows(first, first + 1), dim + 1, begin % row, end % row);
    return;
  }
  const auto first_whole = (begin + row - 1) / row;
  if (first < first_whole) append_boxes(boxes, rows(first, first_whole), dim + 1, begin % row, row);
  if (first_whole < last) boxes.push_back(rows(first_whole, last));
  append_boxes(boxes, rows(last, last + 1), dim + 1, 0, end % row);
}

/// Walks over a module; takes each parameter once.
class LayoutWalk {
 public:
  void visit(const torch::nn::Module& module, const std::string& prefix) {
    // A Module hands out its parameters as const, too.
    auto& shared = const_cast<torch::nn::Module&>(module);
    if (auto* sharded = dynamic_cast<ShardedModule*>(&shared)) {
      auto layouts = sharded->layouts();
      note_cut(layouts, CutBy::Layer);
      for (auto& layout : layouts) {
        layout.name = prefix + layout.name;
        add(std::move(layout));
      }
    }
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (item.value().defined()) add(whole_layout(prefix + item.key(), item.value()));
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), prefix + child.key() + ".");
    }
  }

  std::vector<ParameterLayout> take() { return std::move(found_); }

 private:
  void add(ParameterLayout layout) {
    if (!seen_.insert(layout.local.unsafeGetTensorImpl()).second) return;
    add_stage_to(layout);
    found_.push_back(std::move(layout));
  }

  std::unordered_set<const void*> seen_;
  std::vector<ParameterLayout> found_;
};

}  // namespace

std::vector<TensorBox> boxes_of(const TensorBox& box, int64_t begin, int64_t end) {
  if (box.size.empty() && begin < end) return {box};
  std::vector<TensorBox> boxes;
  append_boxes(boxes, box, 0, begin, end);
  return boxes;
}

ShardedModule::~ShardedModule() = default;

std::vector<ParameterLayout> layouts_of(const torch::nn::Module& module) {
  LayoutWalk walk;
  walk.visit(module, "");
  return walk.take();
}

ParameterLayout whole_layout(std::string name, const at::Tensor& parameter) {
  const auto sizes = parameter.sizes().vec();
  ParameterLayout layout;
  layout.name = std::move(name);
  layout.sizes = sizes;
  layout.dtype = parameter.scalar_type();
  layout.local = parameter;
  layout.boxes = {{std::vector<int64_t>(sizes.size(), 0), sizes}};
  return layout;
}

bool is_cut_over(const ParameterLayout& layout, const c10d::ProcessGroup& group) {
  return any_of(layout.sharded_over, [&](const ProcessGroup& parts) {
    return count_common_ranks(*parts, group).value_or(1) > 1;
  });
}

bool is_in_parts(const ParameterLayout& layout) {
  return any_of(
      layout.sharded_over, [](const ProcessGroup& parts) { return parts->getSize() > 1; });
}

bool is_cut_within(const ParameterLayout& layout, const c10d::ProcessGroup& group) {
  if (layout.sharded_over.empty()) return false;
  const bool lie_within = all_of(layout.sharded_over, [&](const ProcessGroup& parts) {
    return count_common_ranks(*parts, group).value_or(parts->getSize()) == parts->getSize();
  });
  return lie_within || is_cut_over(layout, group);
}

std::vector<at::Tensor> views_of_boxes(const ParameterLayout& layout, const at::Tensor& tensor) {
  std::vector<at::Tensor> views;
  int64_t begin = 0;
  const auto row = tensor.dim() > 0 && tensor.size(0) > 0 ? tensor.numel() / tensor.size(0) : 0;
  for (const auto& box : layout.boxes) {
    const at::IntArrayRef sizes(box.size);
    const auto count = c10::multiply_integers(sizes);
    DDP_CHECK_VALUE(
        begin + count <= tensor.numel(), "ParameterLayout: expected boxes of at most ",
        tensor.numel(), " elements for ", layout.name, ", got more. Correct its layouts().");
    if (sizes == tensor.sizes()) {
      views.push_back(tensor);
    } else if (
        row > 0 && sizes.size() == static_cast<size_t>(tensor.dim()) && begin % row == 0 &&
        sizes.slice(1) == tensor.sizes().slice(1)) {
      views.push_back(tensor.narrow(0, begin / row, sizes[0]));
    } else {
      DDP_CHECK_VALUE(
          tensor.is_contiguous(), "ParameterLayout: expected a contiguous tensor for ", layout.name,
          ", got strides ", tensor.strides(), ". Make it contiguous.");
      views.push_back(tensor.view(-1).narrow(0, begin, count).view(sizes));
    }
    begin += count;
  }
  return views;
}

}  // namespace ddp
