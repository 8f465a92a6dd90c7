// Reads the files of tensor_files_interop.py (argv[1]), and writes some for it (argv[2]).
#include <iostream>
#include <string>

#include <ddp/ddp.h>
#include <torch/torch.h>

namespace ddp_tensor_files_interop {

namespace {

void convert(const std::string& from, const std::string& to) {
  const auto dict = ddp::load_safetensors(from + "/all.safetensors");
  ddp::save_safetensors(dict, to + "/all.safetensors", {{"by", "ddp \"\xC3\xA9\""}});
  ddp::save_state_dict(dict, to + "/all.pt");
  TORCH_CHECK(ddp::safetensors_metadata(from + "/all.safetensors").at("by") == "\xE2\x82\xAC");
  ddp::save_state_dict(ddp::load_safetensors(from + "/m.safetensors.index.json"), to + "/index.pt");
}

void save_models(const std::string& from, const std::string& to) {
  ddp::init_process_group();
  const auto layer = [] {
    return ddp::ColumnParallelLinear(
        ddp::ColumnParallelLinearOptions(4, 6), torch::zeros({6, 4}), torch::zeros({6}));
  };
  // Python's files, of torch.save and of safetensors.
  auto model = layer(), other = layer();
  ddp::load_full_state_dict(model, from + "/linear.pt");
  ddp::load_full_state_dict(other, from + "/linear.safetensors");
  TORCH_CHECK(torch::equal(model->weight, other->weight) && torch::equal(model->bias, other->bias));

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  ddp::Checkpointer checkpointer(to + "/checkpoints");
  checkpointer.add("model", model).add("optimizer", optimizer);
  for (int64_t step = 1; step <= 3; ++step) {
    optimizer.zero_grad();
    model->forward(torch::ones({2, 4})).sin().sum().backward();
    if (step == 3) ddp::save_state_dict(ddp::full_state_dict(model), to + "/full.pt");
    optimizer.step();
    if (step < 3) checkpointer.save(step);
  }
  checkpointer.wait();
  ddp::save_state_dict(ddp::full_state_dict(model), to + "/next.pt");
  ddp::destroy_process_group();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    convert(argv[1], argv[2]);
    save_models(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}

}  // namespace ddp_tensor_files_interop
