// The program that profiler.py compares with Python's profiler.
//   profiler_world record   an MLP's step with shapes and memory: LibTorch's events, one a line
//   profiler_world tables   reads such lines, and prints tables of them
//   profiler_world counts   five of the steps under a schedule: how often each name was called
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <ddp/profiler.h>
#include <torch/torch.h>

#include "training/profiler/key_averages.h"
#include "training/profiler/recording.h"

namespace ddp_profiler_world {

namespace {

using namespace ddp::profiling;

struct Mlp {
  at::Tensor w1 = torch::full({16, 8}, 0.1, torch::requires_grad());
  at::Tensor w2 = torch::full({4, 16}, 0.2, torch::requires_grad());
  at::Tensor bias = torch::zeros({4}, torch::requires_grad());

  void step() const {
    at::Tensor loss;
    {
      const ddp::RecordFunctionGuard range("forward");
      const auto hidden = at::relu(at::mm(at::ones({32, 8}), w1.t()));
      loss = at::addmm(bias, hidden, w2.t()).pow(2).sum();
    }
    const ddp::RecordFunctionGuard range("backward");
    loss.backward(at::ones({}));  // without an argument, LibTorch makes another call than Python
    at::NoGradGuard no_grad;
    for (const auto& weight : {w1, w2, bias}) weight.add_(weight.grad(), -1e-3);
  }
};

void print(const RawEvents& recorded) {
  std::cout << recorded.start_ns << '\n';
  for (const auto& event : recorded.events) {
    std::cout << event.name << '\t' << event.start_ns << '\t' << event.end_ns << '\t'
              << event.start_thread << '\t' << event.end_thread << '\t' << event.correlation_id
              << '\t' << event.linked_correlation_id << '\t' << event.bytes << '\t'
              << int(event.device_type) << '\t' << event.is_async << '\t' << event.is_hidden << '\t'
              << event.is_user_annotation << '\t' << text_of_shapes(event.shapes) << '\n';
  }
}

// [[4, 8], []]
std::vector<std::vector<int64_t>> read_shapes(const std::string& text) {
  std::vector<std::vector<int64_t>> shapes;
  int depth = 0;
  for (const char* at = text.c_str(); *at != 0; ++at) {
    if (*at == '[' && ++depth == 2) shapes.emplace_back();
    if (*at == ']') --depth;
    if (*at < '0' || *at > '9') continue;
    char* end = nullptr;
    shapes.back().push_back(std::strtoll(at, &end, 10));
    at = end - 1;
  }
  return shapes;
}

RawEvents read() {
  RawEvents recorded;
  std::string line;
  std::getline(std::cin, line);
  recorded.start_ns = std::stoll(line);
  while (std::getline(std::cin, line)) {
    std::istringstream fields(line);
    RawEvent event;
    std::getline(fields, event.name, '\t');
    int device = 0;
    fields >> event.start_ns >> event.end_ns >> event.start_thread >> event.end_thread >>
        event.correlation_id >> event.linked_correlation_id >> event.bytes >> device >>
        event.is_async >> event.is_hidden >> event.is_user_annotation >> std::ws;
    event.device_type = static_cast<c10::DeviceType>(device);
    std::string shapes;
    std::getline(fields, shapes);
    event.shapes = read_shapes(shapes);
    recorded.events.push_back(event);
  }
  return recorded;
}

void print_tables(const RawEvents& recorded) {
  auto events = function_events(recorded);
  build_tree(events);
  for (const char* device : {"", "CUDA"}) {
    for (const bool shapes : {false, true}) {
      for (const bool memory : {false, true}) {
        const auto averages = average_by_key(events, shapes, memory, device);
        for (const char* key :
             {"", "cpu_time_total", "self_cpu_time_total", "cpu_time", "count", "cpu_memory_usage",
              "self_cpu_memory_usage", "cuda_time_total", "self_cuda_memory_usage"}) {
          std::cout << "== " << device << ' ' << shapes << memory << ' ' << key << '\n'
                    << averages.table(key, memory ? -1 : 5);
        }
      }
    }
  }
}

void record() {
  const Mlp net;
  net.step();
  Recording recording({true, true});
  recording.start();
  net.step();
  net.step();
  const auto kept = at::zeros({1000});
  print(recording.stop()->events());
}

void count() {
  const Mlp net;
  int ready = 0;
  ddp::Profiler profiler(
      ddp::ProfilerOptions().wait(1).warmup(1).active(2).repeat(1).on_trace_ready(
          [&](ddp::Profiler&) { ++ready; }));
  for (int i = 0; i < 5; ++i) {
    net.step();
    profiler.step();
  }
  for (const auto& entry : profiler.key_averages().entries) {
    std::cout << entry.name << '\t' << entry.count << '\n';
  }
  std::cout << "ready\t" << ready << '\n';
}

// LibTorch cannot stop the recording there, and crashes in exit() because it still records.
[[noreturn]] void destroy_elsewhere() {
  auto profiler = std::make_unique<ddp::Profiler>(ddp::ProfilerOptions().active(5));
  profiler->step();
  std::thread([&] { profiler.reset(); }).join();
  at::ones({3});
  try {
    const ddp::Profiler second;
  } catch (const c10::Error& error) {
    std::cout << error.msg() << std::endl;
  }
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  torch::set_num_threads(1);
  if (what == "record") record();
  if (what == "tables") print_tables(read());
  if (what == "counts") count();
  if (what == "elsewhere") destroy_elsewhere();
  return what.empty() ? 1 : 0;
}

}  // namespace ddp_profiler_world
