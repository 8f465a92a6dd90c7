#include <ddp/state_dict.h>

#include <c10/util/Exception.h>
#include <ddp/internal/check.h>

#include "python/module_dict.h"
#include "python/optimizer_dict.h"
#include "python/torch_file.h"
#include "tensors/write_tensors.h"

namespace ddp {
namespace {

void check_known(const torch::optim::Optimizer& optimizer, const char* function) {
  DDP_CHECK_VALUE(
      is_known_optimizer(optimizer), function,
      ": expected LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad, got another optimizer. Use "
      "torch::save and torch::load for it; of a ZeroRedundancyOptimizer, save consolidated(0).");
}

}  // namespace

void save_state_dict(const torch::nn::Module& module, const std::string& file) {
  replace_torch_file(file, [&] { return copy_to_host(module_dict(module)); });
}

void save_state_dict(
    const torch::OrderedDict<std::string, at::Tensor>& dict, const std::string& file) {
  write_torch_tensors(source_of(dict, file), file);
}

void load_state_dict(torch::nn::Module& module, const std::string& file, bool strict) {
  const auto load = prepare_module(module, read_torch_file(file), strict, file);
  if (!load.notice.empty()) TORCH_WARN(load.notice);
  load.apply();
}

void save_state_dict(torch::optim::Optimizer& optimizer, const std::string& file) {
  check_known(optimizer, "save_state_dict");
  replace_torch_file(file, [&] { return copy_to_host(optimizer_dict(optimizer)); });
}

void load_state_dict(torch::optim::Optimizer& optimizer, const std::string& file) {
  check_known(optimizer, "load_state_dict");
  prepare_optimizer(optimizer, read_torch_file(file), file).apply();
}

}  // namespace ddp
