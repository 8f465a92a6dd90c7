// Trains on when ranks are killed: `ddprun -n 4 --elastic elastic`, and then `kill -9` one of the
// processes that it names.
#include <ddp/ddp.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>

namespace {

// The same points on every rank: y = sin(3x).
torch::Tensor make_points() {
  const auto x = torch::linspace(-1, 1, 2048).view({-1, 1});
  return torch::cat({x, torch::sin(3 * x)}, 1);
}

void tell(const ddp::ElasticGeneration& generation) {
  std::ostringstream line;
  line << "generation " << generation.number << ": rank " << generation.rank << " of "
       << generation.size << ", step " << generation.steps;
  if (generation.repeated > 0) line << " is repeated";
  if (!generation.why.empty()) line << " (" << generation.why << ")";
  std::cout << line.str() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  // A step of a larger model takes about this long.
  const std::chrono::milliseconds pause(argc > 1 ? std::atoi(argv[1]) : 20);
  ddp::Elastic run;  // takes the place of ddp::init_process_group()

  auto points = torch::data::datasets::TensorDataset(make_points())
                    .map(torch::data::transforms::Stack<torch::data::TensorExample>());
  ddp::DistributedSampler sampler(*points.size());
  auto loader = torch::data::make_data_loader(points, sampler, /*options=*/32);
  ddp::BatchStream batches(*loader, sampler, /*epochs=*/30);

  torch::nn::Sequential net(torch::nn::Linear(1, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  ddp::DistributedDataParallel model(net);
  torch::optim::Adam optimizer(model->parameters(), /*lr=*/1e-2);

  double loss = 0;
  run.add("model", model).add("optimizer", optimizer).add("batches", batches);
  run.on_change(tell);
  run.loop([&] {
    const auto batch = batches.next();
    if (!batch) return false;
    std::this_thread::sleep_for(pause);
    optimizer.zero_grad();
    const auto parts = batch->data.chunk(2, /*dim=*/1);
    const auto error = torch::mse_loss(model->forward(parts[0]), parts[1]);
    error.backward();
    run.step(optimizer);  // takes the place of optimizer.step()
    loss = error.item<double>();
    return true;
  });
  if (ddp::is_main()) std::cout << "loss " << loss << " after " << run.steps() << " steps\n";
}
