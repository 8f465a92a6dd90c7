// What ranks that wait for a late one ask of the store.
//
//     ddprun -n 8 store_load
//
// In each step the last rank is late. Every rank counts its requests to the store that it takes
// part in a training step with; rank 0 prints the sum. The store is a TCPStore in rank 0's process.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ddp/collectives.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/process_group.h>
#include <torch/nn/modules/linear.h>
#include <CLI/CLI.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace {

using Bytes = std::vector<uint8_t>;
using Count = std::shared_ptr<std::atomic<int64_t>>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Counts requests, its clones' included.
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
  TORCH_CHECK(text != nullptr, "store_load: expected ", variable, ". Start it with ddprun.");
  return std::atoi(text);
}

StorePtr make_store() {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(number_of("MASTER_PORT"));
  options.isServer = number_of("RANK") == 0;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>(std::getenv("MASTER_ADDR"), options);
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("What ranks that wait for a late one ask of the store. Run it with ddprun.");
  double late = 0.6;
  int steps = 10;
  app.add_option("--late", late, "seconds that the last rank is late in each step")
      ->capture_default_str();
  app.add_option("--steps", steps, "training steps")->capture_default_str();
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  const auto count = std::make_shared<std::atomic<int64_t>>(0);
  const auto store = make_store();
  ddp::init_process_group(ddp::ProcessGroupOptions().backend("gloo").store(
      c10::make_intrusive<CountingStore>(store, count)));
  const int rank = ddp::get_rank();
  const int size = ddp::get_world_size();
  {
    ddp::DistributedDataParallel model(torch::nn::Linear(8, 8));
    const auto step = [&] { model->forward(torch::ones({1, 8})).sum().backward(); };
    for (int i = 0; i < 3; ++i) step();  // the buckets are rebuilt
    ddp::barrier();
    *count = 0;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      if (rank == size - 1) std::this_thread::sleep_for(std::chrono::duration<double>(late));
      step();
    }
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    auto total = torch::tensor({static_cast<double>(*count)}, torch::kDouble);
    ddp::all_reduce(total);
    if (rank == 0) {
      const double requests = total.item<double>();
      std::printf(
          "{\"ranks\": %d, \"late_s\": %g, \"steps\": %d, \"step_s\": %.3f, "
          "\"requests_per_step\": %.1f, \"requests_per_waiting_rank_and_step\": %.2f, "
          "\"requests_per_s\": %.1f}\n",
          size, late, steps, time.count() / steps, requests / steps, requests / steps / (size - 1),
          requests / time.count());
    }
    ddp::barrier();
  }
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "store_load: %s\n", error.what());
  return EXIT_FAILURE;
}
