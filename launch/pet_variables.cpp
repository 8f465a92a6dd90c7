#include "launch/pet_variables.h"

#include <cctype>
#include <initializer_list>
#include <string_view>

#include <CLI/CLI.hpp>

#include <ddp/internal/ranges.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr std::string_view kBackend = "PET_RDZV_BACKEND";

struct Default {
  const char* variable;
  const char* option;
  bool is_about_hosts;
  std::initializer_list<const char*> replaced_by;  // options that leave it without a meaning
};

/// A variable comes after the one that replaces it.
const Default kDefaults[] = {
    {"PET_NPROC_PER_NODE",
     "--nproc-per-node",
     false,
     {"--coordinate", "--np", "--host", "--hostfile"}},
    {"PET_NNODES", "--nnodes", true, {}},
    {"PET_NODE_RANK", "--node-rank", true, {}},
    {"PET_RDZV_ENDPOINT", "--rdzv-endpoint", true, {"--master-addr", "--master-port"}},
    {"PET_MASTER_ADDR", "--master-addr", true, {"--rdzv-endpoint"}},
    {"PET_MASTER_PORT", "--master-port", true, {"--rdzv-endpoint"}},
    {kBackend.data(), "--rdzv-backend", true, {}},
    {"PET_RDZV_ID", "--rdzv-id", true, {"--token"}},
    {"PET_RDZV_CONF", "--rdzv-conf", true, {}},
    {"PET_MAX_RESTARTS", "--max-restarts", false, {}},
    {"PET_LOG_DIR", "--log-dir", false, {}},
};

bool is_given(const CLI::App& app, const char* option) {
  const auto* found = app.get_option_no_throw(option);
  return found != nullptr && found->count() > 0;
}

bool is_any_given(const CLI::App& app, std::initializer_list<const char*> options) {
  return any_of(options, [&](const char* option) { return is_given(app, option); });
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

bool is_backend(const std::string& text) { return text == "static" || text == "c10d"; }

/// Where the text has the option, and not a longer one; npos: nowhere.
size_t place_of(const std::string& option, const std::string& text) {
  auto place = text.find(option);
  const auto goes_on = [&] {
    const auto end = place + option.size();
    return end < text.size() &&
           (std::isalnum(static_cast<unsigned char>(text[end])) != 0 || text[end] == '-');
  };
  while (place != std::string::npos && goes_on()) place = text.find(option, place + 1);
  return place;
}

/// ddprun meets at the endpoint itself, where torchrun's other backends have a server of their own.
void check_backend(const Variables& variables) {
  const auto backend = value_of(variables, kBackend.data());
  if (backend.empty() || is_backend(backend)) return;
  throw CLI::ValidationError(
      "PET_RDZV_BACKEND: expected static or c10d, got '" + backend +
      "'. Give --rdzv-endpoint with node 0's host, or run torchrun");
}

}  // namespace

std::vector<TakenVariable> take_pet_variables(
    CLI::App& app, const std::string& nodes, const Variables& variables) {
  std::vector<TakenVariable> taken;
  // The ddprun that started this one has taken them.
  if (!variables || is_given(app, "--obey-stdin")) return taken;
  const bool is_alone = nodes.empty() ? value_of(variables, "PET_STANDALONE") == "1"
                                      : number_in(split(nodes, ':').back(), 1, 1).has_value();
  const bool has_hosts =
      is_alone || is_any_given(app, {"--standalone", "--coordinate", "--host", "--hostfile"});
  const bool has_endpoint =
      is_any_given(app, {"--rdzv-endpoint", "--master-addr", "--rdzv-backend"});
  if (!has_hosts && !has_endpoint) check_backend(variables);
  for (const auto& one : kDefaults) {
    auto* option = app.get_option_no_throw(one.option);
    const auto value = value_of(variables, one.variable);
    const bool is_taken = option != nullptr && option->count() == 0 &&
                          !is_any_given(app, one.replaced_by) && !(has_hosts && one.is_about_hosts);
    // An endpoint of the command line needs no other backend.
    const bool is_passed_over = value.empty() || (one.variable == kBackend && !is_backend(value));
    if (!is_taken || is_passed_over) continue;
    take(*option, one, value);
    taken.push_back({one.variable, one.option, value, one.is_about_hosts});
  }
  return taken;
}

std::string with_variables(std::string text, const std::vector<TakenVariable>& taken) {
  std::string begin, end;
  for (const auto& one : taken) {
    const auto place = place_of(one.option, text);
    const auto setting = one.variable + "='" + one.value + "'";
    if (place == 0) {
      begin = setting + " as ";
    } else if (place != std::string::npos) {
      end += " " + one.option + " is " + setting + ".";
    }
  }
  if (!end.empty() && text.back() != '.') text += ".";
  return begin + text + end;
}

}  // namespace ddp::launch
