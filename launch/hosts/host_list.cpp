#include "launch/hosts/host_list.h"

#include <algorithm>
#include <optional>
#include <stdexcept>

#include <ddp/internal/membership/line_channel.h>
#include <ddp/internal/ranges.h>
#include <ddp/internal/text.h>

#include "launch/texts.h"

namespace ddp::launch {
namespace {

[[noreturn]] void refuse_text(const std::string& rule, const std::string& got) {
  throw std::invalid_argument("expected " + rule + ", got '" + got + "'");
}

int ranks_of(const std::string& number, const std::string& whole) {
  const auto ranks = number_in(number, 1, kMaxLocalRanks);
  if (!ranks) refuse_text("HOST:RANKS with 1 to 1024 ranks", whole);
  return *ranks;
}

/// "a", "a:4", "user@a:4", "[::1]:4"; an IPv6 address without brackets has no number.
Host host_of(const std::string& text) {
  const auto bracket = text.rfind(']');
  const auto colon = text.find(':', bracket == std::string::npos ? 0 : bracket);
  const bool is_bare_ipv6 =
      bracket == std::string::npos && colon != std::string::npos && text.rfind(':') != colon;
  Host host;
  if (colon == std::string::npos || is_bare_ipv6) {
    host.name = text;
  } else {
    host.name = text.substr(0, colon);
    host.ranks = ranks_of(text.substr(colon + 1), text);
  }
  host.name = without_brackets(host.name);
  // ssh would take it for an option of its own.
  const bool has_space = host.name.find_first_of(" \t\r\n") != std::string::npos;
  if (host.name.empty() || host.name.front() == '-' || has_space)
    refuse_text("a host's name", text);
  return host;
}

void add(std::vector<Host>& hosts, const Host& host) {
  for (auto& known : hosts) {
    if (known.name != host.name) continue;
    known.ranks = std::max(known.ranks, 1) + std::max(host.ranks, 1);
    if (known.ranks <= kMaxLocalRanks) return;
    refuse_text(str("at most ", kMaxLocalRanks, " ranks on a host"), host.name);
  }
  hosts.push_back(host);
}

/// "user@a" is reached by the other hosts at "a".
std::string address_of(const std::string& host) { return host.substr(host.find('@') + 1); }

/// Whether each host that has the name is itself.
bool is_own_of_each(const std::string& address) {
  return address == "localhost" || address.rfind("localhost.", 0) == 0 ||
         membership::is_loopback_host(address);
}

}  // namespace

std::vector<Host> hosts_of_list(const std::string& list) {
  std::vector<Host> hosts;
  for (const auto& part : split(list, ',')) add(hosts, host_of(part));
  return hosts;
}

std::vector<Host> hosts_of_file(const std::string& text) {
  constexpr const char* kSlots = "slots=";
  std::vector<Host> hosts;
  for (const auto& line : lines_of(text)) {
    InputText words(line.substr(0, line.find('#')));
    std::string word;
    if (!(words >> word)) continue;
    Host host = host_of(word);
    while (words >> word) {
      if (word.rfind(kSlots, 0) == 0) {
        host.ranks = ranks_of(word.substr(std::string(kSlots).size()), line);
      } else if (word.find('=') == std::string::npos) {
        refuse_text("lines HOST, HOST:RANKS or HOST slots=RANKS", line);
      }
    }
    add(hosts, host);
  }
  if (hosts.empty()) refuse_text("a line for each host", text);
  return hosts;
}

std::vector<Host> with_ranks(std::vector<Host> hosts, int by_default, int all) {
  int left = all;
  int most = 0;
  std::vector<Host> used;
  for (auto& host : hosts) {
    if (by_default > 0 && host.ranks > 0) {
      throw std::invalid_argument(
          str("expected no number of ranks beside ", host.name, ":", host.ranks, ", got ",
              by_default, ". The ranks of the whole job are -np"));
    }
    if (host.ranks == 0) host.ranks = std::max(by_default, 1);
    most += host.ranks;
    if (all > 0) host.ranks = std::min(host.ranks, left);
    left -= host.ranks;
    if (host.ranks > 0) used.push_back(host);
  }
  if (all > most) refuse_text(str("at most the hosts' ", most, " ranks"), std::to_string(all));
  return used;
}

std::string address_of_first(const std::vector<std::string>& names, const std::string& own_name) {
  const auto first = address_of(names.front());
  const auto is_own = [](const std::string& name) { return is_own_of_each(address_of(name)); };
  if (!is_own(first) || all_of(names, is_own)) return first;
  if (!is_own_of_each(own_name)) return own_name;
  throw std::invalid_argument(
      str("expected a name of the first host that the others can reach, got '", first,
          "', which is each host itself. Give it, or --master-addr"));
}

}  // namespace ddp::launch
