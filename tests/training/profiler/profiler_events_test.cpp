// The profiler's results for constructed events.
#include "training/profiler/events.h"

#include <string>

#include <torch/torch.h>

#include "support/catch.h"
#include "support/error_of.h"
#include "training/profiler/key_averages.h"

namespace ddp::profiling {
namespace {

RawEvent call(const std::string& name, int64_t start_us, int64_t end_us, uint64_t thread = 1) {
  static uint64_t last_id = 0;
  RawEvent event;
  event.name = name;
  event.start_ns = start_us * 1000;
  event.end_ns = end_us * 1000;
  event.start_thread = event.end_thread = thread;
  event.correlation_id = ++last_id;
  return event;
}

RawEvent memory(int64_t at_us, int64_t bytes) {
  auto event = call("[memory]", at_us, at_us);
  event.bytes = bytes;
  return event;
}

KeyAverages averages_of(
    std::vector<RawEvent> recorded, bool shapes = false, const std::string& device = "") {
  auto events = function_events({0, std::move(recorded)});
  build_tree(events);
  return average_by_key(events, shapes, true, device);
}

}  // namespace

TEST_CASE("self time is the time less that of direct children on the thread", "[pure][profiler]") {
  const auto averages = averages_of(
      {call("outer", 0, 100), call("inner", 10, 40), call("leaf", 20, 30), call("inner", 50, 60),
       call("elsewhere", 10, 90, 2), call("across", 95, 105)});
  CHECK(averages.find("outer")->self_cpu_time_total == 60);
  CHECK(averages.find("outer")->cpu_time_total == 100);
  CHECK(averages.find("inner")->count == 2);
  CHECK(averages.find("inner")->cpu_time_total == 40);
  CHECK(averages.find("inner")->self_cpu_time_total == 30);
  CHECK(averages.find("inner")->cpu_time() == 20);
  CHECK(averages.find("elsewhere")->self_cpu_time_total == 80);
  CHECK(averages.find("across")->self_cpu_time_total == 10);  // overlaps: no parent
  CHECK(averages.find("nowhere") == nullptr);
}

TEST_CASE("a call that only calls its own name counts once", "[pure][profiler]") {
  const auto averages = averages_of(
      {call("sum", 0, 100), call("sum", 10, 90), call("fill", 20, 30),  // merged
       call("to", 200, 300), call("to", 210, 220), call("copy", 230, 240)});
  CHECK(averages.find("sum")->count == 1);
  CHECK(averages.find("sum")->self_cpu_time_total == 90);
  CHECK(averages.find("to")->count == 2);
}

TEST_CASE("memory belongs to the calls around it", "[pure][profiler]") {
  const auto averages = averages_of(
      {call("outer", 0, 100), call("inner", 10, 40), memory(20, 512), memory(50, -128),
       memory(200, 64)});
  CHECK(averages.find("outer")->cpu_memory_usage == 384);
  CHECK(averages.find("outer")->self_cpu_memory_usage == -128);
  CHECK(averages.find("inner")->cpu_memory_usage == 512);
  CHECK(averages.find("[memory]")->count == 1);
  CHECK(averages.find("[memory]")->cpu_memory_usage == 64);
  CHECK_THAT(averages.table(), ContainsText("CPU Mem") && ContainsText("384 B"));
}

TEST_CASE("kernels count for the calls that launched them", "[pure][profiler]") {
  auto mm = call("mm", 0, 10);
  auto linear = call("linear", 0, 20);
  auto kernel = call("gemm", 30, 80, 7);
  kernel.device_type = c10::DeviceType::CUDA;
  kernel.linked_correlation_id = mm.correlation_id;
  const auto averages = averages_of({linear, mm, kernel}, false, "CUDA");
  CHECK(averages.find("mm")->self_device_time_total == 50);
  CHECK(averages.find("linear")->device_time_total == 50);
  CHECK(averages.find("linear")->self_device_time_total == 0);
  CHECK(averages.find("gemm")->self_device_time_total == 50);
  CHECK(averages.find("gemm")->cpu_time_total == 0);
  CHECK_THAT(averages.table(), ContainsText("Self CUDA time total: 50.000us"));
}

TEST_CASE("a range that ends on another thread has no self time", "[pure][profiler]") {
  auto sent = call("sent", 0, 50);
  sent.end_thread = 2;
  const auto averages = averages_of({sent, call("within", 10, 20)});
  CHECK(averages.find("sent")->is_async);
  CHECK(averages.find("sent")->self_cpu_time_total == 0);
  CHECK(averages.find("within")->self_cpu_time_total == 10);
}

TEST_CASE("a table has sorted, limited rows", "[pure][profiler]") {
  const auto averages =
      averages_of({call("a", 0, 10), call("b", 20, 50), call("b", 60, 61), call("c", 70, 90)});
  const auto table = averages.table("cpu_time_total", 2);
  CHECK(table.find(" b ") < table.find(" c "));
  CHECK(table.find(" a ") == std::string::npos);
  CHECK_THAT(table, ContainsText("Self CPU time total: 61.000us"));
  const auto by_average = averages.table("cpu_time");
  CHECK(by_average.find(" c ") < by_average.find(" b "));
  CHECK(averages.table("", -1).find(" a ") < averages.table("", -1).find(" b "));
  CHECK(KeyAverages().table().empty());
  CHECK_THAT(
      ddp::testing::error_of<c10::ValueError>([&] { averages.table("speed"); }),
      ContainsText("expected sort_by to be one of count, cpu_memory_usage") &&
          ContainsText("got \"speed\""));
}

TEST_CASE("calls may be grouped by the shapes of their inputs", "[pure][profiler]") {
  auto small = call("mm", 0, 10);
  small.shapes = {{2, 3}, {}};
  auto large = call("mm", 20, 30);
  large.shapes = {{20, 30}, {}};
  CHECK(averages_of({small, large}).entries.size() == 1);
  const auto averages = averages_of({small, large}, true);
  CHECK(averages.entries.size() == 2);
  CHECK_THAT(averages.table(), ContainsText("Input Shapes") && ContainsText("[[20, 30], []]"));
}

}  // namespace ddp::profiling
