// One rank of the runs that scripted.py compares. Arguments: NET FOLDER
#include <cstdio>
#include <string>

#include <ddp/ddp.h>
#include <torch/script.h>
#include <torch/torch.h>

namespace ddp_scripted {

int main(int /*argc*/, char** argv) {
  torch::set_num_threads(1);
  ddp::init_process_group();
  const std::string name = argv[1];
  const auto file = std::string(argv[2]) + "/" + name;
  ddp::DistributedDataParallel model(torch::jit::load(file + ".pt"));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    auto generator = at::detail::createCPUGenerator(10 * step + ddp::get_rank());
    const auto x = torch::randn({6, 64}, generator, torch::kDouble);
    const auto y = torch::randint(10, {6}, generator, torch::kLong);
    const auto loss = torch::nn::functional::cross_entropy(model->forward({x}).toTensor(), y);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    std::printf("%s %d %d: %.12g\n", name.c_str(), step, ddp::get_rank(), loss.item<double>());
  }
  if (ddp::get_rank() == 0) model->module().save(file + ".out.pt");
  ddp::destroy_process_group();
  return 0;
}

}  // namespace ddp_scripted
