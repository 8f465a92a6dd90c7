#include "targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <ddp/internal/crc32c.h>
#include <ddp/internal/system/fd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <ddp/internal/forward_count.h>
#include "checkpoint/files/manifest.h"
#include "checkpoint/python/torch_file.h"
#include "checkpoint/tensors/safetensors_file.h"
#include "comm/base/environment.h"
#include "comm/group/backend_spec.h"
#include "comm/monitor/call_difference.h"
#include "comm/monitor/rank_report.h"
#include "comm/rendezvous/init_method.h"
#include "examples/common/data/cifar.h"
#include "examples/common/data/idx.h"
#include "launch/options.h"
#include "support/temporary_folder.h"

namespace ddp::fuzz {
namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

/// Runs `body`, which may throw errors of the library for bad bytes, and nothing else.
template <typename Body>
void only_errors(const Body& body) {
  try {
    body();
  } catch (const c10::Error&) {
  } catch (const DamagedCheckpoint&) {
  }
}

/// A file in memory.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view bytes) : fd_(::memfd_create("fuzz", 0)) {
    require(bool(fd_));
    require(::write(fd_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  }

  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_.get()); }

 private:
  Fd fd_;
};

void idx(std::string_view bytes) {
  const MemoryFile file(bytes);
  only_errors([&] { require(examples::read_idx_images(file.path()).dim() == 3); });
  only_errors([&] { require(examples::read_idx_labels(file.path(), 10).dim() == 1); });
}

void cifar(std::string_view bytes) {
  // The parser reads files of fixed names in a folder.
  static const testing::TemporaryFolder temporary;
  const auto& folder = temporary.path();
  const MemoryFile file(bytes);
  for (const char* name : {"/test_batch.bin", "/test.bin"}) {
    ::unlink((folder + name).c_str());
    require(::symlink(file.path().c_str(), (folder + name).c_str()) == 0);
  }
  only_errors([&] { require(examples::read_cifar10(folder, "test").images.dim() == 4); });
  only_errors([&] { require(examples::read_cifar100(folder, "test").images.dim() == 4); });
  for (const char* name : {"/test_batch.bin", "/test.bin"}) ::unlink((folder + name).c_str());
}

void torch_file(std::string_view bytes) {
  const MemoryFile file(bytes);
  only_errors([&] { (void)read_torch_file(file.path()); });
}

void safetensors(std::string_view bytes) {
  const MemoryFile memory(bytes);
  only_errors([&] {
    SafetensorsFile file(memory.path());
    uint64_t size = 0;
    for (size_t i = 0; i < file.tensors().size(); ++i) {
      const auto& kind = file.tensors()[i].kind;
      const auto tensor = file.read(i, whole_box(kind.sizes));
      require(tensor.sizes() == kind.sizes && tensor.nbytes() == bytes_of(kind));
      size += bytes_of(kind);
    }
    require(size < bytes.size());
    // What is read can be written.
    const auto header = make_safetensors_header(file.tensors(), file.metadata(), "again");
    const auto again = read_safetensors_header(header, header.size() + size, "again");
    require(again.tensors.size() == file.tensors().size() && again.metadata == file.metadata());
  });
}

void safetensors_index(std::string_view bytes) {
  only_errors([&] { (void)read_safetensors_index(bytes, "index"); });
}

void manifest(std::string_view bytes) {
  only_errors([&] { (void)parse_manifest(std::string(bytes), "manifest.json"); });
  // Appends the correct sum, which no fuzzer guesses.
  const auto sum = hexadecimal(crc32c(0, bytes.data(), bytes.size()));
  const auto whole = std::string(bytes) + "  \"crc32c\": \"" + sum + "\"\n}\n";
  only_errors([&] {
    const auto parsed = parse_manifest(whole, "manifest.json");
    require(to_json(parse_manifest(to_json(parsed), "again")) == to_json(parsed));
  });
}

void init_method(std::string_view bytes) {
  only_errors([&] { (void)parse_init_method(std::string(bytes)); });
  only_errors([&] { (void)parse_backend(std::string(bytes), true); });
}

void environment(std::string_view bytes) {
  std::map<std::string, std::string> variables;
  std::istringstream lines{std::string(bytes)};
  for (std::string line; std::getline(lines, line);) {
    const auto equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
  }
  const auto found = [&](const std::string& name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional<std::string>(at->second);
  };
  only_errors([&] {
    const auto environment = read_environment(found);
    for (const auto& setting :
         {environment.rank, environment.world_size, environment.local_rank,
          environment.local_world_size, environment.master_port, environment.attempt}) {
      if (setting) only_errors([&] { (void)parse_int(*setting, {0, kMaxPort}, "Correct it."); });
    }
  });
}

/// Parses entries that another rank may have put into the store: another version, or a stranger.
void store_entries(std::string_view bytes) {
  auto calls = parse_calls(0, std::string(bytes));
  RankCalls own;
  own.rank = 1;
  own.calls.calls.emplace_back();
  if (!calls.empty()) own.list = calls.front().list;
  calls.push_back(own);
  const auto difference = find_call_difference(calls);
  if (difference) require(!to_text(*difference).empty());
  (void)parse_report(std::string(bytes));
  c10d::HashStore store;
  record_failed_forward(store, 0, {0, 1, std::string(bytes)});
  std::vector<FailedForward> known;
  only_errors([&] { read_failed_forwards(store, 0, known); });
  require(known.size() == 1);
}

void ddprun_options(std::string_view bytes) {
  std::vector<std::string> words{"ddprun"};
  std::istringstream lines{std::string(bytes)};
  for (std::string line; std::getline(lines, line);) words.push_back(line);
  std::vector<const char*> argv;
  for (const auto& word : words) argv.push_back(word.c_str());
  std::ostringstream out;
  std::ostringstream err;
  const auto parsed = launch::parse_options(static_cast<int>(argv.size()), argv.data(), out, err);
  if (parsed.options) {
    require(!parsed.options->command.empty() && parsed.options->local_ranks >= 1);
  } else {
    require(parsed.exit_code == 0 || !err.str().empty());
  }
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all{
      {"idx", idx},
      {"cifar", cifar},
      {"torch_file", torch_file},
      {"safetensors", safetensors},
      {"safetensors_index", safetensors_index},
      {"manifest", manifest},
      {"init_method", init_method},
      {"environment", environment},
      {"store_entries", store_entries},
      {"ddprun_options", ddprun_options},
  };
  return all;
}

}  // namespace ddp::fuzz
