// One rank of an elastic training, for tests that kill, stop and add ranks.
//
//   elastic_training_world STEPS MILLISECONDS_A_STEP FOLDER [KIND]
//
// Writes the indices of each finished step to FOLDER/steps.SLOT.PID, and at the end one line, with
// a hash of the state. A step has the same samples for any number of ranks. Words of KIND, with a
// comma between them: "shm", "gloo", "checkpoints", "slow" (with fewer ranks than slots a
// step takes 250 ms), "gathers" (as "slow", until there were as many once), "zero" (the optimizer
// is sharded, with snapshots every 25 steps), "evaluates" (a turn every 40 steps, with time to be
// killed in it, and in a save).
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace elastic_training_world {

namespace {

constexpr size_t kSamples = 203;
constexpr size_t kGlobalBatch = 16;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return out(torch::dropout(torch::relu(norm(in(x))), 0.2, is_training()));
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(8, 64))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(64))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(64, 4))};
};
TORCH_MODULE(Net);

at::Tensor inputs_of(const std::vector<size_t>& indices) {
  std::vector<float> numbers(indices.begin(), indices.end());
  return torch::sin(torch::tensor(numbers).view({-1, 1}) * torch::arange(1.0F, 9.0F) * 0.7);
}

uint64_t hash_of(const std::vector<at::Tensor>& tensors, uint64_t hash = 14695981039346656037ULL) {
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.detach().contiguous().flatten().view(torch::kByte);
    for (int64_t i = 0; i < bytes.numel(); ++i) {
      hash = (hash ^ bytes.const_data_ptr<uint8_t>()[i]) * 1099511628211ULL;
    }
  }
  return hash;
}

/// Of a sharded optimizer only what all ranks have.
std::vector<at::Tensor> state_of(Net& net, torch::optim::Optimizer& any) {
  auto state = net->parameters();
  for (const auto& buffer : net->buffers()) state.push_back(buffer);
  if (dynamic_cast<ddp::ZeroRedundancyOptimizerBase*>(&any) != nullptr) return state;
  auto& optimizer = static_cast<torch::optim::AdamW&>(any);
  for (const auto& p : net->parameters()) {
    const auto found = optimizer.state().find(p.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    auto& own = static_cast<torch::optim::AdamWParamState&>(*found->second);
    state.push_back(own.exp_avg());
    state.push_back(own.exp_avg_sq());
  }
  return state;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    ddp::DistributedDataParallel<Net>& model, bool is_sharded) {
  const torch::optim::AdamWOptions adamw(1e-3);
  if (!is_sharded) return std::make_unique<torch::optim::AdamW>(model->parameters(), adamw);
  return std::make_unique<ddp::ZeroRedundancyOptimizer<torch::optim::AdamW>>(model, adamw);
}

/// A part whose save takes long enough to be killed in it.
struct SlowPart {
  void save(torch::serialize::OutputArchive& archive) const {
    if (is_slow) {
      std::printf("slot %s saves\n", std::getenv("DDP_SLOT"));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    archive.write("nothing", torch::zeros({1}));
  }
  void load(torch::serialize::InputArchive& /*archive*/) {}

  bool is_slow = false;
};

struct Training {
  int64_t steps;
  std::chrono::milliseconds pause;
  std::string folder;
  std::string kind;

  bool has(const char* word) const { return kind.find(word) != std::string::npos; }
};

int train(const Training& training) {
  ddp::Elastic run(ddp::ElasticOptions()
                       .group(ddp::ProcessGroupOptions()
                                  .backend(training.has("gloo") ? "gloo" : "shm")
                                  .timeout(std::chrono::seconds(60)))
                       .snapshot_every(25));
  const char* all = std::getenv("WORLD_SIZE");
  const int world_size = all == nullptr ? 0 : std::atoi(all);
  torch::manual_seed(1);
  Net net;
  ddp::DistributedDataParallel model(
      net, ddp::DistributedDataParallelOptions().bucket_cap_mb(0.002).reduction(
               ddp::Reduction::SampleWeighted));
  const auto optimizer = make_optimizer(model, training.has("zero"));
  ddp::DistributedSampler sampler(
      kSamples, ddp::DistributedSamplerOptions().advance_epoch(true).seed(3));
  double loss_sum = 0;
  int64_t evaluated = 0;
  SlowPart slow_part;
  std::optional<ddp::Checkpointer> checkpointer;
  run.add("model", model).add("optimizer", *optimizer).add("sampler", sampler);
  run.add("loss_sum", loss_sum).add("evaluated", evaluated);
  if (training.has("checkpoints")) {
    checkpointer.emplace(
        training.folder + "/checkpoints", ddp::CheckpointerOptions().every_steps(20));
    checkpointer->add("model", model).add("optimizer", *optimizer).add("sampler", sampler);
    checkpointer->add("loss_sum", loss_sum).add_per_rank("slow", slow_part);
    slow_part.is_slow = training.has("evaluates");
    run.checkpoints(*checkpointer);
  }
  run.on_change([&](const ddp::ElasticGeneration& generation) {
    std::printf(
        "slot %d pid %d: generation %lld, rank %d of %d, step %lld, repeats %lld, %.3f s%s\n",
        generation.slot, static_cast<int>(::getpid()), static_cast<long long>(generation.number),
        generation.rank, generation.size, static_cast<long long>(generation.steps),
        static_cast<long long>(generation.repeated), generation.seconds,
        generation.why.empty() ? "" : (": " + generation.why).c_str());
  });
  const auto log_name = training.folder + "/steps." + std::to_string(run.generation().slot) + "." +
                        std::to_string(::getpid());
  std::ofstream log(log_name);
  double longest = 0;
  auto last = std::chrono::steady_clock::now();
  bool was_whole = false;
  run.loop([&] {
    if (run.steps() >= training.steps) return false;
    if (training.has("evaluates") && run.steps() >= evaluated + 40) {
      std::printf("slot %d evaluates\n", run.generation().slot);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      const torch::NoGradGuard no_grad;
      auto sum = model->forward(inputs_of({1, 2, 3})).sum().view({1});
      ddp::all_reduce(sum);
      evaluated = run.steps();
      return true;
    }
    auto indices = sampler.next_of(kGlobalBatch);
    if (!indices) {
      sampler.reset();
      indices = sampler.next_of(kGlobalBatch);
    }
    const bool is_whole = run.generation().size == world_size;
    was_whole = was_whole || is_whole;
    const bool waits =
        (training.has("slow") && !is_whole) || (training.has("gathers") && !was_whole);
    std::this_thread::sleep_for(waits ? std::chrono::milliseconds(250) : training.pause);
    const auto x = inputs_of(*indices);
    optimizer->zero_grad();
    const auto loss = x.size(0) > 0 ? (model->forward(x) - x.narrow(1, 0, 4)).square().mean()
                                    : model->forward(x).sum();
    loss.backward();
    run.step(*optimizer);
    log << run.steps();
    for (const auto index : *indices) log << ' ' << index;
    log << std::endl;
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - last).count();
    last = now;
    longest = std::max(longest, seconds);
    auto sum = torch::full({1}, loss.item<double>());
    ddp::all_reduce(sum);  // may fail after the step
    loss_sum += sum.item<double>();
    if (run.steps() == 20) std::printf("reached step 20\n");
    return true;
  });
  std::printf(
      "slot %d: the end at step %lld, hash %016llx, loss_sum %.17g, longest step %.3f s\n",
      run.generation().slot, static_cast<long long>(run.steps()),
      static_cast<unsigned long long>(hash_of(state_of(net, *optimizer))), loss_sum, longest);
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) return 2;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  torch::set_num_threads(1);
  return train(
      {std::atoll(argv[1]), std::chrono::milliseconds(std::atoi(argv[2])), argv[3],
       argc > 4 ? argv[4] : ""});
} catch (const ddp::Fenced& error) {
  std::printf("fenced: %s\n", error.what_without_backtrace());
  return 4;
} catch (const std::exception& error) {
  std::fprintf(stderr, "elastic_training_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace elastic_training_world
