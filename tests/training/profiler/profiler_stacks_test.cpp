// Stacks of operators in recordings.
#include <ddp/profiler.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ddp/internal/text.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"
#include "training/profiler/events.h"
#include "training/profiler/stacks/frames.h"
#include "training/profiler/stacks/program_output.h"
#include "training/profiler/stacks/stack_lines.h"

// Hidden in an executable: only its table of symbols has them, and no dynamic loader.
extern "C" {
[[gnu::noinline]] void ddp_test_multiplies(at::Tensor& x);
[[gnu::noinline]] void ddp_test_multiplies_too(at::Tensor& x);
[[gnu::noinline]] void ddp_test_runs_backward(at::Tensor& x);
}

void ddp_test_multiplies(at::Tensor& x) {
  for (int i = 0; i < 20; ++i) x = at::matmul(x, x);
}
void ddp_test_multiplies_too(at::Tensor& x) {
  for (int i = 0; i < 20; ++i) x = at::matmul(x, x);
}
TORCH_LIBRARY(ddp_test_stacks, library) {
  library.def("multiply(Tensor x) -> Tensor", [](const at::Tensor& x) {
    auto y = x.clone();
    ddp_test_multiplies_too(y);
    return y;
  });
}
void ddp_test_runs_backward(at::Tensor& x) { x.sum().backward(); }

namespace ddp {
namespace {

using namespace testing;
using profiling::Frame;
using profiling::frames_of;
using profiling::FunctionEvent;
using profiling::NameSource;
using profiling::output_of;

at::Tensor square_matrix() { return at::full({128, 128}, 0.001); }

ProfilerOptions stacks() { return ProfilerOptions().with_stack(true); }

std::string lines_of_stacks(const std::function<void()>& body) {
  TemporaryFolder folder;
  Profiler profiler(stacks());
  body();
  profiler.stop();
  const auto path = folder.write("stacks.txt", "what was there");
  profiler.export_stacks(path);
  return read_bytes(path);
}

// Returns the lines that have all the words.
std::vector<std::string> lines_with(
    const std::string& text, const std::vector<std::string>& words) {
  std::vector<std::string> found;
  for (const auto& line : lines_of(text)) {
    bool has_all = true;
    for (const auto& word : words) has_all &= line.find(word) != std::string::npos;
    if (has_all) found.push_back(line);
  }
  return found;
}

double number_at_end(const std::string& line) { return std::stod(line.substr(line.rfind(' '))); }

std::vector<int64_t> debug_handles(const std::function<void()>& body) {
  static thread_local std::vector<int64_t> handles;
  handles.clear();
  const auto callback = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction&) { return std::unique_ptr<at::ObserverContext>(); },
      [](const at::RecordFunction& call, at::ObserverContext*) {
        handles.push_back(call.debugHandle());
      }));
  body();
  at::removeCallback(callback);
  return handles;
}

FunctionEvent event(const std::string& name, double start_us, double end_us) {
  FunctionEvent made;
  made.name = name;
  made.thread = 1;
  made.start_us = start_us;
  made.end_us = end_us;
  return made;
}

std::chrono::steady_clock::time_point in_a_minute() {
  return std::chrono::steady_clock::now() + std::chrono::minutes(1);
}

}  // namespace

TEST_CASE("an exported stack names the function that calls an operator", "[pure][profiler]") {
  auto x = square_matrix();
  const auto text = lines_of_stacks([&] { ddp_test_multiplies(x); });
  CAPTURE(text);
  const auto lines = lines_with(text, {"ddp_test_multiplies", ";aten::mm "});
  REQUIRE(lines.size() == 1);  // of 20 calls
  CHECK(number_at_end(lines[0]) > 0);
  CHECK(lines[0].find("main") < lines[0].find("ddp_test_multiplies"));
  for (const char* machinery : {"at::_ops", "c10::", "torch::", "_start", "profiling::"}) {
    CHECK(lines_with(text, {machinery}).empty());
  }
}

TEST_CASE("a trace has the stacks of its operators", "[pure][profiler]") {
  TemporaryFolder folder;
  Profiler profiler(stacks());
  auto x = square_matrix();
  ddp_test_multiplies(x);
  profiler.stop();
  profiler.export_chrome_trace(folder.file("trace.json"));
  const auto text = read_bytes(folder.file("trace.json"));
  CHECK_FALSE(lines_with(text, {"\"Call stack\": ", "ddp_test_multiplies"}).empty());
  CHECK_THAT(text, ContainsText("\"with_stack\": 1"));
}

TEST_CASE("an operator has a stack only while a profiler records them", "[pure][profiler]") {
  const auto add = [] { at::ones({3}).add(1); };
  Profiler without;
  const auto none = debug_handles(add);
  without.stop();
  Profiler with(stacks());
  const auto some = debug_handles(add);
  with.stop();
  const auto after = debug_handles(add);
  REQUIRE(none.size() == some.size());
  for (size_t i = 0; i < none.size(); ++i) {
    CHECK(none[i] == -1);
    CHECK(some[i] >= 0);
    CHECK(after[i] == -1);
  }
}

TEST_CASE("a backward pass has the stack of the forward pass", "[pure][profiler]") {
  const auto text = lines_of_stacks([] {
    auto x = square_matrix().requires_grad_();
    ddp_test_multiplies(x);
    ddp_test_runs_backward(x);
  });
  CAPTURE(text);
  CHECK(lines_with(text, {"ddp_test_multiplies", ";MmBackward0;aten::mm "}).size() == 1);
  CHECK(lines_with(text, {"ddp_test_runs_backward", ";MmBackward0"}).empty());
  CHECK_FALSE(lines_with(text, {"ddp_test_runs_backward"}).empty());
}

TEST_CASE("what the program's own operator calls has its functions", "[pure][profiler]") {
  const auto multiply = c10::Dispatcher::singleton()
                            .findSchemaOrThrow("ddp_test_stacks::multiply", "")
                            .typed<at::Tensor(const at::Tensor&)>();
  const auto text = lines_of_stacks([&] { multiply.call(square_matrix()); });
  CAPTURE(text);
  CHECK_FALSE(lines_with(text, {";ddp_test_stacks::multiply "}).empty());
  CHECK(lines_with(text, {"ddp_test_multiplies_too", ";aten::mm "}).size() == 1);
}

TEST_CASE("stacks are those of the thread that records", "[pure][profiler]") {
  std::string there;
  const auto here = lines_of_stacks([&] {
    auto x = square_matrix();
    std::thread other([] {
      auto y = square_matrix();
      ddp_test_multiplies_too(y);
    });
    ddp_test_multiplies(x);
    other.join();
  });
  std::thread([&] {
    there = lines_of_stacks([] {
      auto x = square_matrix();
      ddp_test_multiplies_too(x);
    });
  }).join();
  CHECK_FALSE(lines_with(here, {"ddp_test_multiplies", "aten::mm"}).empty());
  CHECK(lines_with(here, {"ddp_test_multiplies_too"}).empty());
  CHECK_FALSE(lines_with(there, {"ddp_test_multiplies_too", "aten::mm"}).empty());
}

TEST_CASE("stacks that cannot be exported are errors", "[pure][profiler][errors]") {
  TemporaryFolder folder;
  const auto error = [](const Profiler& profiler, const std::string& path,
                        const std::string& metric = "self_cpu_time_total") {
    return error_of<c10::Error>([&] { profiler.export_stacks(path, metric); });
  };
  const auto path = folder.file("stacks.txt");
  Profiler without;
  without.stop();
  CHECK_THAT(error(without, path), ContainsText("expected with_stack(true) for export_stacks"));
  Profiler profiler(stacks());
  CHECK_THAT(error(profiler, path), ContainsText("expected a recording that ended"));
  profiler.stop();
  CHECK_THAT(
      error(profiler, folder.file("none/stacks.txt")),
      ContainsText("expected the folder of the file of stacks") &&
          ContainsText("none/stacks.txt, got none. Make it first."));
  CHECK_THAT(error(profiler, folder.path()), ContainsText("which is none. Name a file."));
  CHECK_THAT(
      error(profiler, path, "cpu_time"),
      ContainsText("self_cpu_time_total, ") && ContainsText("got \"cpu_time\""));
  CHECK(names_in(folder.path()).empty());
  CHECK(error(profiler, path, "self_cuda_time_total") == "");
  CHECK(read_bytes(path) == "");  // no kernels
}

TEST_CASE("a line has the sum of equal stacks, in whole microseconds", "[pure][profiler]") {
  std::vector<FunctionEvent> events = {event("linear", 0, 10), event("mm", 1, 4.5),
                                       event("mm", 5, 8.75),   event("t", 9, 9.5),
                                       event("waits", 20, 90), event("kernel", 100, 900)};
  for (auto& made : events) made.stack = {"forward(a; b)", "main"};
  events[1].kernels_us = {300, 4};
  events[4].is_async = true;
  events[5].device_type = c10::DeviceType::CUDA;
  profiling::build_tree(events);
  CHECK(
      profiling::stack_lines(events, "self_cpu_time_total") ==
      "main;forward(a__b);linear 2\nmain;forward(a__b);mm 7\n");
  CHECK(profiling::stack_lines(events, "self_cuda_time_total") == "main;forward(a__b);mm 304\n");
}

TEST_CASE("events below a node have the stack of the call that made it", "[pure][profiler]") {
  std::vector<FunctionEvent> events = {
      event("aten::mul", 0, 5), event("aten::mul", 1, 3), event("MulBackward0", 10, 20),
      event("aten::mul", 11, 12), event("AccumulateGrad", 30, 40)};
  for (auto& made : events) made.stack = {"backward", "main"};
  events[0].stack = {"forward", "main"};
  events[1].stack = {"kernel", "forward", "main"};
  events[0].sequence_number = events[1].sequence_number = events[2].sequence_number = 7;
  events[2].is_backward = events[4].is_backward = true;
  events[2].forward_thread = 1;
  events[1].name = "aten::mm";
  profiling::build_tree(events);
  profiling::take_stacks_of_forward(events);
  CHECK(
      profiling::stack_lines(events, "self_cpu_time_total") ==
      "main;backward;AccumulateGrad 10\n"
      "main;forward;MulBackward0 9\n"
      "main;forward;MulBackward0;aten::mul 1\n"
      "main;forward;aten::mul 3\n"
      "main;forward;kernel;aten::mm 2\n");
}

TEST_CASE("addr2line's answers are read", "[pure][profiler]") {
  const auto answers = profiling::parse_addr2line(
      "0x0000000000001139\n"
      "_Z5innerv\n"
      "/a b/train.cpp:12 (discriminator 3)\n"
      "main\n"
      "/a b/train.cpp:20\n"
      "0x2000\n"
      "_Z5trainv\n"
      "??:?\n"
      "0x3000\n"
      "??\n"
      "??:0\n"
      "0x4000\n"
      "known\n"
      "C:file.cpp:?\n");
  REQUIRE(answers.size() == 4);
  REQUIRE(answers[0].size() == 2);
  CHECK(answers[0][0].function == "_Z5innerv");
  CHECK(answers[0][0].file == "/a b/train.cpp");
  CHECK(answers[0][0].line == "12");
  CHECK(answers[0][1].line == "20");
  REQUIRE(answers[1].size() == 1);
  CHECK(answers[1][0].file == "");
  CHECK(answers[2][0].function == "??");
  CHECK(answers[3][0].file == "");
  CHECK(profiling::parse_addr2line("").empty());
}

TEST_CASE("frames of LibTorch and of compilers are left out", "[pure][profiler]") {
  for (const char* name :
       {"_ZN2at6matmulERKNS_6TensorES2_", "_ZNK2at6Tensor3addEv", "_ZN3c1010DispatcherC1Ev",
        "_ZN5torch2nn14SequentialImpl7forwardIN2at6TensorEJRKS4_EEET_DpOT0_", "_start",
        "_ZNSt6vectorIiE9push_backEv", "_ZSt8__invokeIRFvvEEvv", "_ZNSaIcED2Ev",
        "_ZZN2at8internal6invokeEvENKUlvE_clEv", "_ZN3ddp8Profiler4stepEv"}) {
    CAPTURE(name);
    CHECK(profiling::is_machinery(name));
  }
  for (const char* name :
       {"main", "_Z5trainRN2at6TensorE", "_ZZ4mainENKUlvE_clEv", "_ZN4data5BatchC1Ev",
        "_ZN3ddp23DistributedDataParallelC1Ev", "_ZL4stepv", "torch_step", "_ZN3net7forwardEv"}) {
    CAPTURE(name);
    CHECK_FALSE(profiling::is_machinery(name));
  }
  CHECK(profiling::is_runtime("/opt/libtorch/lib/libtorch_cpu.so"));
  CHECK(profiling::is_runtime("/lib/x86_64-linux-gnu/libc.so.6"));
  CHECK_FALSE(profiling::is_runtime(""));
  CHECK_FALSE(profiling::is_runtime("/opt/libtorch/lib/libddp.so.0.1"));
}

TEST_CASE("without addr2line a warning says what is missing", "[pure][profiler][errors]") {
  auto* const known = reinterpret_cast<void*>(&ddp_test_multiplies);
  const auto name = [&](const NameSource& source) {
    auto* const within = static_cast<char*>(known) + 1;
    return frames_of({{within}, {}, {within, within}}, source);
  };
  const auto found = name({});
  REQUIRE(found.size() == 3);
  REQUIRE(found[0].size() == 1);
  CHECK_THAT(found[0][0], Catch::Matchers::EndsWith("ddp_test_multiplies"));
  CHECK(found[1].empty());
  CHECK(found[2].size() == 2);
  Warnings warnings;
  const auto unnamed = name({"no-such-addr2line", std::chrono::minutes(1)});
  REQUIRE(unnamed[0].size() == 1);
  CHECK_THAT(unnamed[0][0], ContainsText("+0x"));
  CHECK(warnings.count("expected no-such-addr2line to name the functions in /") == 1);
  CHECK(warnings.count("No such file or directory. Stacks have no lines") == 1);
  name({"echo", std::chrono::minutes(1)});
  CHECK(warnings.count("got 0 answers to 1 addresses") == 1);
}

TEST_CASE("a program's output ends in bounded time", "[pure][profiler][errors]") {
  CHECK(output_of({"echo", "a", "b"}, in_a_minute()).text == "a b\n");
  CHECK(output_of({"echo"}, in_a_minute()).error == "");
  CHECK_THAT(output_of({"false"}, in_a_minute()).error, ContainsText("it ended by"));
  const auto late = output_of({"sleep", "10000"}, std::chrono::steady_clock::now());
  CHECK(late.error == "no answer in time");
}

}  // namespace ddp
