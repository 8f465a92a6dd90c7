// Counts the requests to the store by ranks that wait for a late one.
//
//     ddprun -n 8 micro store
//
// In each training step the last rank is late. Every rank counts its requests to the store during
// the step; rank 0 prints the sum. The store is a TCPStore in rank 0's process.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/metrics.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/linear.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "in_turns.h"
#include "micro.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Count = std::shared_ptr<std::atomic<int64_t>>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Counts its own requests and those of its clones.
class CountingStore : public c10d::Store {
 public:
  CountingStore(StorePtr store, Count count)
      : Store(store->getTimeout()), store_(std::move(store)), count_(std::move(count)) {}

  using Store::compareSet;
  using Store::set;

  StorePtr clone() override { return c10::make_intrusive<CountingStore>(store_->clone(), count_); }
  void set(const std::string& key, const Bytes& value) override { counted().set(key, value); }
  Bytes compareSet(const std::string& key, const Bytes& old, const Bytes& value) override {
    return counted().compareSet(key, old, value);
  }
  Bytes get(const std::string& key) override { return counted().get(key); }
  int64_t add(const std::string& key, int64_t value) override { return counted().add(key, value); }
  bool deleteKey(const std::string& key) override { return counted().deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return counted().check(keys); }
  int64_t getNumKeys() override { return counted().getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { counted().wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& time) override {
    counted().wait(keys, time);
  }
  void append(const std::string& key, const Bytes& value) override { counted().append(key, value); }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    return counted().multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    counted().multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

 private:
  c10d::Store& counted() {
    ++*count_;
    return *store_;
  }

  const StorePtr store_;
  const Count count_;
};

int number_of(const char* variable) {
  const char* text = std::getenv(variable);
  TORCH_CHECK(text != nullptr, "store: expected ", variable, ". Start it with ddprun.");
  return std::atoi(text);
}

StorePtr make_store() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(number_of("MASTER_PORT"));
  options.isServer = number_of("RANK") == 0;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options);
}

void measure_store(double late, int steps) {
  const auto count = std::make_shared<std::atomic<int64_t>>(0);
  ddp::init_process_group(ddp::ProcessGroupOptions().backend("gloo").store(
      c10::make_intrusive<CountingStore>(make_store(), count)));
  const int rank = ddp::get_rank();
  const int size = ddp::get_world_size();
  {
    ddp::DistributedDataParallel model(torch::nn::Linear(8, 8));
    const auto step = [&] { model->forward(torch::ones({1, 8})).sum().backward(); };
    for (int i = 0; i < 3; ++i) step();  // until the buckets are rebuilt
    ddp::barrier();
    *count = 0;
    const auto seconds = 1e-3 * benchmarks::milliseconds([&] {
                           for (int i = 0; i < steps; ++i) {
                             if (rank == size - 1)
                               std::this_thread::sleep_for(std::chrono::duration<double>(late));
                             step();
                           }
                         });
    const auto requests = ddp::sum(static_cast<double>(*count));
    if (rank == 0) {
      std::printf(
          "{\"ranks\": %d, \"late_s\": %g, \"steps\": %d, \"step_s\": %.3f, "
          "\"requests_per_step\": %.1f, \"requests_per_waiting_rank_and_step\": %.2f, "
          "\"requests_per_s\": %.1f}\n",
          size, late, steps, seconds / steps, requests / steps, requests / steps / (size - 1),
          requests / seconds);
    }
    ddp::barrier();
  }
  ddp::destroy_process_group();
}

}  // namespace

void benchmarks::add_store(CLI::App& app) {
  auto* command = app.add_subcommand(
      "store", "What ranks that wait for a late one ask of the store. Run it with ddprun.");
  static double late = 0.6;
  static int steps = 10;
  command->add_option("--late", late, "seconds that the last rank is late in each step")
      ->capture_default_str();
  command->add_option("--steps", steps, "training steps")->capture_default_str();
  command->callback([] { measure_store(late, steps); });
}
