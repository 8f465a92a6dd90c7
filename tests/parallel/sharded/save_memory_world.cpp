// The most memory that a save and a load of a sharded model and its AdamW take on a rank:
// `ddprun -n 4 save_memory_world FOLDER LAYERS`; a layer is 12.6 MB of a checkpoint. Fails where it
// is more than a copy of the rank's shards, a layer's box and what a process needs beside it.
#include <malloc.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <functional>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace save_memory_world {

namespace {

constexpr int64_t kWidth = 1024;
constexpr int64_t kLayerBytes = 4 * kWidth * kWidth;
constexpr int64_t kBeside = int64_t{8} << 20;  // pickles, blocks of files, names

int64_t status_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == name && status >> kilobytes) return kilobytes * 1024;
  }
  return 0;
}

/// The most by which this process grows meanwhile.
int64_t growth_of(const std::function<void()>& body) {
  malloc_trim(0);
  ddp::barrier();
  std::ofstream("/proc/self/clear_refs") << 5;  // VmHWM starts at the memory of now
  const auto before = status_bytes("VmRSS:");
  body();
  return status_bytes("VmHWM:") - before;
}

bool measure(const std::string& folder, int64_t layers) {
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  ddp::fully_shard(net, kWidth * kWidth);
  ddp::FullyShardedDataParallel<torch::nn::Sequential> model(net);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
  model->forward(torch::ones({1, kWidth})).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
  ddp::Checkpointer checkpointer(folder);
  checkpointer.add("model", model).add("optimizer", optimizer);
  const auto of_save = growth_of([&] {
    checkpointer.save(1);
    checkpointer.wait();
  });
  const auto of_load = growth_of([&] { checkpointer.load(1); });
  const auto shards = 3 * layers * kLayerBytes / ddp::get_world_size();
  std::printf(
      "rank %d of %d: shards %.1f MB, a layer's box %.1f MB; save took %.1f MB, load %.1f MB\n",
      ddp::get_rank(), ddp::get_world_size(), double(shards) / 1e6,
      double(kLayerBytes) / ddp::get_world_size() / 1e6, double(of_save) / 1e6,
      double(of_load) / 1e6);
  std::fflush(stdout);
  const auto most = shards + kLayerBytes + kBeside;
  return of_save <= most && of_load <= most;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  // As docs/fully_sharded.md says: by default malloc keeps freed memory between other memory.
  mallopt(M_MMAP_THRESHOLD, 1 << 18);
  try {
    torch::set_num_threads(1);
    ddp::init_process_group();
    const bool fits = measure(argv[1], std::atoll(argv[2]));
    ddp::barrier();
    ddp::destroy_process_group();
    return fits ? 0 : 1;
  } catch (const std::exception& error) {
    std::printf("failed: %.300s\n", error.what());
    return 1;
  }
}

}  // namespace save_memory_world
