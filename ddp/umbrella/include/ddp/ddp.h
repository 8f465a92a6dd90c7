#pragma once

/// Everything a training program needs, in one include.
///
/// Example:
/// ```
/// ddp::init_process_group();                       // RANK, WORLD_SIZE, ... set by ddprun
/// Net net;
/// ddp::DistributedDataParallel model(net);
/// ddp::DistributedSampler sampler(dataset.size().value());
/// for (size_t epoch = 0; epoch < 10; ++epoch) {
///   sampler.set_epoch(epoch);
///   for (auto& batch : *loader) {
///     optimizer.zero_grad();
///     loss(model->forward(batch.data), batch.target).backward();  // gradients averaged here
///     optimizer.step();
///   }
/// }
/// ```
#include <ddp/activation_checkpoint.h>
#include <ddp/autocast.h>
#include <ddp/averaged_model.h>
#include <ddp/batch_stream.h>
#include <ddp/captured_step.h>
#include <ddp/checkpointer.h>
#include <ddp/collectives.h>
#include <ddp/comm_hooks.h>
#include <ddp/consolidate_checkpoint.h>
#include <ddp/context_parallel.h>
#include <ddp/datasets.h>
#include <ddp/deferred_init.h>
#include <ddp/device_mesh.h>
#include <ddp/diloco.h>
#include <ddp/distributed_data_parallel.h>
#include <ddp/distributed_parameters.h>
#include <ddp/elastic.h>
#include <ddp/elastic_errors.h>
#include <ddp/equal_batches.h>
#include <ddp/find_nonfinite_output.h>
#include <ddp/flight_record.h>
#include <ddp/full_state_dict.h>
#include <ddp/fully_sharded.h>
#include <ddp/functional.h>
#include <ddp/grad_scaler.h>
#include <ddp/gradients.h>
#include <ddp/int8_compress.h>
#include <ddp/join.h>
#include <ddp/length_grouped_sampler.h>
#include <ddp/lr_cycles.h>
#include <ddp/lr_scheduler.h>
#include <ddp/main_first.h>
#include <ddp/metrics.h>
#include <ddp/metrics_log.h>
#include <ddp/model_averager.h>
#include <ddp/optim.h>
#include <ddp/output_tensors.h>
#include <ddp/pad_collate.h>
#include <ddp/parallel_attention.h>
#include <ddp/parallel_linear.h>
#include <ddp/parameter_layout.h>
#include <ddp/pipeline.h>
#include <ddp/pipeline_schedule.h>
#include <ddp/pipeline_stats.h>
#include <ddp/power_sgd.h>
#include <ddp/preemption_notice.h>
#include <ddp/prefetch.h>
#include <ddp/prepare.h>
#include <ddp/process_group.h>
#include <ddp/profiler.h>
#include <ddp/reduction_stats.h>
#include <ddp/replicas.h>
#include <ddp/safetensors.h>
#include <ddp/sampler.h>
#include <ddp/save_on_host.h>
#include <ddp/scripted_module.h>
#include <ddp/seed_all.h>
#include <ddp/set_deterministic.h>
#include <ddp/sharded_stream.h>
#include <ddp/spawn.h>
#include <ddp/state_dict.h>
#include <ddp/stream_sources.h>
#include <ddp/sync_batch_norm.h>
#include <ddp/tensor_parallel_rng.h>
#include <ddp/top_k.h>
#include <ddp/version.h>
#include <ddp/vocab_parallel.h>
#include <ddp/weighted_sampler.h>
#include <ddp/zero.h>
