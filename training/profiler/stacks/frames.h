// Names of the functions that return addresses are in.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "profiler/stacks/capture.h"

namespace ddp::profiling {

/// The program that finds them, addr2line of binutils, and the time for all its runs.
struct NameSource {
  std::string program = "addr2line";
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
};

/// Returns each stack's frames, the innermost first: "file.cpp(12): train(at::Tensor const&)", or
/// only the function in code that was compiled without -g. Functions that were inlined have frames
/// where there is -g. Leaves out those of LibTorch, the standard library and this profiler.
///
/// Where the program does not run, a warning names the cause, and the frames have names of exported
/// functions, or else "file+0x123".
std::vector<std::vector<std::string>> frames_of(
    const std::vector<Addresses>& stacks, const NameSource& source = {});

/// A function that addr2line named. Pure, as what follows.
struct Frame {
  std::string function;  // mangled; "??" where it is unknown
  std::string file;      // "" where it is unknown
  std::string line;
};

/// Reads what `addr2line -a -i -f` prints: the frames of each address, the innermost first.
std::vector<std::vector<Frame>> parse_addr2line(const std::string& text);

/// Whether a function by its mangled name is LibTorch's, the standard library's or this profiler's.
bool is_machinery(const std::string& function);

/// Whether an object file is LibTorch, or a library of the C or C++ compiler.
bool is_runtime(const std::string& object);

}  // namespace ddp::profiling
