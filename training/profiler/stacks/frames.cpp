#include "profiler/stacks/frames.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <ddp/internal/text.h>

#include "profiler/stacks/program_output.h"

namespace ddp::profiling {
namespace {

using Frames = std::vector<std::string>;

/// The place of a return address in a file.
struct Place {
  uintptr_t offset = 0;  // of the call, as the file counts
  std::string exported;  // its function, where the dynamic loader knows it; mangled
};

std::string last_part(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Kineto writes frames into JSON as they are, and separates them by semicolons.
std::string plain(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"') c = '\'';
    if (c == '\\') c = '/';
    if (c == ';' || byte < 0x20) c = '_';
  }
  return text;
}

std::string text_of_frame(const Frame& frame, const std::string& object, uintptr_t offset) {
  if (frame.function == "??") {
    return plain(last_part(object) + formatted("+0x%llx", static_cast<unsigned long long>(offset)));
  }
  // c10::demangle would take a short name for a mangled type.
  const auto name =
      begins_with(frame.function, "_Z") ? c10::demangle(frame.function.c_str()) : frame.function;
  return plain(frame.file.empty() ? name : frame.file + '(' + frame.line + "): " + name);
}

/// The object file that an address is in, as the dynamic loader knows it.
struct Loaded {
  const link_map* map = nullptr;  // null: in none
  std::string exported = "??";    // the function, if it is exported; mangled

  explicit Loaded(const void* address) {
    Dl_info info{};
    void* found = nullptr;
    if (dladdr1(address, &info, &found, RTLD_DL_LINKMAP) == 0) return;
    map = static_cast<const link_map*>(found);
    if (info.dli_sname != nullptr) exported = info.dli_sname;
  }
  std::string path() const { return map->l_name; }  // "": the program
};

/// The addresses of all stacks, once each, by the object file that they are in.
std::map<std::string, std::map<void*, Place>> places_of(const std::vector<Addresses>& stacks) {
  std::map<std::string, std::map<void*, Place>> places;
  std::unordered_set<void*> seen;
  for (const auto& stack : stacks) {
    for (void* address : stack) {
      if (!seen.insert(address).second) continue;
      // A call that does not return may be a function's last instruction.
      const char* call = static_cast<char*>(address) - 1;
      const Loaded loaded(call);
      if (loaded.map == nullptr || is_runtime(loaded.path())) continue;
      const auto offset = reinterpret_cast<uintptr_t>(call) - loaded.map->l_addr;
      places[loaded.path()][address] = {offset, loaded.exported};
    }
  }
  return places;
}

// In a stripped file, addr2line names the nearest exported function before an address.
bool is_guess(const Frame& frame, const std::string& object, const Place& place) {
  if (!frame.file.empty() || frame.function == place.exported) return false;
  const void* function = dlsym(RTLD_DEFAULT, frame.function.c_str());
  const Loaded loaded(function);
  return function != nullptr && loaded.map != nullptr && loaded.path() == object;
}

// Leads to the program's file also where another has replaced it. Not /proc/self, which to
// addr2line is addr2line.
std::string path_of_program() { return ddp::str("/proc/", getpid(), "/exe"); }

std::string readable_path_of_program() {
  std::array<char, 4096> target{};
  const auto size = readlink("/proc/self/exe", target.data(), target.size());
  return std::string(target.data(), static_cast<size_t>(std::max<ssize_t>(size, 0)));
}

/// The functions at places in one object file.
class ObjectFrames {
 public:
  ObjectFrames(const std::string& object, const std::map<void*, Place>& places)
      : object_(object),
        path_(object.empty() ? path_of_program() : object),
        readable_path_(object.empty() ? readable_path_of_program() : object),
        places_(places) {}

  /// \return  the cause, where the program gave no answer; else "".
  std::string ask(const std::string& program, std::chrono::steady_clock::time_point deadline) {
    std::vector<std::string> command = {program, "-a", "-i", "-f", "-e", path_};
    for (const auto& [address, place] : places_) {
      command.push_back(formatted("0x%llx", static_cast<unsigned long long>(place.offset)));
    }
    const auto output = output_of(command, deadline);
    if (!output.error.empty()) return output.error;
    auto answers = parse_addr2line(output.text);
    if (answers.size() != places_.size()) {
      return ddp::str("got ", answers.size(), " answers to ", places_.size(), " addresses");
    }
    answers_ = std::move(answers);
    return "";
  }

  void add_to(std::unordered_map<void*, Frames>& frames) const {
    size_t i = 0;
    for (const auto& [address, place] : places_) {
      const std::vector<Frame> exported = {{place.exported, "", ""}};
      for (auto frame : answers_.empty() ? exported : answers_[i++]) {
        if (is_guess(frame, object_, place)) frame.function = place.exported;
        if (is_machinery(frame.function)) continue;
        frames[address].push_back(text_of_frame(frame, readable_path_, place.offset));
      }
    }
  }

  const std::string& readable_path() const { return readable_path_; }

 private:
  std::string object_;
  std::string path_;
  std::string readable_path_;
  const std::map<void*, Place>& places_;
  std::vector<std::vector<Frame>> answers_;  // none where the program gave none
};

// The stack without the profiler's callback, which LibTorch calls and which calls LibTorch to
// unwind: a stripped library has no names by which to know it.
Addresses without_callback(const Addresses& stack, const std::unordered_set<void*>& in_program) {
  const auto is_known = [&](void* address) { return in_program.count(address) != 0; };
  const auto callback = std::find_if(stack.begin(), stack.end(), is_known);
  const auto caller = std::find_if_not(callback, stack.end(), is_known);
  return {caller == stack.end() ? callback : caller, stack.end()};
}

}  // namespace

std::vector<std::vector<std::string>> frames_of(
    const std::vector<Addresses>& stacks, const NameSource& source) {
  const auto deadline = std::chrono::steady_clock::now() + source.timeout;
  std::unordered_map<void*, Frames> frames_at;
  std::unordered_set<void*> in_program;
  std::string first_error;
  for (const auto& [object, places] : places_of(stacks)) {
    for (const auto& [address, place] : places) in_program.insert(address);
    ObjectFrames frames(object, places);
    const auto error = frames.ask(source.program, deadline);
    if (first_error.empty() && !error.empty())
      first_error = ddp::str(frames.readable_path(), ", ", error);
    frames.add_to(frames_at);
  }
  if (!first_error.empty()) {
    TORCH_WARN(
        "Profiler: expected ", source.program, " to name the functions in ", first_error,
        ". Stacks have no lines, and names only of exported functions. Install binutils, or link "
        "with -rdynamic.");
  }
  std::vector<Frames> all;
  for (const auto& stack : stacks) {
    auto& frames = all.emplace_back();
    for (void* address : without_callback(stack, in_program)) {
      const auto found = frames_at.find(address);
      if (found == frames_at.end()) continue;
      frames.insert(frames.end(), found->second.begin(), found->second.end());
    }
  }
  return all;
}

std::vector<std::vector<Frame>> parse_addr2line(const std::string& text) {
  std::vector<std::vector<Frame>> answers;
  std::string function;
  for (const auto& line : lines_of(text)) {
    if (function.empty() && begins_with(line, "0x")) {
      answers.emplace_back();
    } else if (function.empty()) {
      function = line;
    } else if (!answers.empty()) {
      Frame frame{std::exchange(function, ""), "", ""};
      // "train.cpp:12 (discriminator 3)", "??:?", "??:0"
      const auto colon = line.rfind(':');
      const auto end = line.find_first_not_of("0123456789", colon + 1);
      const auto number = line.substr(colon + 1, end - colon - 1);
      if (colon != std::string::npos && !begins_with(line, "??") && !number.empty()) {
        frame.file = line.substr(0, colon);
        frame.line = number;
      }
      answers.back().push_back(std::move(frame));
    } else {
      function.clear();
    }
  }
  return answers;
}

bool is_machinery(const std::string& function) {
  if (function == "_start") return true;
  if (!begins_with(function, "_Z")) return false;
  // Z: within a function; N: within a namespace; then qualifiers of the function.
  const auto begin = function.find_first_not_of("ZNKVrRO", 2);
  if (begin == std::string::npos) return false;
  // St, Sa, Ss, ...: std and its names that have letters of their own.
  static constexpr std::array<const char*, 8> kScopes = {
      "2at", "3c10",           "5torch",        "9__gnu_cxx",
      "S",   "3ddp9profiling", "3ddp8Profiler", "3ddp19RecordFunctionGuard"};
  return std::any_of(kScopes.begin(), kScopes.end(), [&](const char* scope) {
    return begins_with(function.substr(begin), scope);
  });
}

bool is_runtime(const std::string& object) {
  const auto name = last_part(object);
  static constexpr std::array<const char*, 9> kLibraries = {"libtorch",   "libc10",  "libc.so",
                                                            "libstdc++",  "libc++",  "libgcc_s",
                                                            "libpthread", "libgomp", "ld-linux"};
  return std::any_of(kLibraries.begin(), kLibraries.end(), [&](const char* library) {
    return begins_with(name, library);
  });
}

}  // namespace ddp::profiling
