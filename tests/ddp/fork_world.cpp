// fork_world BACKEND: a rank forks a process that has copies of its wrapper, optimizer and group.
// Whatever the child does with them, the rank continues to train unchanged.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_fork_world {

namespace {

// Static objects are destroyed last, also after the library's thread-local objects. Other worlds of
// the program do not arm this one.
struct MakesTensorsAtExit {
  ~MakesTensorsAtExit() {
    if (!is_armed) return;
    // Overwrites freed memory, and keeps it allocated.
    for (int i = 0; i < 1024; ++i) {
      kept[i] = std::malloc(16 << (i % 4));
      std::memset(kept[i], 0xff, 16 << (i % 4));
    }
    for (int i = 0; i < 64; ++i) (void)torch::ones({1024 * (i + 1)});
  }
  bool is_armed = false;
  void* kept[1024];
} at_exit;

enum class Child { Exits, Writes, DropsModel, DropsAll, Throws };

struct ChildThrew : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Model = ddp::DistributedDataParallel<torch::nn::Linear>;

// The gradient of w * x is x, on this rank.
void step(Model& model, torch::optim::Optimizer& optimizer, double x) {
  optimizer.zero_grad();
  model->forward(torch::full({1, model->module()->weight.size(1)}, x)).sum().backward();
}

bool all_are(const torch::Tensor& t, double value) {
  return torch::equal(t, torch::full_like(t, value));
}

void fork_child(Child what, Model& model, std::shared_ptr<torch::optim::SGD>& optimizer) {
  const auto child = fork();
  if (child == 0) {
    alarm(20);
    if (what == Child::Writes) model->module()->weight.mutable_grad().zero_();
    if (what == Child::Throws) throw ChildThrew("a child's exception");
    if (what == Child::DropsModel || what == Child::DropsAll) {
      model = Model(nullptr);
      optimizer.reset();
    }
    if (what == Child::DropsAll) ddp::destroy_process_group();
    std::exit(EXIT_SUCCESS);
  }
  int status = -1;
  waitpid(child, &status, 0);
  TORCH_CHECK(status == 0, "expected the child to exit with 0, got status ", status);
}

void train(int64_t width, bool as_views) {
  torch::nn::Linear net(torch::nn::LinearOptions(width, 1).bias(false));
  torch::nn::init::constant_(net->weight, 1);  // makes the numbers below exact
  Model model(net, ddp::DistributedDataParallelOptions().gradient_as_bucket_view(as_views));
  auto optimizer =
      std::make_shared<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.5));
  model->step_in_backward(optimizer);
  const int size = ddp::get_world_size();
  const double mean = (size + 1) / 2.0;
  for (const auto what :
       {Child::Exits, Child::Writes, Child::DropsModel, Child::DropsAll, Child::Throws}) {
    const float weight = net->weight[0][0].item<float>();
    step(model, *optimizer, ddp::get_rank() + 1);
    fork_child(what, model, optimizer);
    TORCH_CHECK(all_are(net->weight.grad(), mean), "expected the gradient to stay");
    TORCH_CHECK(all_are(net->weight, weight - 0.5 * mean), "expected one step");
  }
  // Long enough that the other ranks check the group for failures.
  if (ddp::get_rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  step(model, *optimizer, ddp::get_rank() + 1);
  TORCH_CHECK(all_are(net->weight.grad(), mean), "expected the average");
}

}  // namespace

int main(int /*argc*/, char** argv) try {
  at_exit.is_armed = true;
  ddp::init_process_group(
      ddp::ProcessGroupOptions().backend(argv[1]).timeout(std::chrono::seconds(30)));
  // A gradient in a bucket, and one without; each as a view over one of the backends.
  const bool over_shm = std::strcmp(argv[1], "shm") == 0;
  train(1, over_shm);
  train(65536, !over_shm);
  // Store and group still work.
  std::vector<int> all;
  for (int rank = 0; rank < ddp::get_world_size(); ++rank) all.push_back(rank);
  ddp::barrier(ddp::new_group(all));
  ddp::monitored_barrier(std::chrono::seconds(20));
  ddp::destroy_process_group();
  return EXIT_SUCCESS;
} catch (const ChildThrew&) {
  return EXIT_SUCCESS;
} catch (const std::exception& error) {
  std::fprintf(stderr, "fork_world: %s\n", error.what());
  return EXIT_FAILURE;
}

}  // namespace ddp_fork_world
