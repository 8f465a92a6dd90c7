#pragma once

#include <string>

#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <ddp/internal/system/fd.h>

namespace ddp {

/// Keeps a file from being removed while this object lives, in any process. The last such object
/// removes the file.
///
/// The users of the file hold a shared lock on a second one, "<path>.users". Removing takes the
/// exclusive lock, so it never overlaps with a user, or with the start of one. The kernel drops the
/// lock of a process that dies.
class FileUse {
 public:
  /// \throws c10::Error  naming the file that cannot be opened, created or locked, and why.
  explicit FileUse(const std::string& path);
  ~FileUse();
  C10_DISABLE_COPY_AND_ASSIGN(FileUse);

 private:
  const std::string path_;
  const Fd users_;
};

/// A FileStore that groups may use one after the other, without a pause, or at the same time.
///
/// c10d's own removes its file when as many ranks have left as there are, and a rank of the next
/// group may have opened it by then. That rank then uses a file that no longer has a name. And a
/// rank that continues in a new file of the same name, from the position up to which it had read,
/// reads past the end of that file for ever, with the file locked.
class SharedFileStore : private FileUse, public c10d::FileStore {
 public:
  /// \throws c10::Error  as FileUse.
  explicit SharedFileStore(const std::string& path);

  c10::intrusive_ptr<c10d::Store> clone() override;
};

}  // namespace ddp
