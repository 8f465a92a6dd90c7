#include <ddp/profiler.h>

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <ddp/distributed_data_parallel.h>
#include <ddp/reduction_stats.h>
#include <torch/torch.h>

#include "support/catch.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"
#include "training/profiler/trace_file.h"

namespace ddp {
namespace {

using namespace testing;

void work() { at::ones({3}).add(1); }

int64_t calls(const Profiler& profiler, const std::string& name) {
  const auto averages = profiler.key_averages();
  const auto* entry = averages.find(name);
  return entry == nullptr ? 0 : entry->count;
}

// Returns the number after `key`, after the first `name` from `from` on.
double number_after(
    const std::string& text, const std::string& name, const std::string& key, size_t from = 0) {
  const auto at = text.find(name, from);
  const auto number = at == std::string::npos ? at : text.find(key, at);
  if (number == std::string::npos) throw std::runtime_error(name + " has no " + key);
  return std::stod(text.substr(number + key.size(), 40));
}

std::string error_in_other_thread(const std::function<void()>& body) {
  std::string error;
  std::thread([&] { error = error_of<c10::Error>(body); }).join();
  return error;
}

}  // namespace

TEST_CASE("a plain profiler records until it stops", "[pure][profiler]") {
  int ready = 0;
  int64_t adds = 0;
  Profiler profiler(ProfilerOptions().on_trace_ready([&](Profiler& self) {
    ++ready;
    adds = calls(self, "aten::add");
  }));
  for (int i = 0; i < 3; ++i) {
    const RecordFunctionGuard range("mine");
    work();
    profiler.step();
  }
  CHECK(ready == 0);
  profiler.stop();
  profiler.stop();
  CHECK(ready == 1);
  CHECK(adds == 3);
  CHECK(calls(profiler, "mine") == 3);
  CHECK(calls(profiler, "ProfilerStep*") == 0);
  work();
  profiler.start();
  work();
  profiler.stop();
  CHECK(ready == 2);
  CHECK(adds == 1);
}

TEST_CASE("a schedule records its active steps, cycle by cycle", "[pure][profiler]") {
  std::vector<int64_t> ready_at;
  std::vector<int64_t> adds;
  std::vector<int64_t> steps;
  {
    Profiler profiler(
        ProfilerOptions().wait(1).warmup(1).active(2).repeat(3).on_trace_ready([&](Profiler& self) {
          ready_at.push_back(self.step_num());
          adds.push_back(calls(self, "aten::add"));
          steps.push_back(calls(self, "ProfilerStep*"));
        }));
    for (int i = 0; i < 11; ++i) {
      for (int call = 0; call <= i; ++call) work();  // steps differ
      profiler.step();
    }
  }
  // The last cycle has one whole step and the beginning of another.
  CHECK(ready_at == std::vector<int64_t>{4, 8, 11});
  CHECK(adds == std::vector<int64_t>{7, 15, 11});
  CHECK(steps == std::vector<int64_t>{2, 2, 2});
}

TEST_CASE("a profiler that ends during warmup has no trace", "[pure][profiler]") {
  int ready = 0;
  for (int i = 0; i < 2; ++i) {
    Profiler profiler(
        ProfilerOptions().warmup(5).active(1).on_trace_ready([&](Profiler&) { ++ready; }));
    profiler.step();
  }
  CHECK(ready == 0);
  Profiler after;
  work();
  after.stop();
  CHECK(calls(after, "aten::add") == 1);
}

TEST_CASE("an exception in the loop stops the profiler", "[pure][profiler]") {
  int ready = 0;
  const auto train = [&] {
    Profiler profiler(ProfilerOptions().on_trace_ready([&](Profiler&) {
      ++ready;
      throw std::runtime_error("the disk is full");
    }));
    work();
    throw std::runtime_error("loss is nan");
  };
  Warnings warnings;
  for (int i = 0; i < 2; ++i) CHECK(error_of<std::runtime_error>(train) == "loss is nan");
  CHECK(ready == 2);
  CHECK(warnings.count("the disk is full") == 2);
}

TEST_CASE("an exception of on_trace_ready leaves the schedule unchanged", "[pure][profiler]") {
  int ready = 0;
  Profiler profiler(ProfilerOptions().active(1).warmup(1).on_trace_ready([&](Profiler&) {
    if (++ready == 1) throw std::runtime_error("no");
  }));
  int errors = 0;
  for (int i = 0; i < 6; ++i) {
    work();
    errors += error_of<std::runtime_error>([&] { profiler.step(); }) == "no";
  }
  CHECK(errors == 1);
  CHECK(ready == 3);
  CHECK(calls(profiler, "aten::add") == 1);
}

TEST_CASE("a process records one thing at a time", "[pure][profiler][errors]") {
  const std::string expected = "expected no other recording in this process";
  Profiler first;
  CHECK_THAT(error_of<c10::Error>([] { Profiler second; }), ContainsText(expected));
  CHECK_THAT(error_in_other_thread([] { Profiler second; }), ContainsText(expected));
  Profiler later(ProfilerOptions().wait(1).active(1));
  CHECK_THAT(error_of<c10::Error>([&] { later.step(); }), ContainsText(expected));
  later.step();  // the cycle that could not begin is left out
  first.stop();
  later.step();
  work();
  later.step();
  CHECK(calls(later, "aten::add") == 1);
}

TEST_CASE("a profiler records the thread that made it", "[pure][profiler][errors]") {
  Profiler profiler;
  CHECK_THAT(
      error_in_other_thread([&] { profiler.step(); }),
      ContainsText("expected step() on the thread that started it, got it on another"));
  CHECK_THAT(error_in_other_thread([&] { profiler.stop(); }), ContainsText("expected stop()"));
  std::thread(work).join();
  work();
  profiler.stop();
  CHECK(calls(profiler, "aten::add") == 1);
  std::string error = "none";
  std::thread([&] {
    error = error_of([] {
      Profiler other(ProfilerOptions().warmup(1).active(1));
      for (int i = 0; i < 4; ++i) {
        work();
        other.step();
      }
      TORCH_CHECK(calls(other, "aten::add") == 1);
    });
  }).join();
  CHECK(error.empty());
}

TEST_CASE("calls at the wrong time are errors", "[pure][profiler][errors]") {
  TemporaryFolder folder;
  std::string error;
  Profiler profiler(ProfilerOptions().on_trace_ready([&](Profiler& self) {
    error += error_of<c10::Error>([&] { self.step(); });
    error += error_of<c10::Error>([&] { self.start(); });
  }));
  CHECK_THAT(
      error_of<c10::Error>([&] { profiler.start(); }),
      ContainsText("expected start() after stop()"));
  CHECK_THAT(
      error_of<c10::Error>([&] { profiler.export_chrome_trace(folder.file("a.json")); }),
      ContainsText("expected a recording that ended, for export_chrome_trace, got none in step 0, "
                   "whose action is RECORD"));
  CHECK_THAT(
      error_of<c10::Error>([&] { profiler.key_averages(); }), ContainsText("for key_averages"));
  profiler.stop();
  CHECK_THAT(error, ContainsText("expected step()") && ContainsText("expected start()"));
  CHECK_THAT(
      error_of<c10::Error>([&] { profiler.step(); }),
      ContainsText("expected step() before stop()"));
  CHECK_THROWS_AS(Profiler(ProfilerOptions().active(0)), c10::ValueError);
}

TEST_CASE(
    "ranks that write a trace to one path at a time leave one that is whole", "[pure][profiler]") {
  TemporaryFolder folder;
  const auto path = folder.file("trace.json");
  const auto write = [](const std::string& to, const std::string& text) {
    std::ofstream(to) << text;
  };
  ddp::profiling::write_trace(path, [&](const std::string& mine) {
    write(mine, "{\"rank\": 0");
    ddp::profiling::write_trace(
        path, [&](const std::string& theirs) { write(theirs, "{\"rank\": 1}"); });
    CHECK(read_bytes(path) == "{\"rank\": 1}");
    std::ofstream(mine, std::ios::app) << "}";
  });
  CHECK(read_bytes(path) == "{\"rank\": 0}");
}

TEST_CASE("a trace is written to every valid path, more than once", "[pure][profiler][errors]") {
  TemporaryFolder folder;
  Profiler profiler(ProfilerOptions().record_shapes(true).profile_memory(true));
  work();
  profiler.stop();
  const auto error = [&](const std::string& path) {
    return error_of<c10::Error>([&] { profiler.export_chrome_trace(path); });
  };
  CHECK_THAT(error(folder.file("a.json.gz")), ContainsText("does not end with .gz"));
  CHECK_THAT(
      error(folder.file("none/a.json")), ContainsText("expected the folder of the trace") &&
                                             ContainsText("none/a.json, got none. Make it first."));
  CHECK_THAT(error(folder.path()), ContainsText("which is none. Name a file."));
  CHECK_THAT(error("/dev/null"), ContainsText("which is none. Name a file."));
  // None of these errors lost the recording.
  const auto first = folder.write("first.json", "what was there");
  CHECK(error(first) == "");
  const auto text = read_bytes(first);
  CHECK_THAT(text, ContainsText("\"aten::add\"") && ContainsText("\"profile_memory\": 1"));
  CHECK_THAT(text, !ContainsText("what was there"));
  CHECK(error(folder.file("second.json")) == "");
  CHECK(read_bytes(folder.file("second.json")) == text);
  remove_all(first);
  CHECK_THAT(error(folder.file("third.json")), ContainsText("got no such file"));
  CHECK_THAT(profiler.key_averages(true).table(), ContainsText("[[3], []"));
}

TEST_CASE("TensorBoard finds a trace of each cycle", "[pure][profiler]") {
  TemporaryFolder folder;
  const auto log = folder.file("a/b");
  {
    Profiler profiler(
        ProfilerOptions().active(1).repeat(2).on_trace_ready(tensorboard_trace_handler(log)));
    for (int i = 0; i < 4; ++i) {
      work();
      profiler.step();
    }
  }
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  const auto worker = c10::str(host, '_', getpid(), '.');
  const auto names = names_in(log);
  CHECK(names.size() == 2);
  for (const auto& name : names) {
    CHECK(name.rfind(worker, 0) == 0);
    CHECK_THAT(name, Catch::Matchers::EndsWith(".pt.trace.json"));
    CHECK_THAT(read_bytes(log + "/" + name), ContainsText("aten::add"));
  }
}

TEST_CASE("a range has no effect while nothing records", "[pure][profiler]") {
  Profiler profiler(ProfilerOptions().wait(1).active(1));
  { const RecordFunctionGuard early("early"); }
  profiler.step();
  { const RecordFunctionGuard late("late"); }
  profiler.step();
  CHECK(calls(profiler, "early") == 0);
  CHECK(calls(profiler, "late") == 1);
  const auto averages = profiler.key_averages();
  CHECK(averages.find("late")->is_user_annotation);
}

TEST_CASE("a bucket's launch has the same time in both traces", "[ranks][profiler]") {
  TemporaryFolder folder;
  const auto trace = folder.file("trace.json");
  const auto buckets = folder.file("buckets.json");
  run_ranks<int>(2, [&](const Rank& self) {
    torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::Linear(64, 4));
    DistributedDataParallel<torch::nn::Sequential> model(
        net, DistributedDataParallelOptions().process_group(self.group).stats_every(1));
    // The threads of both ranks belong to one process, which can record only one of them.
    std::unique_ptr<Profiler> profiler;
    if (self.rank == 0) {
      profiler = std::make_unique<Profiler>(ProfilerOptions().wait(2).active(1).repeat(1));
    }
    for (int i = 0; i < 3; ++i) {
      model->forward(torch::ones({16, 64})).sum().backward();
      if (profiler) profiler->step();
    }
    auto stats = all_gather_stats(model->stats(), self.group);
    auto& steps = stats.steps;
    steps.erase(
        std::remove_if(steps.begin(), steps.end(), [](const auto& s) { return s.step != 3; }),
        steps.end());
    if (self.rank == 0) {
      profiler->export_chrome_trace(trace);
      write_trace(buckets, stats);
    }
    return 0;
  });
  const auto recorded = read_bytes(trace);
  const auto reduced = read_bytes(buckets);
  const auto base = [](const std::string& text) {
    return number_after(text, "baseTimeNanoseconds", ":");
  };
  CHECK(base(recorded) == base(reduced));
  CHECK(base(recorded) > 1e18);
  const auto rank_0 = R"("name":"bucket 0","pid":0)";
  const double launched = number_after(reduced, rank_0, R"("ts":)");
  const auto launch = R"("name": "ddp::launch_bucket 0")";
  const double begin = number_after(recorded, launch, R"("ts": )");
  const double end = begin + number_after(recorded, launch, R"("dur": )");
  CAPTURE(launched - begin, end - launched);
  CHECK(launched > begin - 1000);
  CHECK(launched < end + 1000);
  // Both times lie within the same backward.
  const double backward = number_after(reduced, R"("name":"backward 3","pid":0)", R"("ts":)");
  CHECK(backward < begin + 1000);
}

}  // namespace ddp
