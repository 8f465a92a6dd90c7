#include "rendezvous/init_method.h"

#include <algorithm>

#include <ddp/internal/check.h>

namespace ddp {
namespace {

[[noreturn]] void bad_url(const std::string& url, const std::string& problem) {
  DDP_CHECK_VALUE(
      false, "init_method(): expected env://, tcp://host:port, file:///path or mpi://, got \"", url,
      "\": ", problem, ". Write it in one of these forms, or leave it out for env://.");
}

// "rank=1&world_size=2"
void parse_query(const std::string& url, const std::string& query, InitMethod& method) {
  for (size_t begin = 0; begin < query.size();) {
    const auto end = std::min(query.find('&', begin), query.size());
    const auto part = query.substr(begin, end - begin);
    const auto equals = std::min(part.find('='), part.size());
    const auto name = part.substr(0, equals);
    if (equals == part.size()) bad_url(url, "\"" + part + "\" is not name=value");
    auto& setting = name == "rank" ? method.rank : method.world_size;
    if (name != "rank" && name != "world_size") {
      bad_url(url, "it has \"" + name + "\" after '?', where only rank and world_size may be");
    }
    setting = Setting{name + " in init_method(\"" + url + "\")", part.substr(equals + 1)};
    begin = end + 1;
  }
}

// "host:port" or "[IPv6]:port"
void parse_address(const std::string& url, const std::string& address, InitMethod& method) {
  const auto colon = address.rfind(':');
  const bool in_brackets = !address.empty() && address.front() == '[';
  if (colon == std::string::npos || (in_brackets && address[colon - 1] != ']')) {
    bad_url(url, "it has no port");
  }
  method.host = in_brackets ? address.substr(1, colon - 2) : address.substr(0, colon);
  if (method.host.empty()) bad_url(url, "it has no host");
  if (!in_brackets && method.host.find(':') != std::string::npos) {
    bad_url(url, "an IPv6 address needs brackets, as in tcp://[::1]:29500");
  }
  method.port = parse_int(
      {"the port in init_method(\"" + url + "\")", address.substr(colon + 1)}, {1, kMaxPort},
      "Give a free port of rank 0's host, as in tcp://host:29500.");
}

}  // namespace

InitMethod parse_init_method(const std::string& url) {
  const auto separator = url.find("://");
  if (separator == std::string::npos) bad_url(url, "it has no \"://\"");
  const auto scheme = url.substr(0, separator);
  const auto rest = url.substr(separator + 3);
  const auto question = std::min(rest.find('?'), rest.size());
  const auto body = rest.substr(0, question);

  InitMethod method;
  if (question < rest.size()) parse_query(url, rest.substr(question + 1), method);
  if (scheme == "env") {
    if (!body.empty()) bad_url(url, "nothing but ?rank= and &world_size= may follow env://");
  } else if (scheme == "mpi") {
    method.kind = InitMethod::Kind::kMpi;
    if (!rest.empty()) bad_url(url, "nothing may follow mpi://, for MPI numbers the ranks");
  } else if (scheme == "tcp") {
    method.kind = InitMethod::Kind::kTcp;
    parse_address(url, body, method);
  } else if (scheme == "file") {
    method.kind = InitMethod::Kind::kFile;
    if (body.size() < 2 || body.front() != '/') {
      bad_url(url, "the path must be absolute: three slashes, as in file:///tmp/meet");
    }
    method.path = body;
  } else {
    bad_url(url, "\"" + scheme + "://\" is not known");
  }
  return method;
}

}  // namespace ddp
