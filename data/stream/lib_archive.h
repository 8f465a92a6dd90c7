// libarchive, which reads the headers of tar files. Opened when a program first needs it, so that
// programs without tar files need none, and the package of this library depends on nothing more.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

struct archive;
struct archive_entry;

namespace ddp {

/// The functions of libarchive 3 that are used here, with the types of its archive.h and
/// archive_entry.h.
struct LibArchive {
  ::archive* (*read_new)();
  int (*read_free)(::archive*);
  int (*read_support_format_tar)(::archive*);
  int (*read_support_filter_all)(::archive*);
  int (*read_open_memory)(::archive*, const void*, size_t);
  int (*read_next_header)(::archive*, ::archive_entry**);
  int64_t (*read_header_position)(::archive*);
  int (*read_data_block)(::archive*, const void**, size_t*, int64_t*);
  int (*filter_code)(::archive*, int);
  const char* (*error_string)(::archive*);
  const char* (*entry_pathname)(::archive_entry*);
  const char* (*entry_pathname_utf8)(::archive_entry*);
  int64_t (*entry_size)(::archive_entry*);
  mode_t (*entry_filetype)(::archive_entry*);
};

/// \throws c10::Error  this machine has none.
const LibArchive& lib_archive();

}  // namespace ddp
