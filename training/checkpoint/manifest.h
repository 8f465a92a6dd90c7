#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "file_io.h"

namespace ddp {

/// A checkpoint that is not as it was written. An older one may be.
class DamagedCheckpoint : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct ManifestFile {
  std::string name;
  FileSum sum;
};

/// What manifest.json says of a checkpoint.
struct Manifest {
  int64_t step = 0;
  int world_size = 1;
  std::string library_version;
  std::string libtorch_version;
  std::vector<ManifestFile> files;

  /// Null for no such file.
  const ManifestFile* find(const std::string& name) const;
};

inline constexpr const char* kManifestName = "manifest.json";

/// JSON whose last line holds the CRC-32C of all lines before it.
std::string to_json(const Manifest& manifest);

/// \param path  for the texts of errors.
/// \throws DamagedCheckpoint  a manifest that is not as it was written.
/// \throws c10::Error  one of another format.
Manifest parse_manifest(const std::string& text, const std::string& path);

/// "1a2b3c4d".
std::string hexadecimal(uint32_t number);

}  // namespace ddp
