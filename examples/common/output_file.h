#pragma once

#include <functional>
#include <string>

namespace examples {

/// Looks, before the work whose result it is to hold, whether a file can be written.
///
/// \param option  that names it, for the text.
/// \throws c10::ValueError  no such folder, one that cannot be written to, or a folder at `path`.
void check_can_write(const std::string& option, const std::string& path);

/// Has `write` make a file under another name, and gives it its own once it is whole.
///
/// \throws  what `write` throws; c10::Error  when the file cannot be renamed.
void write_file(const std::string& path, const std::function<void(const std::string& part)>& write);

}  // namespace examples
