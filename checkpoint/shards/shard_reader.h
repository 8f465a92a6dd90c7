#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "files/manifest.h"
#include "shards/box.h"
#include "shards/shard_file.h"

namespace ddp {

/// Reads boxes of the tensors of a part from the files of a checkpoint that have them.
class ShardReader {
 public:
  /// \param folder  the checkpoint's. \param manifest  outlives this, and has an index of the part.
  ShardReader(const std::string& part, const Manifest& manifest, std::string folder);

  const ShardIndex& index() const { return index_; }

  /// Puts down that read() fills `into` with the elements `box` of a saved tensor.
  ///
  /// \param into  of the shape of the box.
  void add(const IndexedTensor& saved, const TensorBox& box, const at::Tensor& into);

  /// Compares a file with the manifest, once.
  ///
  /// \throws DamagedCheckpoint  it differs.
  void check(const std::string& file);

  /// Reads what was put down since the last read().
  ///
  /// \throws DamagedCheckpoint  a file differs from the manifest.
  void read();

  /// How many dictionaries of files were read: each file's once, however often it is open.
  size_t dictionaries_read() const { return known_.size(); }

 private:
  struct Range {
    const IndexedBox* from = nullptr;
    TensorBox box;  // of the whole tensor
    at::Tensor into;
  };

  ShardFile& known(const std::string& file);
  void make_room();

  const ShardIndex& index_;
  const std::string folder_;
  std::map<std::string, std::vector<Range>> by_file_;
  std::set<std::string> checked_;
  std::unordered_map<std::string, const ManifestFile*> in_manifest_;
  std::map<std::string, ShardFile> known_;
  std::vector<ShardFile*> open_;  // with a descriptor
};

}  // namespace ddp
