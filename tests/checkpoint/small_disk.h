// A file system that can be full, or disappear.
#pragma once

#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <iostream>
#include <string>

namespace ddp::testing {

/// Mounts a file system of one mebibyte.
class SmallDisk {
 public:
  explicit SmallDisk(std::string path) : path_(std::move(path)) {
    mkdir(path_.c_str(), 0700);
    is_mounted_ = mount("tmpfs", path_.c_str(), "tmpfs", 0, "size=1m") == 0;
  }
  ~SmallDisk() { unmount(); }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  bool is_mounted() const { return is_mounted_; }
  /// Says so, for a case that then ends.
  bool is_missing() const {
    if (geteuid() == 0 && is_mounted_) return false;
    std::cout << "skipped: mounting a small disk takes root\n";
    return true;
  }
  bool make_read_only() const {
    return mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=1m") == 0;
  }
  void unmount() {
    if (is_mounted_) umount2(path_.c_str(), MNT_DETACH);
    is_mounted_ = false;
  }
  const std::string& path() const { return path_; }

 private:
  const std::string path_;
  bool is_mounted_ = false;
};

}  // namespace ddp::testing
