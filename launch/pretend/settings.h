#pragma once

#include <optional>
#include <string>
#include <vector>

namespace ddp::launch {

/// A world of which a few ranks run here, with no others to talk to.
struct PretendedWorld {
  int size = 1;
  int ranks_a_host = 8;
  std::vector<int> present;  // ascending
};

/// How fast messages are.
struct Links {
  double host_rate = 0;     // bytes a second between ranks of one host
  double network_rate = 0;  // bytes a second between hosts
  double latency = 0;       // seconds of a message without bytes
};

/// The lists of calls that ranks write, and their report.
struct CallsOptions {
  std::string folder;          // where ranks write them; empty: nowhere, or a temporary one
  std::string check;           // a folder with lists to report on, without a run; empty: none
  bool json = false;           // the report is one JSON object, and alone on stdout
  std::optional<Links> links;  // unset: no times of messages
};

}  // namespace ddp::launch
