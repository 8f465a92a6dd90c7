#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "owned_descriptor.h"

namespace ddp {

/// Keeps a file from being removed for as long as this object lives, in any process. The last such
/// object removes the file.
///
/// Those who use the file hold a shared lock on a second one, "<path>.users". Removing takes the
/// exclusive lock, so it meets no one who uses the file or begins to. The kernel drops the lock of
/// a process that dies.
class FileUse {
 public:
  /// \throws c10::Error  naming the file that cannot be opened, created or locked, and why.
  explicit FileUse(const std::string& path);
  ~FileUse();
  FileUse(const FileUse&) = delete;
  FileUse& operator=(const FileUse&) = delete;

 private:
  const std::string path_;
  const OwnedDescriptor users_;
};

/// A FileStore that groups may use one after the other, without a pause, or at the same time.
///
/// c10d's own removes its file when as many ranks have left as there are, and a rank of the next
/// group may have come by then. That rank is alone with a file that has no name any more, and one
/// that goes on in a new file of the same name, from where it had read to, reads past its end for
/// ever, with the file locked.
class SharedFileStore : private FileUse, public c10d::FileStore {
 public:
  /// \throws c10::Error  as FileUse.
  explicit SharedFileStore(const std::string& path);

  c10::intrusive_ptr<c10d::Store> clone() override;
};

}  // namespace ddp
