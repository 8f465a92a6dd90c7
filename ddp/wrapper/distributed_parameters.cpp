#include <ddp/distributed_parameters.h>

#include <set>
#include <string_view>

#include <ddp/internal/check.h>
#include <ddp/internal/text.h>
#include <torch/nn/module.h>

#include "checks/model_checks.h"

namespace ddp {
namespace {

std::string problem_of_name(const std::string& name, const std::set<std::string>& others) {
  const bool is_malformed = name.empty() || name.front() == '.' || name.back() == '.' ||
                            name.find("..") != std::string::npos;
  if (is_malformed) return "expected names with text between their dots, got \"" + name + "\"";
  if (others.count(name)) return "expected a name for each tensor, got \"" + name + "\" twice";
  for (const auto& other : others) {
    if (other.rfind(name + ".", 0) == 0 || name.rfind(other + ".", 0) == 0) {
      return ddp::str(
          "expected names of which none is the beginning of another, got \"", name, "\" and \"",
          other, "\"");
    }
  }
  return "";
}

std::string problem_of_tensors(
    const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() != names.size()) {
    return ddp::str(
        "expected ", names.size(), " tensors, as at construction, got ", tensors.size());
  }
  if (tensors.empty()) return "expected at least one tensor, got none";
  std::set<std::string> seen;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto problem = problem_of_name(names[i], seen);
    if (!problem.empty()) return problem;
    seen.insert(names[i]);
    const auto& tensor = tensors[i];
    if (!tensor.defined()) return "expected tensors, got an undefined one in \"" + names[i] + "\"";
    for (size_t before = 0; before < i; ++before) {
      if (!tensors[before].is_same(tensor)) continue;
      return ddp::str(
          "expected tensors that differ, got one as \"", names[before], "\" and as \"", names[i],
          "\", which an optimizer would step twice");
    }
    if (!tensor.is_leaf()) {
      return ddp::str(
          "expected leaves, got a tensor that is computed from others in \"", names[i],
          "\": pass tensor.detach().requires_grad_()");
    }
  }
  return "";
}

}  // namespace

class DistributedParametersImpl::Part : public torch::nn::Module {
 public:
  Part() : torch::nn::Module("DistributedParameters") {}

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto dot = name.find('.');
    if (dot == std::string::npos) {
      register_parameter(name, tensor, tensor.requires_grad());
    } else {
      part(name.substr(0, dot))->add(name.substr(dot + 1), tensor);
    }
  }
  void clear() {
    parameters_.clear();
    for (const auto& part : children()) std::static_pointer_cast<Part>(part)->clear();
  }

 private:
  std::shared_ptr<Part> part(const std::string& prefix) {
    const auto parts = named_children();
    if (const auto* known = parts.find(prefix)) {
      return std::static_pointer_cast<Part>(*known);
    }
    return register_module(prefix, std::make_shared<Part>());
  }
};

class DistributedParametersImpl::Holder : public Part, public ModuleWithRules {
 public:
  explicit Holder(const NamedTensors& named) {
    std::vector<at::Tensor> tensors;
    for (const auto& [name, tensor] : named) {
      names_.push_back(name);
      tensors.push_back(tensor);
    }
    set(std::move(tensors));
  }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  void set(std::vector<at::Tensor> tensors) {
    clear();
    problem_ = problem_of_tensors(names_, tensors);
    tensors_ = std::move(tensors);
    if (!problem_.empty()) return;
    for (size_t i = 0; i < names_.size(); ++i) add(names_[i], tensors_[i]);
  }
  void check() const override {
    DDP_CHECK_VALUE(problem_.empty(), "DistributedParameters: ", problem_, ".");
  }

 private:
  std::vector<std::string> names_;
  std::vector<at::Tensor> tensors_;
  std::string problem_;
};

namespace {

DistributedParametersImpl::NamedTensors numbered(const std::vector<at::Tensor>& tensors) {
  DistributedParametersImpl::NamedTensors named;
  for (const auto& tensor : tensors) named.emplace_back(std::to_string(named.size()), tensor);
  return named;
}

}  // namespace

DistributedParametersImpl::DistributedParametersImpl(
    const NamedTensors& tensors, const DistributedDataParallelOptions& options)
    : DistributedParametersImpl(std::make_shared<Holder>(tensors), options) {}

DistributedParametersImpl::DistributedParametersImpl(
    const std::vector<at::Tensor>& tensors, const DistributedDataParallelOptions& options)
    : DistributedParametersImpl(numbered(tensors), options) {}

DistributedParametersImpl::DistributedParametersImpl(
    std::shared_ptr<Holder> holder, const DistributedDataParallelOptions& options)
    : DistributedDataParallelBase(holder, options), holder_(std::move(holder)) {}

void DistributedParametersImpl::refresh(const std::vector<at::Tensor>& tensors) {
  auto before = holder_->tensors();
  holder_->set(tensors);
  try {
    refresh();
  } catch (...) {
    holder_->set(std::move(before));
    throw;
  }
}

}  // namespace ddp
