#include "stream/lib_archive.h"

#include <dlfcn.h>

#include <string>

#include <ddp/internal/check.h>

namespace ddp {
namespace {

constexpr const char* kLibrary = "libarchive.so.13";  // of all versions 3.x

template <typename Function>
void find_function(void* library, const char* name, Function& function) {
  const auto symbol = std::string("archive_") + name;
  function = reinterpret_cast<Function>(::dlsym(library, symbol.c_str()));
  DDP_CHECK(
      function != nullptr, "tar_shards: expected libarchive 3 as ", kLibrary, ", got one without ",
      symbol, ". Install Debian's package libarchive13, or another build of libarchive 3.");
}

LibArchive opened_library() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  DDP_CHECK(
      library != nullptr, "tar_shards: expected libarchive, got: ", ::dlerror(),
      ". Install it: apt-get install libarchive13 (libarchive13t64 on Ubuntu 24.04).");
  LibArchive functions{};
#define DDP_FIND(name) find_function(library, #name, functions.name)
  DDP_FIND(read_new);
  DDP_FIND(read_free);
  DDP_FIND(read_support_format_tar);
  DDP_FIND(read_support_filter_all);
  DDP_FIND(read_open_memory);
  DDP_FIND(read_next_header);
  DDP_FIND(read_header_position);
  DDP_FIND(read_data_block);
  DDP_FIND(filter_code);
  DDP_FIND(error_string);
  DDP_FIND(entry_pathname);
  DDP_FIND(entry_pathname_utf8);
  DDP_FIND(entry_size);
  DDP_FIND(entry_filetype);
#undef DDP_FIND
  return functions;
}

}  // namespace

const LibArchive& lib_archive() {
  static const LibArchive functions = opened_library();  // an exception: the next call tries again
  return functions;
}

}  // namespace ddp
