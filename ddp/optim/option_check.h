#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include <ddp/internal/check.h>
#include <ddp/internal/cut_registry.h>
#include <ddp/internal/optimizer_kinds.h>
#include <torch/optim/optimizer.h>

namespace ddp::detail {

/// Compares each number of an optimizer's options with the range that Python takes.
struct OptionRanges : NoFields {
  std::string subject;
  size_t group;

  OptionRanges(std::string subject_, size_t group_) : subject(std::move(subject_)), group(group_) {}

  void number(const char* name, double value) {
    const bool is_rho = name == std::string_view("rho");
    check(value >= 0 && (!is_rho || value <= 1), name, is_rho ? "in [0, 1]" : ">= 0", value);
  }
  void pair(const char* name, const std::tuple<double, double>& values) {
    for (const double value : {std::get<0>(values), std::get<1>(values)}) {
      check(value >= 0 && value < 1, name, "in [0, 1)", value);
    }
  }
  void count(const char* name, int64_t value) {
    check(value >= 0 && value < 100, name, "in [0, 100)", static_cast<double>(value));
  }
  void text(const char* name, const std::optional<std::string>& value) {
    DDP_CHECK_VALUE(
        !value || *value == "original" || *value == "match_rms_adamw", subject, ": expected ", name,
        " \"original\" or \"match_rms_adamw\", got \"", value.value_or(""), "\" in group ", group,
        ". Leave it out for \"original\".");
  }
  void dtype(const char* name, at::ScalarType value) {
    DDP_CHECK_VALUE(
        value == at::kBFloat16 || value == at::kFloat || value == at::kDouble, subject,
        ": expected ", name, " at::kBFloat16, kFloat or kDouble, got ", value, " in group ", group,
        ". Leave it out for at::kBFloat16, as in Python.");
  }

 private:
  void check(bool is_right, const char* name, const char* rule, double value) const {
    DDP_CHECK_VALUE(
        is_right, subject, ": expected ", name, " ", rule, ", got ", value, " in group ", group,
        ". Correct the options.");
  }
};

/// \throws c10::ValueError  an option of a group is outside of its range, or a group has options of
///         another optimizer.
template <typename Options>
void check_options(const std::string& subject, torch::optim::Optimizer& optimizer) {
  size_t index = 0;
  for (auto& group : optimizer.param_groups()) {
    auto* options = dynamic_cast<Options*>(&group.options());
    DDP_CHECK_VALUE(
        options != nullptr, subject, ": expected options of this optimizer, got another one's in ",
        "group ", index, ". Pass ", subject, "Options.");
    OptionRanges ranges(subject, index++);
    visit_options(ranges, *options);
  }
}

/// \throws c10::ValueError  a sparse gradient or a complex parameter.
inline void check_gradients(const std::string& subject, const torch::optim::Optimizer& optimizer) {
  size_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (size_t i = 0; i < group.params().size(); ++i) {
      const auto& p = group.params()[i];
      if (!p.grad().defined()) continue;
      DDP_CHECK_VALUE(
          p.grad().layout() == at::kStrided, subject, ": expected dense gradients, got a ",
          p.grad().layout(), " one of parameter ", i, " of group ", index,
          ". Make the Embedding with sparse(false), or step it with another optimizer.");
      DDP_CHECK_VALUE(
          !p.is_complex(), subject, ": expected real parameters, got ", p.scalar_type(),
          " for parameter ", i, " of group ", index,
          ". Make them with at::view_as_real, or step them with another optimizer.");
    }
    ++index;
  }
}

/// \param remedy  for an optimizer that needs whole parameters.
/// \throws c10::ValueError  this rank has a part of a parameter: of a fully sharded model, or of a
///         layer that is cut over ranks.
inline void check_are_whole(
    const std::string& subject, const torch::optim::Optimizer& optimizer, const char* remedy) {
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& p : group.params()) {
      DDP_CHECK_VALUE(
          cut_of(p) == CutBy::Nothing, subject,
          ": expected whole parameters, got this rank's part of one that is cut over ranks, of ",
          p.sizes(), ", whose step would be another one. ", remedy);
    }
  }
}

}  // namespace ddp::detail
