#include "launch/pet_variables.h"

#include <initializer_list>
#include <string>

#include <CLI/CLI.hpp>

namespace ddp::launch {
namespace {

struct Default {
  const char* variable;
  const char* option;
  bool is_about_hosts;
  std::initializer_list<const char*> replaced_by;  // options that leave it without a meaning
};

/// A variable comes after the one that replaces it.
const Default kDefaults[] = {
    {"PET_NPROC_PER_NODE", "--nproc-per-node", false, {"--coordinate"}},
    {"PET_NNODES", "--nnodes", true, {}},
    {"PET_NODE_RANK", "--node-rank", true, {}},
    {"PET_RDZV_ENDPOINT", "--rdzv-endpoint", true, {"--master-addr", "--master-port"}},
    {"PET_MASTER_ADDR", "--master-addr", true, {"--rdzv-endpoint"}},
    {"PET_MASTER_PORT", "--master-port", true, {"--rdzv-endpoint"}},
    {"PET_RDZV_BACKEND", "--rdzv-backend", true, {}},
    {"PET_RDZV_ID", "--rdzv-id", true, {}},
    {"PET_MAX_RESTARTS", "--max-restarts", false, {}},
    {"PET_LOG_DIR", "--log-dir", false, {}},
};

bool is_given(const CLI::App& app, const char* option) {
  const auto* found = app.get_option_no_throw(option);
  return found != nullptr && found->count() > 0;
}

bool is_replaced(const CLI::App& app, const Default& one) {
  for (const auto* option : one.replaced_by) {
    if (is_given(app, option)) return true;
  }
  return false;
}

std::string value_of(const Variables& variables, const char* name) {
  const char* value = variables(name);
  return value != nullptr ? value : "";
}

void take(CLI::Option& option, const Default& one, const std::string& value) {
  try {
    option.add_result(value);
    option.run_callback();
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    const auto rule = text.find(": ");  // after the option's name
    throw CLI::ValidationError(
        one.variable + (rule == std::string::npos ? ": " + text : text.substr(rule)) + ". Give " +
        one.option + " on the command line, which takes precedence");
  }
}

/// ddprun meets at the endpoint itself, where torchrun's other backends have a server of their own.
void check_backend(const Variables& variables) {
  const auto backend = value_of(variables, "PET_RDZV_BACKEND");
  if (backend.empty() || backend == "static" || backend == "c10d") return;
  throw CLI::ValidationError(
      "PET_RDZV_BACKEND: expected static or c10d, got '" + backend +
      "'. Give --rdzv-endpoint with node 0's host, or run torchrun");
}

}  // namespace

void take_pet_variables(CLI::App& app, int nodes, const Variables& variables) {
  if (!variables) return;
  const bool has_hosts = is_given(app, "--nnodes");
  const bool on_one_host = is_given(app, "--standalone") || is_given(app, "--coordinate") ||
                           (has_hosts && nodes == 1) ||
                           (!has_hosts && value_of(variables, "PET_STANDALONE") == "1");
  const bool has_endpoint = is_given(app, "--rdzv-endpoint") || is_given(app, "--master-addr");
  if (!on_one_host && !has_endpoint) check_backend(variables);
  for (const auto& one : kDefaults) {
    auto* option = app.get_option_no_throw(one.option);
    const bool is_taken = option != nullptr && option->count() == 0 && !is_replaced(app, one) &&
                          !(on_one_host && one.is_about_hosts);
    const auto value = value_of(variables, one.variable);
    if (is_taken && !value.empty()) take(*option, one, value);
  }
}

}  // namespace ddp::launch
