// One rank, RANK of WORLD_SIZE, of a small training in which one rank has a fault.
//
// fault_world PHASE FAULT VICTIM TRANSPORT SECONDS FOLDER
//   PHASE      before (init_process_group), constructor, forward, backward, collective, pipeline
//              (in the backward of its third micro-batch), gather and reduction (of a sharded
//              model: in forward and backward of its first unit), join, between (two steps), save
//              or destroy: when the fault happens
//   FAULT      kill, segv, exit, throw (an exception that leaves main) or stop
//   VICTIM     the rank that has the fault
//   TRANSPORT  shm, gloo, or hosts: shm, where the last rank is on a host of its own
//   SECONDS    the group's timeout
//   FOLDER     for the checkpoint
//
// Each rank prints its events with their time, on the clock that all processes of a host share:
//   rank 2 strikes at 123456 ms                the fault happens
//   rank 0 learned at 123499 ms: TEXT          the error that this rank got, in one line
//   rank 0 left at 123512 ms                   it has destroyed its group
// A rank that got an error ends with exit code 1. No rank ends for the SIGTERM that a launcher
// sends after a failure: the survivors have to get their errors from the library.
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ddp/ddp.h>
#include <ddp/internal/check.h>
#include <torch/torch.h>

namespace fault_world {

using namespace std::chrono_literals;

namespace {

constexpr int kSkipped = 77;

int rank_of_this() { return std::atoi(std::getenv("RANK")); }
int world_size() { return std::atoi(std::getenv("WORLD_SIZE")); }

void print_event(const char* what, const std::string& text = "") {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
  auto line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::printf(
      "rank %d %s at %lld ms%s%s\n", rank_of_this(), what, static_cast<long long>(ms),
      line.empty() ? "" : ": ", line.c_str());
  std::fflush(stdout);
}

/// Gives this process its own boot id, by which the library distinguishes hosts.
///
/// \return  false, after printing the reason, where the system does not allow it.
bool use_own_boot_id() {
  const bool moved = unshare(CLONE_NEWNS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0;
  const auto* const random = "/proc/sys/kernel/random";
  const bool mounted =
      moved && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
      mount(
          (std::string(random) + "/uuid").c_str(), (std::string(random) + "/boot_id").c_str(),
          nullptr, MS_BIND, nullptr) == 0;
  if (!mounted) std::perror("skipped: this process may not mount, which makes it another host");
  return mounted;
}

/// Waits until every rank ignores SIGTERM, so that no rank ends for it after the fault.
void wait_for_all_ranks(const std::string& folder) {
  const auto ready_file_of = [&](int rank) { return folder + "/ready-" + std::to_string(rank); };
  ::mkdir(folder.c_str(), 0777);
  std::ofstream(ready_file_of(rank_of_this())).close();
  for (int rank = 0; rank < world_size(); ++rank) {
    while (::access(ready_file_of(rank).c_str(), F_OK) != 0) std::this_thread::sleep_for(10ms);
  }
}

class InjectedFault {
 public:
  InjectedFault(std::string phase, std::string fault, bool is_victim)
      : phase_(std::move(phase)), fault_(std::move(fault)), is_victim_(is_victim) {}

  bool is_victim() const { return is_victim_; }

  void trigger_at(const std::string& phase) const {
    if (!is_victim_ || phase != phase_) return;
    print_event("strikes");
    if (fault_ == "kill") std::raise(SIGKILL);
    if (fault_ == "segv") std::raise(SIGSEGV);
    if (fault_ == "stop") std::raise(SIGSTOP);
    if (fault_ == "exit") _exit(3);
    throw std::runtime_error("user boom");
  }

 private:
  const std::string phase_, fault_;
  const bool is_victim_;
};

class NetImpl : public torch::nn::Module {
 public:
  explicit NetImpl(const InjectedFault& injected_fault) : injected_fault_(injected_fault) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto y = first_->forward(x);
    if (!is_armed_) return second_->forward(y);
    injected_fault_.trigger_at("forward");
    if (y.requires_grad()) {
      y.register_hook([this](const at::Tensor&) { injected_fault_.trigger_at("backward"); });
    }
    return second_->forward(y);
  }

  void arm() { is_armed_ = true; }

 private:
  const InjectedFault& injected_fault_;
  bool is_armed_ = false;
  torch::nn::Linear first_ = register_module("first", torch::nn::Linear(8, 64));
  torch::nn::Linear second_ = register_module("second", torch::nn::Linear(64, 4));
};
TORCH_MODULE(Net);

/// A stage of a pipeline.
class PieceImpl : public torch::nn::Module {
 public:
  explicit PieceImpl(const InjectedFault& injected_fault) : injected_fault_(injected_fault) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto y = layer_->forward(x);
    if (forwards_++ == kFaulty) {
      y.register_hook([this](const at::Tensor&) { injected_fault_.trigger_at("pipeline"); });
    }
    return y;
  }

 private:
  static constexpr int kFaulty = 2;  // micro-batch
  const InjectedFault& injected_fault_;
  int forwards_ = 0;
  torch::nn::Linear layer_ = register_module("layer", torch::nn::Linear(8, 8));
};
TORCH_MODULE(Piece);

/// A unit of a sharded model.
class UnitImpl : public torch::nn::Module {
 public:
  explicit UnitImpl(const InjectedFault& injected_fault) : injected_fault_(injected_fault) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto y = layer_->forward(x);
    if (++forwards_ < kFaulty) return y;
    injected_fault_.trigger_at("gather");
    y.register_hook([this](const at::Tensor&) { injected_fault_.trigger_at("reduction"); });
    return y;
  }

 private:
  static constexpr int kFaulty = 3;  // forward: the ranks do not compare the order of its units
  const InjectedFault& injected_fault_;
  int forwards_ = 0;
  torch::nn::Linear layer_ = register_module("layer", torch::nn::Linear(8, 8));
};
TORCH_MODULE(Unit);

/// A user's own part of a checkpoint.
struct Progress {
  const InjectedFault& injected_fault;

  void save(torch::serialize::OutputArchive& archive) const {
    injected_fault.trigger_at("save");
    archive.write("samples", torch::zeros({1}));
  }
  void load(torch::serialize::InputArchive&) {}
};

class Training {
 public:
  Training(const InjectedFault& injected_fault, std::string folder)
      : injected_fault_(injected_fault), folder_(std::move(folder)) {}

  void run() {
    ddp::barrier();
    injected_fault_.trigger_at("constructor");
    Net net(injected_fault_);
    ddp::DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    Progress progress{injected_fault_};
    ddp::Checkpointer checkpointer(folder_);
    checkpointer.add("model", model).add("optimizer", optimizer).add_per_rank("progress", progress);
    const auto step = [&] {
      optimizer.zero_grad();
      model->forward(torch::ones({2, 8})).sum().backward();
      optimizer.step();
    };

    step();
    step();
    net->arm();
    step();
    injected_fault_.trigger_at("between");
    step();
    collectives();
    pipeline();
    sharded();
    join(model, step);
    checkpointer.save(1);
    checkpointer.wait();
  }

 private:
  void collectives() {
    const int rank = ddp::get_rank(), size = ddp::get_world_size();
    auto sum = torch::ones({1});
    ddp::all_reduce(sum);
    injected_fault_.trigger_at("collective");
    std::vector<at::Tensor> all;
    for (int other = 0; rank == 1 && other < size; ++other) all.push_back(torch::zeros({1}));
    ddp::gather(all, sum, /*dst=*/1);
    ddp::barrier();
  }

  // The second step is where a rank finds the fault that had done its part of the first one.
  void pipeline() {
    const int rank = ddp::get_rank(), stages = ddp::get_world_size();
    const auto mesh = ddp::init_device_mesh({stages, 1, 1}, {"pp", "dp", "tp"});
    ddp::PipelineStage stage(
        Piece(injected_fault_), rank, stages,
        [](const at::Tensor& output, const at::Tensor& target) {
          return torch::mse_loss(output, target);
        },
        ddp::PipelineOptions().process_group(mesh.group("pp")));
    const auto batch = torch::ones({4, 8});
    for (int step = 0; step < 2; ++step) {
      stage.step(
          rank == 0 ? std::vector<at::Tensor>{batch} : std::vector<at::Tensor>{},
          rank + 1 == stages ? batch : at::Tensor());
    }
  }

  void sharded() {
    using Layer = ddp::FullyShardedDataParallel<Unit>;
    torch::nn::Sequential net;
    for (int i = 0; i < 4; ++i) net->push_back(Layer(Unit(injected_fault_)));
    ddp::FullyShardedDataParallel model(net);
    for (int step = 0; step < 4; ++step) model->forward(torch::ones({2, 8})).sum().backward();
  }

  // Rank 1 runs out of input before the fault.
  template <typename Model, typename Step>
  void join(Model& model, const Step& step) {
    model->join([&] {
      for (int i = 0; i < (ddp::get_rank() == 1 ? 1 : 4); ++i) {
        if (i == 2) injected_fault_.trigger_at("join");
        step();
      }
    });
  }

  const InjectedFault& injected_fault_;
  const std::string folder_;
};

void run(
    const InjectedFault& injected_fault, const std::string& transport, int seconds, char* folder) {
  injected_fault.trigger_at("before");
  ddp::init_process_group(ddp::ProcessGroupOptions()
                              .backend(transport == "gloo" ? "gloo" : "shm")
                              .timeout(std::chrono::seconds(seconds)));
  Training(injected_fault, folder).run();
  injected_fault.trigger_at("destroy");
}

}  // namespace

int main(int argc, char** argv) {
  TORCH_CHECK(argc == 7, "expected a phase, a fault, a rank, a transport, seconds and a folder");
  std::signal(SIGTERM, SIG_IGN);
  const std::string transport = argv[4];
  const bool is_other_host = transport == "hosts" && rank_of_this() == world_size() - 1;
  const bool must_skip = is_other_host && !use_own_boot_id();
  wait_for_all_ranks(argv[6]);
  if (must_skip) return kSkipped;  // after wait_for_all_ranks: the others wait there
  at::set_num_threads(1);

  const InjectedFault injected_fault(argv[1], argv[2], rank_of_this() == std::atoi(argv[3]));
  const auto train = [&] { run(injected_fault, transport, std::atoi(argv[5]), argv[6]); };
  if (injected_fault.is_victim()) {
    train();  // its exception leaves main
    return EXIT_SUCCESS;
  }
  const auto text = ddp::problem_of(train);
  if (!text.empty()) print_event("learned", text);
  if (ddp::is_initialized()) ddp::destroy_process_group();
  print_event("left");
  return text.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace fault_world
