// Archives that go through bytes, as through a file.
#pragma once

#include <sstream>
#include <string>

#include <torch/serialize.h>

namespace ddp::testing {

/// The bytes of the archive that `saved.save()` writes to.
template <typename Saved>
std::string bytes_of_archive(const Saved& saved) {
  torch::serialize::OutputArchive archive;
  saved.save(archive);
  std::ostringstream bytes;
  archive.save_to(bytes);
  return bytes.str();
}

inline torch::serialize::InputArchive archive_of(const std::string& bytes) {
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  return archive;
}

/// An archive with what `saved.save()` writes, for load().
template <typename Saved>
torch::serialize::InputArchive reread(const Saved& saved) {
  return archive_of(bytes_of_archive(saved));
}

}  // namespace ddp::testing
