#include <ddp/metrics.h>

#include <cmath>
#include <limits>

#include <ddp/internal/groups.h>
#include <ddp/internal/metrics.h>
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/recording_backend.h"

#include "support/catch.h"

using namespace ddp::testing;
using Metrics = std::map<std::string, double>;

namespace {

/// Sums as if every rank contributed the values of this one.
class AlikeBackend : public ddp::testing::RecordingBackend {
 public:
  using RecordingBackend::RecordingBackend;

  WorkPtr run(ddp::Collective collective) override {
    for (auto& tensor : collective.out) tensor.mul_(getSize());
    return RecordingBackend::run(std::move(collective));
  }
};

Metrics numbered(int count) {
  Metrics metrics;
  for (int i = 0; i < count; ++i) metrics["metric " + std::to_string(i)] = i;
  return metrics;
}

}  // namespace

TEST_CASE("sum and average of a number are the same on every rank", "[comm][ranks]") {
  const int size = GENERATE(1, 2, 3);
  CAPTURE(size);
  const auto results = run_ranks<std::vector<double>>(size, [](const Rank& self) {
    return std::vector<double>{
        ddp::sum(self.rank + 0.1, self.group), ddp::average(self.rank, self.group)};
  });
  double sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += rank + 0.1;
  for (const auto& result : results) {
    CHECK(result[0] == Approx(sum));
    CHECK(result[0] == results[0][0]);  // the same bits
    CHECK(result[1] == (size - 1) / 2.0);
  }
}

TEST_CASE("counts beyond a float are summed exactly, and NaN and infinity pass", "[comm][ranks]") {
  constexpr double kCount = 4503599627370497.0;  // 2^52 + 1
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto results = run_ranks<Metrics>(2, [&](const Rank& self) {
    const bool first = self.rank == 0;
    return ddp::sum(
        {{"count", first ? kCount : kCount - 2},
         {"infinity", first ? kInfinity : 1},
         {"nan", first ? NAN : 1},
         {"same", 1}},
        self.group);
  });
  for (const auto& result : results) {
    CHECK(result.size() == 4);
    CHECK(result.at("count") == 9007199254740992.0);
    CHECK(result.at("infinity") == kInfinity);
    CHECK(std::isnan(result.at("nan")));
    CHECK(result.at("same") == 2);
  }
}

TEST_CASE("a map of any size is summed and averaged by its keys", "[comm][ranks]") {
  const int count = GENERATE(0, 1, 191, 192, 193, 1000);
  CAPTURE(count);
  const auto results = run_ranks<std::vector<Metrics>>(2, [&](const Rank& self) {
    auto metrics = numbered(count);
    for (auto& [key, value] : metrics) value += self.rank;
    return std::vector<Metrics>{ddp::sum(metrics, self.group), ddp::average(metrics, self.group)};
  });
  auto sums = numbered(count);
  auto means = sums;
  for (auto& [key, value] : sums) value = 2 * value + 1;
  for (auto& [key, value] : means) value += 0.5;
  for (const auto& result : results) CHECK(result == std::vector<Metrics>{sums, means});
}

TEST_CASE("a list of any size is summed in its order, and may repeat names", "[comm][ranks]") {
  const size_t count = GENERATE(0, 1, 192, 193, 1000);
  CAPTURE(count);
  const auto results = run_ranks<std::vector<double>>(2, [&](const Rank& self) {
    std::vector<double> values;
    for (size_t i = 0; i < count; ++i) values.push_back(static_cast<double>(i) + self.rank);
    return ddp::sum_in_order("List", std::vector<std::string>(count, "same"), values, self.group);
  });
  for (const auto& result : results) {
    REQUIRE(result.size() == count);
    for (size_t i = 0; i < count; ++i) CHECK(result[i] == 2.0 * static_cast<double>(i) + 1);
  }
}

TEST_CASE("a map of metrics takes one collective", "[comm][once]") {
  Events events;
  const auto group = group_over(c10::make_intrusive<AlikeBackend>(0, 3, events));
  CHECK(ddp::average(1.5, group) == 1.5);
  CHECK(ddp::average(numbered(192), group) == numbered(192));
  // One size for all calls: ranks with different requests must not wait for each other's bytes.
  CHECK(events == Events{"allreduce 256", "allreduce 256"});
  events.clear();
  CHECK(ddp::average(numbered(200), group) == numbered(200));
  CHECK(events == Events{"allreduce 256", "allreduce 8"});
}

TEST_CASE("metrics are sent on a device that the group has a backend for", "[comm][once]") {
  Events events;
  const auto backend = c10::make_intrusive<AlikeBackend>(0, 2, events);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto group = c10::make_intrusive<c10d::ProcessGroup>(store, 0, 2);
  const auto type = c10d::ProcessGroup::BackendType::CUSTOM;
  group->setBackend(c10::DeviceType::CUDA, type, {backend});
  CHECK(ddp::carrier_device(*group) == at::Device(at::kCUDA));
  group->setBackend(c10::DeviceType::CPU, type, {backend});
  CHECK(ddp::carrier_device(*group) == at::Device(at::kCPU));
}

TEST_CASE("keys that differ are an error that names them on every rank", "[comm][ranks][errors]") {
  using Ask = std::function<void(const Rank&)>;
  const auto [ask, message] = GENERATE(table<Ask, std::string>({
      {[](const Rank& self) {
         Metrics metrics{{"accuracy", 1}, {"loss", 1}};
         if (self.rank == 1) metrics["loss:\n2"] = 1;
         ddp::sum(metrics, self.group);
       },
       "sum: expected the same keys on every rank, got \"loss:\n2\" on rank 1 and not on ranks 0, "
       "2 of 3. Give every rank's map the same keys."},
      // As many keys on every rank, and more than one message holds.
      {[](const Rank& self) {
         auto metrics = numbered(300);
         metrics[self.rank == 2 ? "b" : "a"] = 1;
         ddp::average(metrics, self.group);
       },
       "average: expected the same keys on every rank, got \"a\" on ranks 0, 1 and not on rank 2 "
       "of 3 (1 more differ)."},
      {[](const Rank& self) { ddp::average(self.rank == 0 ? Metrics{} : numbered(1), self.group); },
       "got \"metric 0\" on ranks 1, 2 and not on rank 0 of 3"},
      {[](const Rank& self) {
         if (self.rank == 0) ddp::average(1, self.group);
         if (self.rank == 1) ddp::average(numbered(1), self.group);
         if (self.rank == 2) ddp::sum(1, self.group);
       },
       ": expected the same call on every rank, got average of a map on rank 1 and average of one "
       "value on rank 0 and sum of one value on rank 2 of 3."},
      // The same names in another order, and more than one message holds.
      {[](const Rank& self) {
         std::vector<std::string> names(300, "a");
         names[self.rank == 1 ? 250 : 251] = "b";
         ddp::sum_in_order("List", names, std::vector<double>(300), self.group);
       },
       "List: expected the same values in the same order on every rank, got a on ranks 0, 2 and b "
       "on rank 1 of 3. Let every rank make the same calls in the same order."},
      {[](const Rank& self) {
         ddp::sum_in_order(
             "List", std::vector<std::string>(self.rank, "a"), std::vector<double>(self.rank),
             self.group);
       },
       "got a on ranks 1, 2 and none on rank 0 of 3."},
  }));
  const auto errors = errors_of_ranks(3, [ask = ask](const Rank& self) {
    const auto error = error_of<c10::Error>([&] { ask(self); });
    TORCH_CHECK(ddp::sum(1, self.group) == 3, "the group is out of step");
    TORCH_CHECK(false, error);
  });
  for (const auto& error : errors) CHECK_THAT(error, ContainsText(message));
}
