// What a sharded model has in files, and what it takes from them.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <ddp/ddp.h>

#include "support/archives.h"
#include "support/error_of.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

using namespace ddp::testing;
using ddp::FullyShardedDataParallel;
using ddp::FullyShardedOptions;

namespace {

using Dict = torch::OrderedDict<std::string, at::Tensor>;

FullyShardedOptions cut_over(const Rank& self) {
  return FullyShardedOptions().process_group(self.group);
}

/// The head has the embedding's weight.
struct Tied : torch::nn::Module {
  Tied()
      : tokens(register_module("tokens", torch::nn::Embedding(7, 4))),
        head(register_module("head", std::make_shared<torch::nn::Module>())) {
    head->register_parameter("weight", tokens->weight);
    head->register_parameter("bias", torch::ones({7}));
  }
  at::Tensor forward(const at::Tensor& ids) {
    return tokens->forward(ids).matmul(tokens->weight.t());
  }
  torch::nn::Embedding tokens;
  std::shared_ptr<torch::nn::Module> head;
};

const std::vector<std::string> kTiedNames{"head.bias", "head.weight", "tokens.weight"};

std::vector<std::string> sorted(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  return names;
}

Dict state_of(FullyShardedDataParallel<std::shared_ptr<Tied>>& model, const Rank& self) {
  return ddp::full_state_dict(*model, 0, self.group);
}

}  // namespace

TEST_CASE("a tied parameter has both names in files", "[ranks][sharded][files]") {
  const TemporaryFolder folder;
  const auto saved = run_ranks<Dict>(2, [&](const Rank& self) {
    FullyShardedDataParallel model(std::make_shared<Tied>(), cut_over(self));
    ddp::Checkpointer checkpointer(
        folder.path(), ddp::CheckpointerOptions().process_group(self.group).background(false));
    checkpointer.add("model", model).save(1);
    return state_of(model, self);
  })[0];
  CHECK(sorted(saved.keys()) == kTiedNames);
  CHECK(torch::equal(saved["head.weight"], saved["tokens.weight"]));

  const auto name = GENERATE(as<std::string>(), "c.pt", "c.safetensors", "d.pt", "d.safetensors");
  const auto path = folder.file(name);
  CAPTURE(name);
  if (name[0] == 'c') {
    ddp::consolidate_checkpoint(folder.path(), 1, path);
  } else if (name == "d.pt") {
    ddp::save_state_dict(saved, path);
  } else {
    ddp::save_safetensors(saved, path);
  }
  if (name.find(".pt") != std::string::npos) {
    Tied plain;
    ddp::load_state_dict(plain, path);  // strict
    CHECK(torch::equal(plain.tokens->weight, saved["tokens.weight"]));
    CHECK(plain.head->parameters()[0].is_same(plain.tokens->weight));
  } else {
    const auto loaded = ddp::load_safetensors(path);
    CHECK(sorted(loaded.keys()) == kTiedNames);
    for (const auto& item : loaded) CHECK(torch::equal(item.value(), saved[item.key()]));
  }
  const auto on_three = run_ranks<Dict>(3, [&](const Rank& self) {
    FullyShardedDataParallel model(std::make_shared<Tied>(), cut_over(self));
    ddp::load_full_state_dict(*model, path, self.group);
    return state_of(model, self);
  })[0];
  for (const auto& item : saved) CHECK(torch::equal(on_three[item.key()], item.value()));
}

TEST_CASE(
    "load() converts a file's values once, to the model's dtypes", "[ranks][sharded][files]") {
  const auto of_file = GENERATE(torch::kFloat, torch::kDouble, torch::kBFloat16);
  const auto of_forward = GENERATE(torch::kFloat, torch::kBFloat16);
  const bool while_whole = GENERATE(false, true);
  CAPTURE(of_file, of_forward, while_whole);
  const auto layers = [] {
    return torch::nn::Sequential(torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(3));
  };
  auto plain = layers();
  plain->to(of_file);
  const torch::NoGradGuard no_grad;
  for (auto& tensor : {plain->parameters()[0], plain->buffers()[0]}) {
    tensor.copy_(torch::randn(tensor.sizes(), torch::kDouble));
  }
  const auto bytes = bytes_of_archive(*plain);
  const auto loaded = run_ranks<Dict>(2, [&](const Rank& self) {
    const auto policy =
        ddp::MixedPrecisionPolicy().param_dtype(of_forward).buffer_dtype(of_forward);
    FullyShardedDataParallel model(
        layers(), cut_over(self).mp_policy(policy).ignored_parameters({"0.bias"}));
    auto archive = archive_of(bytes);
    std::unique_ptr<ddp::SummonFullParams> whole;
    if (while_whole) whole = std::make_unique<ddp::SummonFullParams>(*model, /*write_back=*/true);
    model->load(archive);
    whole.reset();
    return ddp::full_state_dict(*model, 0, self.group);
  })[0];
  for (const auto& item : plain->named_parameters()) {
    CHECK(loaded[item.key()].scalar_type() == torch::kFloat);
    const bool has_digits_of_forward = while_whole && item.key() != "0.bias";
    const auto value = has_digits_of_forward ? item.value().to(of_forward) : item.value();
    CHECK(torch::equal(loaded[item.key()], value.to(torch::kFloat)));
  }
  const auto mean = plain->named_buffers()["1.running_mean"].to(of_forward);
  CHECK(loaded["1.running_mean"].scalar_type() == of_forward);
  CHECK(torch::equal(loaded["1.running_mean"], mean));
  CHECK(loaded["1.num_batches_tracked"].scalar_type() == torch::kLong);
}

TEST_CASE("a file of another dtype that does not fit changes nothing", "[ranks][sharded][files]") {
  torch::nn::Sequential other(torch::nn::Linear(5, 4), torch::nn::BatchNorm1d(3));
  other->to(torch::kDouble);
  const auto bytes = bytes_of_archive(*other);
  const auto errors = errors_of_ranks(2, [&](const Rank& self) {
    FullyShardedDataParallel model(
        torch::nn::Sequential(torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(3)), cut_over(self));
    const auto before = ddp::full_state_dict(*model, 0, self.group);
    auto archive = archive_of(bytes);
    const auto error = error_of([&] { model->load(archive); });
    TORCH_CHECK(error.find("of sizes [3, 5], got one of [4, 5]") != std::string::npos, error);
    const auto after = ddp::full_state_dict(*model, 0, self.group);
    for (const auto& item : before) {
      TORCH_CHECK(after[item.key()].scalar_type() == item.value().scalar_type(), item.key());
      TORCH_CHECK(torch::equal(after[item.key()], item.value()), item.key());
    }
  });
  CHECK(errors == std::vector<std::string>(2));
}

TEST_CASE("buffers are rank 0's on all replicas of a sharded model", "[ranks][sharded][files]") {
  const auto means = run_ranks<double>(4, [](const Rank& self) {
    const auto mesh = ddp::init_device_mesh({2, 2}, {"replicate", "shard"}, self.group);
    torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    FullyShardedDataParallel model(net, FullyShardedOptions().mesh(mesh));
    const auto batch = torch::arange(8.0).view({4, 2}) + 10 * self.rank;
    model->forward(batch).sum().backward();
    return model->named_buffers()["1.running_mean"].sum().item<double>();
  });
  for (const auto mean : means) CHECK(mean == means[0]);
  CHECK(means[0] != 0);
}
