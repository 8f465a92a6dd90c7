// The number of a rank's requests to the store while a group is made.
#include <ddp/process_group.h>

#include <atomic>
#include <future>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/group/group_builder.h"
#include "comm/store/startup_barrier.h"
#include "support/ranks.h"

#include "support/catch.h"

using ddp::ProcessGroupOptions;
using namespace ddp::testing;
using namespace std::chrono_literals;

namespace {

using Bytes = std::vector<uint8_t>;
using Keys = std::vector<std::string>;

/// A rank's view of the store, which counts the operations.
class CountingStore : public c10d::PrefixStore {
 public:
  explicit CountingStore(const c10::intrusive_ptr<c10d::Store>& store)
      : PrefixStore("counted", store) {}

  int take() { return count_.exchange(0); }

  void set(const std::string& key, const Bytes& value) override {
    ++count_;
    PrefixStore::set(key, value);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    ++count_;
    return PrefixStore::compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    ++count_;
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++count_;
    return PrefixStore::add(key, value);
  }
  bool check(const Keys& keys) override {
    ++count_;
    return PrefixStore::check(keys);
  }
  void wait(const Keys& keys) override {
    ++count_;
    PrefixStore::wait(keys);
  }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    ++count_;
    PrefixStore::wait(keys, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    ++count_;
    PrefixStore::append(key, value);
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    ++count_;
    return PrefixStore::multiGet(keys);
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    ++count_;
    PrefixStore::multiSet(keys, values);
  }

 private:
  std::atomic<int> count_{0};
};

using Clock = std::chrono::steady_clock;

struct Load {
  int init = 0;
  int subgroup = 0;
  Clock::duration took{};
};

/// The most polls of a rank in that time. Each of four barriers begins with five quick polls, which
/// come later, and so beside others, on a machine that is busy.
int polls_within(Clock::duration time) { return static_cast<int>(time / 10ms) + 4 * 5; }

Load measure(const Rank& self) {
  const auto start = Clock::now();
  const auto store = c10::make_intrusive<CountingStore>(self.store);
  const auto built = ddp::build_group(ProcessGroupOptions()
                                          .backend("gloo")
                                          .store(store)
                                          .rank(self.rank)
                                          .world_size(self.size)
                                          .timeout(50s));
  Load load;
  load.init = store->take();
  ddp::new_group({0, 1}, built);
  load.subgroup = store->take();
  load.took = Clock::now() - start;
  return load;
}

}  // namespace

TEST_CASE(
    "a rank makes O(world) requests to the store while a group is made", "[comm][ranks][gloo]") {
  // Measured: 45 to 76 operations, of which Gloo's connecting takes two per rank of the world. The
  // rest is polling: one operation every 20 ms for ranks that wait for others.
  const int size = GENERATE(2, 8, 16);
  const RanksOptions options{50s};
  const auto loads = run_ranks<Load>(size, options, measure);
  for (const auto& load : loads) {
    CAPTURE(size, load.init, load.subgroup);
    CHECK(load.init < 40 + 4 * size + polls_within(load.took));
    CHECK(load.subgroup < 60 + polls_within(load.took));
  }
}

TEST_CASE("a startup barrier takes as many operations in a large world", "[comm][ranks][once]") {
  constexpr int kSize = 64;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<Load>> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.push_back(std::async(std::launch::async, [=] {
      const auto start = Clock::now();
      const auto counted = c10::make_intrusive<CountingStore>(store);
      ddp::run_startup_barrier({counted, rank, kSize, ddp::Deadline(50s), "test"});
      return Load{counted->take(), 0, Clock::now() - start};
    }));
  }
  for (auto& rank : ranks) {
    const auto load = rank.get();
    CHECK(load.init < 40 + polls_within(load.took));
  }
}
