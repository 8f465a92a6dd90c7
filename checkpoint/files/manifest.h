#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <ddp/internal/file_io.h>
#include "shards/shard_index.h"

namespace ddp {

/// Thrown for a checkpoint that is not as it was written; an older one may be whole.
class DamagedCheckpoint : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ManifestFile {
  std::string name;
  FileSum sum;
};

/// The contents of manifest.json.
struct Manifest {
  int64_t step = 0;
  int world_size = 1;
  std::string library_version;
  std::string libtorch_version;
  std::vector<ManifestFile> files;
  std::map<std::string, ShardIndex> index = {};  // of the sharded parts

  /// Returns null when there is no such file.
  const ManifestFile* find(const std::string& name) const;
};

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr size_t kMaxManifestBytes = size_t{1} << 30;

/// Writes JSON whose last line holds the CRC-32C of all lines before it. Without sharded parts it
/// has format 1, which versions of the library without sharded parts load.
std::string to_json(const Manifest& manifest);

/// \param path  for the texts of errors.
/// \throws DamagedCheckpoint  the manifest is not as it was written.
/// \throws c10::Error  the manifest has another format.
Manifest parse_manifest(const std::string& text, const std::string& path);

/// Writes eight digits: "1a2b3c4d".
std::string hexadecimal(uint32_t number);

}  // namespace ddp
