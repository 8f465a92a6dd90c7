#pragma once

#include <functional>
#include <string>

namespace examples {

/// Checks that a file can be written, before the work whose result it is to hold.
///
/// \param option  that names the file, for the message.
/// \throws c10::ValueError  no such folder, one that cannot be written to, or a folder at `path`.
void check_can_write(const std::string& option, const std::string& path);

/// Lets `write` write a temporary file, and renames it once it is complete.
///
/// \throws  the exceptions of `write`; c10::Error  when the file cannot be renamed.
void write_file(const std::string& path, const std::function<void(const std::string& part)>& write);

}  // namespace examples
