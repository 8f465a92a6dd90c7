// The number of a rank's requests to the store while a group is made.
#include <ddp/process_group.h>

#include <atomic>
#include <future>
#include <memory>

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

/// Operations on a store, and the keys that it has to find for them.
struct Requests {
  std::atomic<int> operations{0};
  std::atomic<int> keys{0};
};

/// A rank's view of the store, which counts the operations, also of its clones.
class CountingStore : public c10d::PrefixStore {
 public:
  explicit CountingStore(
      const c10::intrusive_ptr<c10d::Store>& store,
      std::shared_ptr<Requests> requests = std::make_shared<Requests>())
      : PrefixStore("counted", store), requests_(std::move(requests)) {}

  int take() { return requests_->operations.exchange(0); }
  int take_keys() { return requests_->keys.exchange(0); }

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<CountingStore>(getUnderlyingStore(), requests_);
  }

  void set(const std::string& key, const Bytes& value) override {
    count();
    PrefixStore::set(key, value);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    count();
    return PrefixStore::compareSet(key, expected, desired);
  }
  Bytes get(const std::string& key) override {
    count();
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    count();
    return PrefixStore::add(key, value);
  }
  bool check(const Keys& keys) override {
    count(keys.size());
    return PrefixStore::check(keys);
  }
  void wait(const Keys& keys) override {
    count(keys.size());
    PrefixStore::wait(keys);
  }
  void wait(const Keys& keys, const std::chrono::milliseconds& timeout) override {
    count(keys.size());
    PrefixStore::wait(keys, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    count();
    PrefixStore::append(key, value);
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    count(keys.size());
    return PrefixStore::multiGet(keys);
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    count(keys.size());
    PrefixStore::multiSet(keys, values);
  }

 private:
  void count(size_t keys = 1) {
    ++requests_->operations;
    requests_->keys += static_cast<int>(keys);
  }

  const std::shared_ptr<Requests> requests_;
};

using Clock = std::chrono::steady_clock;

struct Load {
  int init = 0;
  int keys = 0;  // of init
  int subgroup = 0;
  Clock::duration took{};
};

/// The most polls of a rank in that time. Each of four barriers begins with five quick polls, which
/// come later, and so beside others, on a machine that is busy.
int polls_within(Clock::duration time) { return static_cast<int>(time / 10ms) + 4 * 5; }

Load measure(const Rank& self, const std::string& backend) {
  const auto start = Clock::now();
  const auto store = c10::make_intrusive<CountingStore>(self.store);
  const auto built = ddp::build_group(ProcessGroupOptions()
                                          .backend(backend)
                                          .store(store)
                                          .rank(self.rank)
                                          .world_size(self.size)
                                          .timeout(50s));
  Load load;
  load.init = store->take();
  load.keys = store->take_keys();
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
  const auto loads =
      run_ranks<Load>(size, options, [](const Rank& self) { return measure(self, "gloo"); });
  for (const auto& load : loads) {
    CAPTURE(size, load.init, load.subgroup);
    CHECK(load.init < 40 + 4 * size + polls_within(load.took));
    CHECK(load.subgroup < 60 + polls_within(load.took));
  }
}

TEST_CASE(
    "the store finds O(world) keys for one rank, and as many as ever for the others",
    "[comm][ranks][once]") {
  // Over shared memory: Gloo reads the addresses of all ranks on each. If each rank read what all
  // others are, the process that hosts the store would find the square of the ranks.
  const int size = GENERATE(2, 8, 32);
  const auto loads = run_ranks<Load>(
      size, RanksOptions{50s}, [](const Rank& self) { return measure(self, "shm"); });
  for (size_t rank = 0; rank < loads.size(); ++rank) {
    const auto& load = loads[rank];
    CAPTURE(size, rank, load.init, load.keys);
    CHECK(load.keys < 70 + (rank == 0 ? 10 * size : 0) + polls_within(load.took));
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
      return Load{counted->take(), 0, 0, Clock::now() - start};
    }));
  }
  for (auto& rank : ranks) {
    const auto load = rank.get();
    CHECK(load.init < 40 + polls_within(load.took));
  }
}
