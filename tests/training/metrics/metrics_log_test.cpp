// Values of all ranks, and what becomes of them where files and ranks fail.
#include <ddp/metrics_log.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/internal/text.h>
#include <ddp/metrics.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "support/ranks.h"
#include "support/taken_port.h"
#include "support/temporary_folder.h"
#include "support/warnings.h"
#include "training/metrics/average_pace.h"

#include "support/catch.h"

namespace {

std::atomic<int> waits_for_disk{0};

}  // namespace

// In place of the C library's.
extern "C" __attribute__((visibility("default"))) int fsync(int fd) {
  ++waits_for_disk;
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace {

using namespace ddp::testing;
using ddp::Metrics;
using ddp::MetricsOptions;

MetricsOptions options_of(const Rank& self) { return MetricsOptions().group(self.group); }

// The lines of a file of JSON lines without their times.
std::vector<std::string> lines_in(const std::string& path) {
  std::vector<std::string> lines;
  for (auto line : ddp::lines_of(read_bytes(path))) {
    const auto begin = line.find("\"time\":");
    const auto end = line.find("\"name\":");
    lines.push_back(begin == std::string::npos ? line : line.erase(begin, end - begin));
  }
  return lines;
}

std::string line_of(const std::string& name, const std::string& value, int step) {
  return ddp::str("{\"step\":", step, ",\"name\":\"", name, "\",\"value\":", value, "}");
}

/// Lets files of this process have so many bytes at most, as if the disk were full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
};

}  // namespace

TEST_CASE("rank 0 writes the means of all ranks, in their order", "[training][ranks]") {
  const int size = GENERATE(1, 2, 3);
  const int64_t every = GENERATE(0, 1, 2, 100);
  CAPTURE(size, every);
  const TemporaryFolder folder;
  const auto path = folder.file("runs/a/metrics.jsonl");
  const auto problems = run_ranks<std::string>(size, [&](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(path).average_every(every));
    for (int step = 0; step < 3; ++step) {
      metrics.add("loss", self.rank + 10 * step, step);
      metrics.add("loss", self.rank + 10 * step + 0.5, step);  // the same name and step
      metrics.add("a \"b\"", at::full({1, 1}, self.rank, at::kLong), step);
    }
    return metrics.problem();
  });
  CHECK(problems == std::vector<std::string>(static_cast<size_t>(size)));
  const double mean = (size - 1) / 2.0;
  std::vector<std::string> expected;
  for (int step = 0; step < 3; ++step) {
    const auto value = [&](double more) { return ddp::str(mean + 10 * step + more); };
    expected.push_back(line_of("loss", value(0), step));
    expected.push_back(line_of("loss", value(0.5), step));
    expected.push_back(line_of("a \\\"b\\\"", ddp::str(mean), step));
  }
  CHECK(lines_in(path) == expected);
}

TEST_CASE("values are there after flush(), in the calls between after some", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  const auto counts = run_ranks<std::vector<size_t>>(2, [&](const Rank& self) {
    std::vector<size_t> seen;
    Metrics metrics(options_of(self).jsonl(path).average_every(3));
    const auto look = [&] {
      ddp::barrier(self.group);  // another rank's flush() does not wait for rank 0's file
      seen.push_back(lines_in(path).size());
      ddp::barrier(self.group);
    };
    metrics.flush();
    look();
    metrics.add("a", 1, 0);
    metrics.add("a", 1, 1);
    look();
    metrics.flush();
    look();
    for (int step = 2; step < 6; ++step) metrics.add("a", 1, step);
    metrics.flush();
    look();
    return seen;
  });
  for (const auto& seen : counts) CHECK(seen == std::vector<size_t>{0, 0, 2, 6});
}

TEST_CASE("values that are not finite have not finite means", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  run_ranks<int>(2, [&](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(path));
    metrics.add("nan", self.rank == 0 ? NAN : 1, 0);
    metrics.add("infinity", self.rank == 0 ? -INFINITY : 1, 0);
    return 0;
  });
  CHECK(
      lines_in(path) == std::vector<std::string>{
                            line_of("nan", "\"NaN\"", 0), line_of("infinity", "\"-Infinity\"", 0)});
}

TEST_CASE("tensors are read as they are when they are added", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  run_ranks<int>(1, [&](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(path).average_every(100));
    auto loss = torch::full({}, 0.5, torch::requires_grad());
    metrics.add("float", loss * 2, 0);
    auto total = at::full({1}, 3.25, at::kDouble);
    metrics.add("double", total, 0);
    total.add_(1);
    metrics.add("half", at::full({}, 1.5, at::kHalf), 0);
    metrics.add("bool", at::ones({}, at::kBool), 0);
    return 0;
  });
  CHECK(
      lines_in(path) == std::vector<std::string>{
                            line_of("float", "1", 0), line_of("double", "3.25", 0),
                            line_of("half", "1.5", 0), line_of("bool", "1", 0)});
}

TEST_CASE("a file of JSON lines is continued", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  const auto run = [&](int step) {
    return run_ranks<int>(2, [&](const Rank& self) {
      Metrics metrics(options_of(self).jsonl(path));
      metrics.add("a", 1, step);
      return 0;
    });
  };
  run(1);
  const auto first = read_bytes(path);
  folder.write("metrics.jsonl", first + first.substr(0, 20));  // as a power cut leaves it
  run(2);
  folder.write("metrics.jsonl", read_bytes(path) + "{\"by\": \"hand\"}");
  run(3);
  CHECK(
      lines_in(path) ==
      std::vector<std::string>{
          line_of("a", "1", 1), line_of("a", "1", 2), "{\"by\": \"hand\"}", line_of("a", "1", 3)});
}

TEST_CASE("the pace becomes that of a second, and no message has too many", "[training][pure]") {
  ddp::AveragePace pace(0);
  CHECK(pace.adds() == 1);
  const auto then = [&](int64_t adds, double seconds) {
    pace.set(adds, seconds);
    return pace.adds();
  };
  CHECK(then(1, 60) == 1);
  CHECK(then(1, 0.1) == 2);
  CHECK(then(2, 0) == 4);
  for (int i = 0; i < 10; ++i) then(pace.adds(), 0.001);
  CHECK(pace.adds() == 191);
  CHECK(then(0, 0.001) == 191);
  CHECK(then(3, 0.1) == 30);
  CHECK(then(30, 3600) == 1);
  ddp::AveragePace fixed(7);
  fixed.set(100, 0.1);
  CHECK(fixed.adds() == 7);
}

TEST_CASE("ranks that add something else are told so, all of them", "[training][ranks][errors]") {
  using Add = std::function<void(Metrics&, int rank)>;
  const auto [add, message] = GENERATE(table<Add, std::string>({
      {[](Metrics& metrics, int rank) {
         metrics.add("loss", 1, 5);
         metrics.add(rank == 1 ? "accuracy" : "loss", 1, 6);
       },
       "Metrics: expected the same values in the same order on every rank, got \"accuracy\" of "
       "step "
       "6 on rank 1 and \"loss\" of step 6 on ranks 0, 2 of 3. Let every rank make the same calls "
       "in "
       "the same order."},
      {[](Metrics& metrics, int rank) {
         metrics.add(rank == 2 ? "b" : "a", 1, 5);
         metrics.add(rank == 2 ? "a" : "b", 1, 5);
       },
       "got \"a\" of step 5 on ranks 0, 1 and \"b\" of step 5 on rank 2 of 3."},
      {[](Metrics& metrics, int rank) { metrics.add("a", 1, rank == 2 ? 6 : 5), metrics.flush(); },
       "got \"a\" of step 5 on ranks 0, 1 and \"a\" of step 6 on rank 2 of 3."},
      {[](Metrics& metrics, int rank) {
         if (rank != 1) metrics.add("a", 1, 5);
         metrics.flush();
       },
       "got \"a\" of step 5 on ranks 0, 2 and none on rank 1 of 3."},
      {[](Metrics& metrics, int rank) {
         // The ranks are one value apart: the text has the first that differs.
         for (int step = 0; step < 4; ++step) {
           metrics.add("a", 1, step);
           if (rank != 1) metrics.add("b", 1, step);
         }
       },
       "got \"a\" of step 1 on rank 1 and \"b\" of step 0 on ranks 0, 2 of 3."},
  }));
  const TemporaryFolder folder;
  const auto error = error_of_all(3, [&, add = add](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(folder.file("a")).average_every(2));
    const auto thrown = error_of<c10::Error>([&] { add(metrics, self.rank); });
    // The group is not out of step, nor are the metrics.
    TORCH_CHECK(ddp::sum(1, self.group) == 3, "a wrong sum");
    metrics.add("end", 1, 9);
    metrics.flush();
    TORCH_CHECK(false, thrown);
  });
  CHECK_THAT(error, ContainsText(message));
  CHECK(lines_in(folder.file("a")).back() == line_of("end", "1", 9));
}

TEST_CASE("so are ranks that make other calls of metrics", "[training][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(folder.file("a")).average_every(1));
    self.rank == 0 ? metrics.add("a", 1, 5) : void(ddp::average(1, self.group));
  });
  CHECK_THAT(
      errors, Each(ContainsText(": expected the same call on every rank, got Metrics of a list on "
                                "rank 0 and average of one value on rank 1 of 2.")));
}

TEST_CASE(
    "a rank that adds less ends with the others in bounded time", "[training][ranks][errors]") {
  const TemporaryFolder folder;
  const auto errors = errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(folder.file("a")).average_every(2));
    for (int step = 0; step < 4; ++step) {
      metrics.add("a", 1, step);
      if (self.rank == 0 || step != 1) metrics.add("b", 1, step);
      ddp::all_reduce(at::ones({1000}), self.group);
    }
  });
  CHECK_THAT(errors, Each(ContainsText("rank")));
}

TEST_CASE(
    "a place that cannot be written to is an error of all ranks", "[training][ranks][errors]") {
  const TemporaryFolder folder;
  const auto file = folder.write("file", "a text\n");
  const auto other = folder.write("other.jsonl", "step 3 loss 0.5");
  const TakenPort taken;
  const std::vector<std::pair<MetricsOptions, std::string>> cases{
      {MetricsOptions(), "MetricsOptions: expected a place to write to, got none. Name one:"},
      {MetricsOptions().jsonl(file + "/a.jsonl"),
       file + ": expected to make it, got \"File exists\". Name a folder."},
      {MetricsOptions().jsonl(folder.path()),
       folder.path() + ": expected to open it, got \"Is a directory\""},
      {MetricsOptions().jsonl(other),
       other +
           ": expected a file of metrics, whose last line begins with {\"step\":, got another."},
      {MetricsOptions().tensorboard(file), file + ": expected to make it, got \"File exists\""},
      {MetricsOptions().prometheus_file(folder.path()),
       ": expected to rename it, got \"Is a directory\""},
      {MetricsOptions().prometheus(taken.number()),
       ddp::str(
           "expected to listen on port ", taken.number(), " of 127.0.0.1, got \"Address already")},
      {MetricsOptions().prometheus(65536), "expected a port from 0 to 65535, got 65536."},
      {MetricsOptions().prometheus(-1), "expected a port from 0 to 65535, got -1."},
      {MetricsOptions().jsonl(file).average_every(-1), "average_every: expected a number of calls"},
  };
  for (const auto& one : cases) {
    for (const int size : {1, 2}) {
      CAPTURE(one.second, size);
      const auto error = error_of_all(size, [&](const Rank& self) {
        auto own = one.first;
        Metrics(own.group(self.group));
      });
      CHECK_THAT(error, ContainsText(one.second));
      CHECK_THAT(error, ContainsText(ddp::str("Metrics: rank 0 of ", size, " cannot begin: ")));
    }
  }
  CHECK(read_bytes(file) == "a text\n");
  CHECK(read_bytes(other) == "step 3 loss 0.5");
}

TEST_CASE("ranks with other options are told so", "[training][ranks][errors]") {
  const TemporaryFolder folder;
  const auto error = error_of_all(3, [&](const Rank& self) {
    Metrics(options_of(self).jsonl(folder.file("a")).average_every(self.rank == 2 ? 5 : 6));
  });
  CHECK_THAT(
      error, ContainsText("MetricsOptions::average_every: expected the same number on every rank, "
                          "got 6 on rank 0 and 5 on rank 2."));
}

TEST_CASE(
    "bad names, steps and tensors are errors, and nothing is added", "[training][ranks][errors]") {
  const TemporaryFolder folder;
  const auto path = folder.file("a");
  const auto errors = run_ranks<std::vector<std::string>>(1, [&](const Rank& self) {
    Metrics metrics(options_of(self).jsonl(path));
    std::vector<std::string> texts;
    for (const std::string name : {"", "a\nb", "a\tb", "\xFF", "\x7F"})
      texts.push_back(error_of<c10::ValueError>([&] { metrics.add(name, 1, 0); }));
    texts.push_back(error_of<c10::ValueError>([&] { metrics.add(std::string(1001, 'a'), 1, 0); }));
    texts.push_back(error_of<c10::ValueError>([&] { metrics.add("a", 1, -1); }));
    for (const auto& tensor :
         {at::Tensor(), at::ones({2}), at::ones({}, at::kComplexFloat), at::ones({0})})
      texts.push_back(error_of<c10::ValueError>([&] { metrics.add("a", tensor, 0); }));
    return texts;
  })[0];
  const std::vector<std::string> messages{
      "expected a name, got \"\"",
      "and without control characters such as ends of lines, got \"a\\u000ab\"",
      "got \"a\\u0009b\"",
      "got \"other bytes\"",
      "without control characters",
      "of at most 1000 bytes",
      "expected a step >= 0 of \"a\", got -1. Count from 0.",
      "got an undefined one",
      "of 2 elements",
      "of one real number",
      "of 0 elements"};
  REQUIRE(errors.size() == messages.size());
  for (size_t i = 0; i < errors.size(); ++i) {
    CHECK_THAT(errors[i], ContainsText("Metrics::add: expected") && ContainsText(messages[i]));
  }
  CHECK(read_bytes(path).empty());
}

TEST_CASE("a full disk costs no value and one warning", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  const auto results = run_ranks<std::vector<std::string>>(1, [&](const Rank& self) {
    const Warnings warnings;
    Metrics metrics(options_of(self).jsonl(path));
    metrics.add("a", 1, 0);
    metrics.flush();
    std::vector<std::string> texts{metrics.problem()};
    const auto before = read_bytes(path);
    {
      const FullDisk full(before.size() + 10);  // a part of a line fits
      for (int step = 1; step < 4; ++step) {
        metrics.add("a", 1, step);
        metrics.flush();
      }
      texts.push_back(metrics.problem());
      texts.push_back(read_bytes(path) == before ? "unchanged" : read_bytes(path));
    }
    metrics.flush();
    texts.push_back(metrics.problem());
    texts.insert(texts.end(), warnings.texts.begin(), warnings.texts.end());
    return texts;
  })[0];
  const auto problem =
      path + ": expected to write it, got \"File too large\". Check the file system.";
  CHECK(results == std::vector<std::string>{"", problem, "unchanged", "", "Metrics: " + problem});
  std::vector<std::string> expected;
  for (int step = 0; step < 4; ++step) expected.push_back(line_of("a", "1", step));
  CHECK(lines_in(path) == expected);
}

TEST_CASE("the destructor warns of values that are in no file", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  const auto warnings = run_ranks<std::vector<std::string>>(2, [&](const Rank& self) {
    const Warnings heard;
    auto metrics = std::make_unique<Metrics>(options_of(self).jsonl(path).average_every(100));
    metrics->add("a", 1, 0);
    metrics->flush();
    if (self.rank == 0) remove_all(path);
    metrics->add("a", 1, 1);
    metrics.reset();
    return heard.texts;
  });
  REQUIRE(warnings[0].size() == 1);
  CHECK_THAT(
      warnings[0][0],
      ContainsText(
          "Metrics: " + path + ": expected to find it, got \"No such file or directory\""));
  CHECK(warnings[1].empty());
}

TEST_CASE("one place that fails does not keep the others from theirs", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto warnings = run_ranks<std::vector<std::string>>(1, [&](const Rank& self) {
    const Warnings heard;
    auto metrics = std::make_unique<Metrics>(options_of(self)
                                                 .tensorboard(folder.file("t"))
                                                 .jsonl(folder.file("j"))
                                                 .prometheus_file(folder.file("p/a.prom")));
    remove_all(folder.file("t"));
    metrics->add("a", 1, 0);
    metrics->flush();
    remove_all(folder.file("p"));
    metrics->add("a", 2, 1);
    metrics->flush();
    metrics.reset();
    return heard.texts;
  })[0];
  CHECK(
      lines_in(folder.file("j")) ==
      std::vector<std::string>{line_of("a", "1", 0), line_of("a", "2", 1)});
  REQUIRE(warnings.size() == 2);  // of add() or flush(), and of the destructor
  CHECK_THAT(warnings[0], ContainsText(folder.file("t")) && !ContainsText(folder.file("p")));
  CHECK_THAT(warnings[1], ContainsText(folder.file("t")) && ContainsText(folder.file("p")));
}

TEST_CASE("Prometheus' file and port have the latest values", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto path = folder.file("a.prom");
  folder.write("a.prom", "of an earlier run\n");
  const auto ports = run_ranks<int>(2, [&](const Rank& self) {
    Metrics metrics(options_of(self).prometheus(0).prometheus_file(path));
    if (self.rank == 0) TORCH_CHECK(read_bytes(path).empty(), "the earlier run's");
    for (int step = 0; step < 3; ++step) metrics.add("train/loss", step + self.rank, step);
    metrics.flush();
    return metrics.prometheus_port().value_or(-1);
  });
  CHECK(
      read_bytes(path) ==
      "# TYPE ddp_metric_step gauge\nddp_metric_step{metric=\"train/loss\"} 2\n"
      "# TYPE train_loss gauge\ntrain_loss{name=\"train/loss\"} 2.5\n");
  CHECK(ports[0] > 0);
  CHECK(ports[1] == -1);
  CHECK(names_in(folder.path()) == std::vector<std::string>{"a.prom"});
}

TEST_CASE("writing values does not wait for a disk", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto before = waits_for_disk.load();
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    Metrics metrics(options_of(self)
                        .tensorboard(folder.path())
                        .jsonl(folder.file("a.jsonl"))
                        .prometheus_file(folder.file("a.prom")));
    for (int64_t step = 0; step < 3; ++step) metrics.add("loss", 1.0, step);
    metrics.flush();
  });
  for (const auto& error : errors) CHECK(error == "");
  CHECK(waits_for_disk == before);
}

TEST_CASE("an exception on a rank does not wait for the others", "[training][ranks][errors]") {
  const TemporaryFolder folder;
  const auto path = folder.file("metrics.jsonl");
  const auto errors = errors_of_ranks(2, kLongTimeout, [&](const Rank& self) {
    const Warnings heard;
    {
      Metrics metrics(options_of(self).jsonl(path).average_every(2));
      for (int step = 0; step < 3; ++step) metrics.add("a", 1, step);
      if (self.rank == 0) throw std::runtime_error("boom");
    }
    TORCH_CHECK(false, ddp::joined_by(" ", heard.texts));
  });
  CHECK(errors[0] == "boom");
  CHECK_THAT(
      errors[1], ContainsText("Metrics: the last 1 values are not written: ") &&
                     ContainsText("rank 0 of 2 ended"));
  CHECK(lines_in(path) == std::vector<std::string>{line_of("a", "1", 0), line_of("a", "1", 1)});
}

TEST_CASE("a forked process has no part in metrics", "[training][ranks]") {
  const TemporaryFolder folder;
  const auto statuses = run_ranks<int>(1, [&](const Rank& self) {
    auto metrics =
        std::make_unique<Metrics>(options_of(self).jsonl(folder.file("a")).prometheus(0));
    metrics->add("a", 1, 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);
      const auto error = error_of([&] { metrics->add("a", 1, 1); });
      metrics.reset();
      ::_exit(error.find("which it forked") != std::string::npos ? 7 : 8);
    }
    metrics->add("a", 1, 2);
    metrics.reset();
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  });
  CHECK(statuses == std::vector<int>{7});
  CHECK(
      lines_in(folder.file("a")) ==
      std::vector<std::string>{line_of("a", "1", 0), line_of("a", "1", 2)});
}
