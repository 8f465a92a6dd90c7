#include "launch/validators.h"

#include <cctype>
#include <cmath>
#include <stdexcept>

#include <arpa/inet.h>

#include <ddp/internal/membership/address.h>
#include <ddp/internal/ranges.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

constexpr double kMaxGraceSeconds = 86400;

std::string range_text(int low, int high) {
  return "from " + std::to_string(low) + " to " + std::to_string(high);
}

bool are_numbers(const std::string& text, char separator, int high) {
  for (const auto& part : split(text, separator)) {
    if (!number_in(part, 1, high)) return false;
  }
  return true;
}

bool is_host(const std::string& text) {
  const auto name = without_brackets(text);
  if (name.empty() || any_of(name, [](unsigned char c) { return std::isspace(c); })) return false;
  if (name.find(':') == std::string::npos) return true;
  in6_addr address;
  return ::inet_pton(AF_INET6, name.substr(0, name.find('%')).c_str(), &address) == 1;
}

}  // namespace

std::optional<Endpoint> endpoint_of(const std::string& text) {
  const auto colon = text.rfind(':');
  if (colon != std::string::npos && is_host(text.substr(0, colon))) {
    const auto port = number_in(text.substr(colon + 1), 0, 65535);
    if (port) return Endpoint{without_brackets(text.substr(0, colon)), port};
  }
  if (is_host(text)) return Endpoint{without_brackets(text), std::nullopt};
  return std::nullopt;
}

CLI::Validator whole_number(int low, int high) {
  const auto check = [low, high](const std::string& text) {
    if (number_in(text, low, high)) return std::string();
    return "expected a whole number " + range_text(low, high) + ", got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator rank_counts() {
  const auto check = [](const std::string& text) {
    const bool is_word = text == "auto" || text == "cpu" || text == "gpu";
    if (is_word || are_numbers(text, ',', kMaxLocalRanks)) return std::string();
    return "expected auto, cpu, gpu, one number for each host (4,2), or a whole number " +
           range_text(1, kMaxLocalRanks) + ", got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator host_counts() {
  const auto check = [](const std::string& text) {
    const auto parts = split(text, ':');
    const bool are_counts = parts.size() <= 2 && are_numbers(text, ':', kMaxNodes);
    const bool is_in_order = are_counts && *number_in(parts.front(), 1, kMaxNodes) <=
                                               *number_in(parts.back(), 1, kMaxNodes);
    if (is_in_order) return std::string();
    return "expected a whole number " + range_text(1, kMaxNodes) + ", or MIN:MAX, got '" + text +
           "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator seconds() {
  const auto check = [](const std::string& text) {
    double value = 0;
    const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
    if (is_number && 0 <= value && value <= kMaxGraceSeconds) return std::string();
    return "expected seconds from 0 to 86400, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator not_empty(const std::string& thing) {
  const auto check = [thing](const std::string& text) {
    return text.empty() ? "expected " + thing + ", got ''" : std::string();
  };
  return CLI::Validator(check, "");
}

CLI::Validator host() {
  const auto check = [](const std::string& text) {
    return is_host(text) ? std::string() : "expected a host's name or address, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator endpoint() {
  const auto check = [](const std::string& text) {
    if (endpoint_of(text)) return std::string();
    return "expected HOST:PORT with a port from 1 to 65535, got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator word() {
  const auto check = [](const std::string& text) {
    const bool is_word = !text.empty() && text.find_first_of(" \t\r\n/") == std::string::npos;
    return is_word ? std::string() : "expected a word without spaces and '/', got '" + text + "'";
  };
  return CLI::Validator(check, "");
}

CLI::Validator coordinator() {
  const auto check = [](const std::string& text) {
    try {
      (void)membership::parse_address(text);
      return std::string();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
  };
  return CLI::Validator(check, "");
}

}  // namespace ddp::launch
