// A step that is saved again on a file system that exchanges no names, by a process that is killed.
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/files/folder.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace {

// Whether this process has renameat2(), and the rename() at which it ends; 0: none.
bool has_exchange = true;
int end_at_rename = 0;

}  // namespace

extern "C" int rename(const char* from, const char* to) noexcept {
  if (end_at_rename > 0 && --end_at_rename == 0) _exit(9);
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0U));
}

extern "C" int renameat2(
    int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (!has_exchange) {
    errno = EINVAL;
    return -1;
  }
  return static_cast<int>(syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
}

namespace {

using ddp::CheckpointFolder;
using namespace ddp::testing;

void save(const std::string& path, const std::string& text) {
  CheckpointFolder folder(path);
  const auto hidden = folder.begin(7);
  ddp::write_whole_file(folder.path_of(hidden) + "/text", text);
  folder.publish(hidden, 7);
}

/// \return  whether it came to its end.
bool save_in_child(const std::string& path, const std::string& text, int end_at) {
  const auto child = fork();
  if (child == 0) {
    has_exchange = false;
    end_at_rename = end_at;
    save(path, text);
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0;
}

}  // namespace

TEST_CASE("a kill while a step is saved again leaves one of the two", "[checkpoint][pure]") {
  const TemporaryFolder folder;
  save(folder.path(), "first");
  const auto saved = [&] {
    const CheckpointFolder after(folder.path());
    after.restore_replaced();
    const auto steps = after.steps();
    return steps == std::vector<int64_t>{7} ? ddp::read_whole_file(after.path_of(7) + "/text", 99)
                                            : "lost";
  };
  CHECK_FALSE(save_in_child(folder.path(), "second", 1));
  CHECK(saved() == "first");
  CHECK_FALSE(save_in_child(folder.path(), "second", 2));
  CHECK(saved() == "first");
  CHECK_FALSE(save_in_child(folder.path(), "second", 2));  // and found by the next save
  CHECK(save_in_child(folder.path(), "third", 0));
  CHECK(saved() == "third");
  CHECK(names_in(folder.path()).size() == 1);
}
