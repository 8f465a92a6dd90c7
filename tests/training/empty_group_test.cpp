// The empty group that new_group() gives to ranks that are not in it: an error wherever a group is
// given, and never the default group.
#include <functional>
#include <map>
#include <string>

#include <ddp/checkpointer.h>
#include <ddp/ddp.h>
#include <ddp/fully_sharded.h>
#include <ddp/grad_scaler.h>
#include <ddp/int8_compress.h>
#include <ddp/model_averager.h>
#include <ddp/parallel_attention.h>
#include <ddp/parallel_linear.h>
#include <ddp/pipeline.h>
#include <ddp/power_sgd.h>
#include <ddp/sync_batch_norm.h>
#include <ddp/top_k.h>
#include <ddp/vocab_parallel.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/error_of.h"
#include "support/temporary_folder.h"

#include "support/catch.h"

namespace ddp {
namespace {

using testing::error_of;

TEST_CASE("an empty group is an error of each wrapper, layer and hook", "[errors][pure]") {
  // The default group, which none of them may take instead.
  init_process_group(
      ProcessGroupOptions().rank(0).world_size(1).store(c10::make_intrusive<c10d::HashStore>()));
  const testing::TemporaryFolder folder;
  const ProcessGroup none;
  const auto wrap = [](const GroupArg& group) {
    return DistributedDataParallel<torch::nn::Linear>(
        torch::nn::Linear(2, 2), DistributedDataParallelOptions().process_group(group));
  };
  const std::map<std::string, std::function<void(const GroupArg&)>> takes{
      {"DistributedDataParallel", [&](const GroupArg& group) { wrap(group); }},
      {"ZeroRedundancyOptimizer",
       [&](const GroupArg& group) {
         auto model = wrap({});
         ZeroRedundancyOptimizer<torch::optim::SGD> optimizer(
             model, torch::optim::SGDOptions(0.1), ZeroOptions().process_group(group));
       }},
      {"FullyShardedDataParallel",
       [](const GroupArg& group) {
         FullyShardedDataParallel<torch::nn::Linear> model(
             torch::nn::Linear(2, 2), FullyShardedOptions().process_group(group));
       }},
      {"PipelineStage",
       [](const GroupArg& group) {
         const auto loss = [](const at::Tensor& y, const at::Tensor&) { return y.sum(); };
         PipelineStage stage(
             torch::nn::Linear(2, 2), 0, 1, loss, PipelineOptions().process_group(group));
       }},
      {"ColumnParallelLinear",
       [](const GroupArg& group) {
         ColumnParallelLinear layer(ColumnParallelLinearOptions(2, 2).process_group(group));
       }},
      {"RowParallelLinear",
       [](const GroupArg& group) {
         RowParallelLinear layer(RowParallelLinearOptions(2, 2).process_group(group));
       }},
      {"VocabParallelEmbedding",
       [](const GroupArg& group) {
         VocabParallelEmbedding layer(VocabParallelEmbeddingOptions(4, 2).process_group(group));
       }},
      {"ParallelMultiheadAttention",
       [](const GroupArg& group) {
         ParallelMultiheadAttention layer(
             ParallelMultiheadAttentionOptions(4, 2).process_group(group));
       }},
      {"SyncBatchNorm",
       [](const GroupArg& group) {
         SyncBatchNorm layer(SyncBatchNormOptions(2).process_group(group));
       }},
      {"convert_sync_batchnorm",
       [](const GroupArg& group) {
         torch::nn::Sequential net(torch::nn::BatchNorm1d(2));
         convert_sync_batchnorm(*net, group);
       }},
      {"Checkpointer",
       [&](const GroupArg& group) {
         Checkpointer saves(folder.path(), CheckpointerOptions().process_group(group));
       }},
      {"PeriodicModelAverager", [](const GroupArg& group) { PeriodicModelAverager(2, 0, group); }},
      {"GradScaler",
       [](const GroupArg& group) {
         GradScaler(GradScalerOptions().found_inf_groups({group.get()}));
       }},
      {"scaled_lr", [](const GroupArg& group) { scaled_lr(0.1, group); }},
      {"all_reduce", [](const GroupArg& group) { hooks::all_reduce(group); }},
      {"fp16_compress", [](const GroupArg& group) { hooks::fp16_compress(group); }},
      {"bf16_compress", [](const GroupArg& group) { hooks::bf16_compress(group); }},
      {"int8_compress", [](const GroupArg& group) { hooks::int8_compress({}, group); }},
      {"fp8_compress", [](const GroupArg& group) { hooks::fp8_compress({}, group); }},
      {"power_sgd", [](const GroupArg& group) { hooks::power_sgd({}, group); }},
      {"top_k", [](const GroupArg& group) { hooks::top_k({}, group); }}};
  for (const auto& item : takes) {
    CAPTURE(item.first);
    // Groups in a list have no default.
    if (item.first != "GradScaler") CHECK(error_of([&] { item.second({}); }).empty());
    CHECK_THAT(
        error_of([&] { item.second(none); }),
        ContainsText("expected a group this process is a member of, got an empty one"));
  }
  destroy_process_group();
}

}  // namespace
}  // namespace ddp
