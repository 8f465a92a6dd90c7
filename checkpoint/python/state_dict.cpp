#include <ddp/state_dict.h>

#include <c10/util/Exception.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include <ddp/internal/file_io.h>
#include "python/module_dict.h"
#include "python/optimizer_dict.h"
#include "python/torch_file.h"
#include "tensors/write_tensors.h"

namespace ddp {
namespace {

void save_value(const c10::IValue& value, const std::string& path) {
  replace_file(path, [&](OutputFile& file) {
    write_torch_file(
        copy_to_host(value), [&](const void* data, size_t size) { file.write(data, size); });
  });
}

void check_known(const torch::optim::Optimizer& optimizer, const char* function) {
  DDP_CHECK_VALUE(
      known_optimizer(optimizer), function,
      ": expected LibTorch's Adam, AdamW, SGD, RMSprop or Adagrad, got another optimizer. Use "
      "torch::save and torch::load for it; of a ZeroRedundancyOptimizer, save consolidated(0).");
}

}  // namespace

void save_state_dict(const torch::nn::Module& module, const std::string& file) {
  save_value(module_dict(module), file);
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
  save_value(optimizer_dict(optimizer), file);
}

void load_state_dict(torch::optim::Optimizer& optimizer, const std::string& file) {
  check_known(optimizer, "load_state_dict");
  prepare_optimizer(optimizer, read_torch_file(file), file).apply();
}

}  // namespace ddp
