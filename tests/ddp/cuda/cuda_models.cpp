// Models that are cut over ranks, each beside one process with the whole model.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "cuda_world.h"
#include "support/compare.h"
#include "support/error_of.h"

namespace ddp_cuda_world {

namespace {

using Unit = ddp::FullyShardedDataParallel<torch::nn::Linear>;
using Sharded = ddp::FullyShardedDataParallel<Net>;

ddp::FullyShardedOptions sharded_options() {
  return ddp::FullyShardedOptions().process_group(group);
}

/// make_net(), whose linear layers are units.
Sharded make_sharded(const ddp::FullyShardedOptions& options) {
  auto whole = make_net();
  Net net;
  for (size_t i = 0; i < whole->size(); ++i) {
    if (auto* linear = (*whole)[i]->as<torch::nn::Linear>()) {
      net->push_back(Unit(
          torch::nn::Linear(
              std::static_pointer_cast<torch::nn::LinearImpl>(linear->shared_from_this())),
          options));
    } else {
      net->push_back(torch::nn::Functional(torch::tanh));
    }
  }
  return Sharded(net, options);
}

/// The whole model, on every rank.
at::Tensor gathered(Sharded& model) {
  const ddp::SummonFullParams whole(*model);
  return ddp::testing::flattened(model->parameters());
}

void shard_model(const ddp::FullyShardedOptions& options, double tolerance = 1e-5) {
  auto model = make_sharded(options);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  auto whole = make_net();
  torch::optim::SGD whole_optimizer(whole->parameters(), 0.1);
  const auto check_after = [&](const std::string& when) {
    const auto off = (gathered(model) - flat(whole)).abs();
    TORCH_CHECK(
        off.max().item<double>() <= tolerance, "after ", when, " parameters are off by ",
        off.max().item<double>(), " at ", off.argmax().item<int64_t>(), " of ", off.numel());
  };
  check_after("construction");
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(model->forward(own_batch(step))).backward();
    optimizer.step();
    whole_optimizer.zero_grad();
    loss_of(whole->forward(all_batches(step))).backward();
    whole_optimizer.step();
    check_after("step " + std::to_string(step));
  }
}

void refuse_two_devices() {
  if (group->getDeviceTypes().size() < 2) return;  // NCCL alone shards no unit on the CPU
  torch::nn::Linear on_gpu(20, 20);
  on_gpu->to(kGpu);
  Net net(Unit(on_gpu, sharded_options()), Unit(torch::nn::Linear(20, 20), sharded_options()));
  const auto text =
      ddp::testing::error_of<c10::ValueError>([&] { const Sharded model(net, sharded_options()); });
  TORCH_CHECK(text.find("all units of a model on one device") != std::string::npos, text);
}

void shard_in_bfloat16() {
  shard_model(
      sharded_options().mp_policy(
          ddp::MixedPrecisionPolicy().param_dtype(at::kBFloat16).reduce_dtype(at::kFloat)),
      2e-2);
}

void clip_and_save() {
  const torch::optim::AdamWOptions adam(1e-2);
  auto whole = make_net();
  torch::optim::AdamW whole_optimizer(whole->parameters(), adam);
  const auto step_whole = [&](int step) {
    whole_optimizer.zero_grad();
    loss_of(whole->forward(all_batches(step))).backward();
    torch::nn::utils::clip_grad_norm_(whole->parameters(), 0.05);
    whole_optimizer.step();
  };
  auto model = make_sharded(sharded_options());
  auto optimizer = std::make_unique<ddp::optim::AdamW>(model->parameters(), adam);
  const auto step_sharded = [&](int step) {
    optimizer->zero_grad();
    loss_of(model->forward(own_batch(step))).backward();
    ddp::clip_grad_norm_(*model, 0.05);
    optimizer->step();
  };
  for (int step = 0; step < kSteps; ++step) {
    step_whole(step);
    step_sharded(step);
  }
  // Rank 0 names the folder; NCCL's ranks of one host have a file system in common.
  auto id = torch::tensor({static_cast<int64_t>(::getpid())}, torch::kLong).to(kGpu);
  ddp::broadcast(id, 0, group);
  const auto folder = "/tmp/ddp_cuda_models_" + std::to_string(id.item<int64_t>());
  {
    ddp::Checkpointer saver(folder, ddp::CheckpointerOptions().process_group(group));
    saver.add("model", model).add("optimizer", *optimizer);
    saver.save(kSteps);
    saver.wait();
  }
  model = make_sharded(sharded_options());
  optimizer = std::make_unique<ddp::optim::AdamW>(model->parameters(), adam);
  {
    ddp::Checkpointer loader(folder, ddp::CheckpointerOptions().process_group(group));
    loader.add("model", model).add("optimizer", *optimizer);
    TORCH_CHECK(loader.load_latest().has_value(), "no checkpoint was found");
  }
  step_whole(kSteps);
  step_sharded(kSteps);
  const auto off = (gathered(model) - flat(whole)).abs().max().item<double>();
  TORCH_CHECK(off <= 1e-3, "parameters are off by ", off);
}

void cut_layers(bool sequence) {
  const int64_t world = ddp::get_world_size(group), rank = ddp::get_rank(group);
  const auto own = [&](const at::Tensor& t, int64_t dim) {
    return t.chunk(world, dim)[static_cast<size_t>(rank)];
  };
  const auto x = drawn({8, 4, 16}, 1), out_weights = drawn({8, 4, 16}, 6);
  std::vector<at::Tensor> whole{
      x, drawn({32, 16}, 2), drawn({32}, 3), drawn({16, 32}, 4), drawn({16}, 5)};
  for (auto& t : whole) t = (t * 0.3).requires_grad_();
  const auto y =
      torch::linear(torch::gelu(torch::linear(whole[0], whole[1], whole[2])), whole[3], whole[4]);
  (y * out_weights).sum().backward();

  ddp::ColumnParallelLinear up(
      ddp::ColumnParallelLinearOptions(16, 32).sequence_parallel(sequence).process_group(group),
      whole[1].detach(), whole[2].detach());
  ddp::RowParallelLinear down(
      ddp::RowParallelLinearOptions(32, 16).sequence_parallel(sequence).process_group(group),
      whole[3].detach(), whole[4].detach());
  const auto cut = [&](const at::Tensor& t) { return sequence ? own(t, 0) : t; };
  const auto input = cut(whole[0].detach()).clone().requires_grad_();
  const auto output = down->forward(torch::gelu(up->forward(input)));
  (output * cut(out_weights)).sum().backward();
  check_near("the output", output, cut(y));
  check_near("the input's gradient", input.grad(), cut(whole[0].grad()));
  check_near("the column layer's", up->weight.grad(), own(whole[1].grad(), 0));
  check_near("the row layer's", down->weight.grad(), own(whole[3].grad(), 1));
  check_near("the row layer's bias's", down->bias.grad(), whole[4].grad());
}

void cut_attention() {
  torch::manual_seed(3);
  ddp::ParallelMultiheadAttention attention(
      ddp::ParallelMultiheadAttentionOptions(16, 4).is_causal(true).process_group(group));
  attention->to(kGpu);
  ddp::VocabParallelEmbedding embedding(
      ddp::VocabParallelEmbeddingOptions(32, 16).process_group(group));
  embedding->to(kGpu);
  const auto tokens = torch::arange(24, torch::kLong).reshape({6, 4}).to(kGpu);
  const auto y = attention->forward(embedding->forward(tokens));
  const auto loss = y.pow(2).mean();
  loss.backward();
  auto sum = loss.detach().clone();
  ddp::all_reduce(sum, group);
  TORCH_CHECK(
      std::abs(sum.item<double>() - ddp::get_world_size(group) * loss.item<double>()) < 1e-5,
      "the ranks' losses differ");
  for (const auto& p : attention->parameters()) TORCH_CHECK(p.grad().isfinite().all().item<bool>());
}

/// Layer k, with the same values wherever it is made.
struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int k) {
    const torch::NoGradGuard no_grad;
    to(kGpu);
    for (auto& p : parameters()) p.copy_(drawn(p.sizes().vec(), 100 + k) * 0.4);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(fc->forward(x)); }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(16, 16))};
};
TORCH_MODULE(Layer);

void pipe(ddp::PipelineSchedule schedule) {
  const int world = ddp::get_world_size(group), rank = ddp::get_rank(group);
  const auto loss_fn = [](const at::Tensor& y, const at::Tensor& target) {
    return (y - target).pow(2).mean();
  };
  const int chunks = schedule == ddp::PipelineSchedule::Interleaved ? 2 : 1;
  std::vector<Layer> own;
  for (int c = 0; c < chunks; ++c) own.emplace_back(c * world + rank);
  ddp::PipelineStage stage(
      own, rank, world, loss_fn,
      ddp::PipelineOptions().process_group(group).schedule(schedule).microbatches(4));
  torch::optim::SGD optimizer(stage.parameters(), 0.1);
  torch::nn::Sequential whole;
  for (int k = 0; k < chunks * world; ++k) whole->push_back(Layer(k));
  torch::optim::SGD whole_optimizer(whole->parameters(), 0.1);
  for (int step = 0; step < kSteps; ++step) {
    const auto x = drawn({10, 16}, 10 + step), target = drawn({10, 16}, 20 + step);
    whole_optimizer.zero_grad();
    loss_fn(whole->forward(x), target).backward();
    whole_optimizer.step();
    optimizer.zero_grad();
    stage.step(
        rank == 0 ? std::vector<at::Tensor>{x} : std::vector<at::Tensor>{},
        rank + 1 == world ? target : at::Tensor());
    optimizer.step();
  }
  size_t k = 0;
  for (int c = 0; c < chunks; ++c) {
    const auto expected = whole[static_cast<size_t>(c * world + rank)]->parameters();
    for (const auto& p : expected) check_near("a parameter", stage.parameters()[k++], p);
  }
}

using Attention = at::Tensor (*)(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const ddp::GroupArg&, bool,
    std::optional<double>);

void cut_sequence(Attention attention) {
  std::vector<at::Tensor> whole;
  for (uint64_t seed : {1, 2, 3}) whole.push_back(drawn({2, 4, 16, 8}, seed).requires_grad_());
  const auto weights = drawn({2, 4, 16, 8}, 4);
  const auto y = at::scaled_dot_product_attention(whole[0], whole[1], whole[2], {}, 0, true);
  (y * weights).sum().backward();
  const auto cut = [&](const at::Tensor& t) {
    return ddp::functional::context_shard(t.detach(), 2, group).clone();
  };
  std::vector<at::Tensor> own;
  for (const auto& t : whole) own.push_back(cut(t).requires_grad_());
  const auto part = attention(own[0], own[1], own[2], group, true, {});
  (part * cut(weights)).sum().backward();
  check_near("the output", part, cut(y));
  for (size_t i = 0; i < own.size(); ++i) {
    check_near("a gradient", own[i].grad(), cut(whole[i].grad()));
  }
}

}  // namespace

std::vector<Case> cut_models() {
  return {
      {"fully sharded", [] { shard_model(sharded_options()); }},
      {"fully sharded, no prefetch", [] { shard_model(sharded_options().prefetch(0)); }},
      {"fully sharded, kept whole",
       [] { shard_model(sharded_options().reshard_after_forward(false)); }},
      {"fully sharded, two devices", refuse_two_devices},
      {"fully sharded, bfloat16", shard_in_bfloat16},
      {"fully sharded, clipped and saved", clip_and_save},
      {"cut layers", [] { cut_layers(false); }},
      {"cut layers and sequences", [] { cut_layers(true); }},
      {"cut attention", cut_attention},
      {"a pipeline", [] { pipe(ddp::PipelineSchedule::OneFOneB); }},
      {"a pipeline, all forwards first", [] { pipe(ddp::PipelineSchedule::GPipe); }},
      {"an interleaved pipeline", [] { pipe(ddp::PipelineSchedule::Interleaved); }},
      {"heads go round", [] { cut_sequence(ddp::functional::all_to_all_attention); }}};
}

}  // namespace ddp_cuda_world
