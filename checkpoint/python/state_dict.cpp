#include <ddp/state_dict.h>

#include <unistd.h>

#include <c10/util/Exception.h>
#include <ddp/internal/check.h>
#include <ddp/internal/text.h>

#include <ddp/internal/file_io.h>
#include "python/module_dict.h"
#include "python/optimizer_dict.h"
#include "python/torch_file.h"

namespace ddp {
namespace {

void save_value(const c10::IValue& value, const std::string& path) {
  const auto part = ddp::str(path, ".part.", getpid());
  try {
    OutputFile file(part);
    write_torch_file(
        copy_to_host(value), [&](const void* data, size_t size) { file.write(data, size); });
    file.finish();
    rename_path(part, path);
  } catch (...) {
    unlink(part.c_str());
    throw;
  }
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
